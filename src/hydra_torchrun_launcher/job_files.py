"""Names of the files a job leaves, for writer and reader alike (used in all)."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

STDOUT = "stdout.log"
STDERR = "stderr.log"
ERROR = "error.json"
NO_LOG = "none, by hydra.output_subdir=null; hydra.launcher.log_dir gives ranks files"
"""Said instead of a log's path where a job leaves no files."""


def claim_attempt(root: Path) -> Path:
    """Make the folder of an attempt, `<root>/attempt_<n>`, after the last that is there.

    Nobody else gets it: neither another run in the same directory, now or later, nor another
    attempt of this one. `mkdir` is atomic on every file system, NFS included.
    """
    root.mkdir(parents=True, exist_ok=True)
    number = max((_number(name) for name in os.listdir(root)), default=-1)
    while True:
        number += 1
        with suppress(FileExistsError):
            (root / f"attempt_{number}").mkdir()
            return root / f"attempt_{number}"


def last_attempt(root: Path) -> Path | None:
    """Return the folder of the last attempt that is there, or None."""
    names = os.listdir(root) if root.is_dir() else ()
    last = max(map(_number, names), default=-1)
    return root / f"attempt_{last}" if last >= 0 else None


def _number(name: str) -> int:
    digits = name.removeprefix("attempt_")
    return int(digits) if digits != name and digits.isdecimal() else -1


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
