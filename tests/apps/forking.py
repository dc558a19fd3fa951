"""A Hydra callback that forks a process of its own, which outlives everything."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback


class Forking(Callback):
    """Forks when a job starts."""

    def __init__(self, at: int = 0) -> None:
        """Take the job's number."""
        self.at = at

    def on_job_start(self, config: Any, **_: Any) -> None:
        """Fork a child that never leaves by itself."""
        if config.hydra.job.num == self.at and os.fork() == 0:
            (Path(config.hydra.sweep.dir) / f"forked.{os.getpid()}").touch()
            while True:
                time.sleep(3600)
