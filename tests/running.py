"""Runs apps in processes of their own for the tests, and reads what their ranks wrote."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

APPS = Path(__file__).parent / "apps"

HANG_S = 180
"""Bound against hangs, far above what any app here takes; no test measures by it."""

_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


@dataclass(frozen=True)
class Finished:
    """How an app ended.

    Attributes:
        exit_code: its status; negative: the number of the signal that killed it.
        output: standard output and error in the order of writing.
    """

    exit_code: int
    output: str


def run_app(
    app: str | Path,
    *arguments: str,
    cwd: Path,
    environ: Mapping[str, str] | None = None,
    timeout_s: float = HANG_S,
) -> Finished:
    """Run a script to its end, in a session of its own that is killed when it hangs.

    Args:
        app: a script in `apps`, by its name, or any other by its path.
        arguments: its command line.
        cwd: the directory to start it in.
        environ: variables in addition to this process's.
        timeout_s: seconds after which it counts as hanging.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
    log = cwd.with_suffix(".console")
    with log.open("wb") as console:
        process = subprocess.Popen(
            [sys.executable, str(APPS / app), *arguments],
            cwd=cwd,
            env={**inherited, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise AssertionError(
                f"{app} hung:\n{log.read_text(errors='replace')[-8000:]}"
            ) from None
    return Finished(code, log.read_text(errors="replace"))


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object under a temporary name, then rename: a reader never sees half of it."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(record))
    unfinished.rename(path)


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return the JSON objects that processes left in a folder, a file each, sorted by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
