"""A Hydra callback that writes down what it is given at the end of each job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import either
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback


class Recorder(Callback):
    """Appends a line to `job_end.jsonl` in the sweep directory."""

    def on_job_end(self, config: Any, job_return: JobReturn, **_: Any) -> None:
        """Record status and result."""
        result = job_return._return_value
        failed = isinstance(result, BaseException)
        record = {
            "number": either.job_number(config.hydra),
            "status": job_return.status.name,
            "type": type(result).__name__,
            "text": str(result)[:4000],
            "notes": getattr(result, "__notes__", []),
            "size": len(result) if isinstance(result, bytes) else None,
            "frames": _frames(result) if failed else [],
        }
        with (Path(config.hydra.sweep.dir) / "job_end.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


def _frames(error: BaseException) -> list[str]:
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}")
        trace = trace.tb_next
    return frames
