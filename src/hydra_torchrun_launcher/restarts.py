"""What ranks that torchrun starts again must find as it was: the output directory, and the values
that the ranks before them shared (in ranks that torchrun started).
"""

from __future__ import annotations

import itertools
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra_torchrun_launcher import tagged

_calls = itertools.count()
"""A script may run several task functions, each with a directory of its own."""


class Kept:
    """A file in torchrun's own folder for a start, on each node.

    It is there as long as torchrun's logs are, and no two starts have the same folder. Without one
    (in ranks of others) nothing is kept.
    """

    def __init__(self) -> None:
        """Find the folder: the rank's error file is in its attempt_<n>/<local rank>/."""
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        # The task may run in another directory.
        self.error_file = os.path.abspath(error_file) if error_file else ""
        attempt = Path(self.error_file).parent.parent
        is_torchruns = attempt.name.startswith("attempt_")
        self._file = attempt.parent / f"hydra_job_{next(_calls)}.json" if is_torchruns else None

    def write(self, output_dir: str, caches: list[Any]) -> None:
        """Keep a job's output directory and its configs' caches of resolvers."""
        if self._file is not None:
            with suppress(OSError):  # then ranks that start again get a directory of their own
                unfinished = self._file.with_suffix(f".{os.getpid()}")
                unfinished.write_text(tagged.dumps({"output_dir": output_dir, "caches": caches}))
                unfinished.replace(self._file)

    def read(self) -> dict[str, Any]:
        """Return what an earlier attempt has kept, or an empty mapping."""
        if self._file is None or not self._file.exists():
            return {}
        return dict(tagged.loads(self._file.read_text()))
