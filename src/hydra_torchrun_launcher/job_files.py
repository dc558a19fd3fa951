"""Names of the files a job leaves, for writer and reader alike (used in all)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STDOUT = "stdout.log"
STDERR = "stderr.log"
ERROR = "error.json"


@dataclass(frozen=True)
class RankFolders:
    """Folders of one job's ranks: `<root>/attempt_<n>/<local rank>/`.

    Attributes:
        root: the job's folder for its ranks.
        first_attempt: number of this run's first attempt. It counts on from what an earlier run
            left in the same folder, so that nothing is overwritten.
    """

    root: str
    first_attempt: int

    @classmethod
    def next_free(cls, root: str) -> RankFolders:
        """Look at what lies in `root` and number this run's attempts after it."""
        found = [-1]
        if os.path.isdir(root):
            for name in os.listdir(root):
                number = name.removeprefix("attempt_")
                if number != name and number.isdigit():
                    found.append(int(number))
        return cls(root, max(found) + 1)

    def rank(self, attempt: int, local_rank: int) -> Path:
        """Return the folder of a rank; `attempt` counts from 0 in this run."""
        return Path(self.root) / f"attempt_{self.first_attempt + attempt}" / str(local_rank)


def rank_log_name(filename: str, global_rank: int) -> str:
    """Return the name of a rank's own copy of a log file: `train.log` -> `train.rank3.log`.

    Rank 0 keeps the name itself; no two processes write one file.
    """
    if global_rank == 0:
        return filename
    stem, extension = os.path.splitext(filename)
    return f"{stem}.rank{global_rank}{extension}"
