"""A Hydra callback that removes the job's directory before its ranks start."""

from __future__ import annotations

import shutil
from typing import Any

from hydra.experimental.callback import Callback


class Removing(Callback):
    """Removes what run_job has just made."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        """Remove the output directory."""
        shutil.rmtree(config.hydra.runtime.output_dir)
