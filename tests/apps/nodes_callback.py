"""Shows what the launching process gets of a job."""

from __future__ import annotations

from typing import Any

from hydra.experimental.callback import Callback


class Show(Callback):
    def on_job_end(self, job_return: Any, **_: Any) -> None:
        print(f"returned {job_return.return_value}", flush=True)
