"""A Hydra callback that forks a process of its own, which outlives everything."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback


class Forking(Callback):
    """Forks when the first job starts."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        """Fork a child that never leaves by itself."""
        if config.hydra.job.num == 0 and os.fork() == 0:
            (Path(config.hydra.sweep.dir) / f"forked.{os.getpid()}").touch()
            while True:
                time.sleep(3600)
