"""A Hydra callback that ends the app before a job, when the job before it runs."""

import os
import time
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback


class Leave(Callback):
    """Leave before job 1."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        """Wait until a rank of job 0 ignores that it should leave; leave."""
        if config.hydra.job.num == 1:
            while not Path(os.environ["RANK_RECORDS"], "stubborn.0").exists():
                time.sleep(0.02)
            raise SystemExit(3)
