"""Names of the files a job leaves, for writer and reader alike (used in all)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STDOUT = "stdout.log"
STDERR = "stderr.log"
ERROR = "error.json"
NO_LOG = "none, by hydra.output_subdir=null; hydra.launcher.log_dir gives ranks files"
"""Said instead of a log's path where a job leaves no files."""


@dataclass(frozen=True)
class RankFolders:
    """Folders of one job's ranks: `<root>/attempt_<n>/<local rank>/`.

    Attributes:
        root: the job's folder for its ranks; None for a job that leaves no files.
        first_attempt: number of this run's first attempt. It counts on from what an earlier run
            left in the same folder, so that nothing is overwritten.
    """

    root: str | None
    first_attempt: int = 0

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

    def rank(self, attempt: int, local_rank: int) -> Path | None:
        """Return the folder of a rank; `attempt` counts from 0 in this run."""
        if self.root is None:
            return None
        return Path(self.root) / f"attempt_{self.first_attempt + attempt}" / str(local_rank)

    def make(self, attempt: int, local_rank: int) -> Path | None:
        """Make the folder of a rank and return it."""
        folder = self.rank(attempt, local_rank)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return folder


def rank_log_name(filename: str, global_rank: int, label: str) -> str:
    """Return the name of a rank's own copy of a log file: `train.log` -> `train.rank3.log`.

    Rank 0 keeps the name itself; no two processes write one file.

    Args:
        filename: the name that Hydra's job_logging has.
        global_rank: the rank.
        label: sets a job apart from others in the same directory: `train.job2.rank3.log`; empty
            for a job that has its own.
    """
    if global_rank == 0:
        return filename
    stem, extension = os.path.splitext(filename)
    return f"{stem}{'.' if label else ''}{label}.rank{global_rank}{extension}"
