"""A Hydra callback, beside the apps that use it, that records every call and what it sees in it."""

import json
import logging
import os
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

log = logging.getLogger(__name__)


class Recorder(Callback):
    """Write a line to `callbacks.jsonl` for each call; keep state from call to call."""

    def __init__(self, folder: str) -> None:
        """Write into `folder`."""
        self.folder = Path(folder)
        self.calls = 0
        self.results: list[str] = []

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Record the call."""
        self._record("on_run_start", config, kwargs)

    def on_run_end(self, config: Any, **kwargs: Any) -> None:
        """Record the call."""
        self._record("on_run_end", config, kwargs)

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Record the call."""
        self._record("on_multirun_start", config, kwargs)

    def on_multirun_end(self, config: Any, **kwargs: Any) -> None:
        """Record the call."""
        self._record("on_multirun_end", config, kwargs)

    def on_job_start(self, config: Any, *, task_function: Any, **kwargs: Any) -> None:
        """Record the call and the task function."""
        task = f"{task_function.__module__}.{task_function.__qualname__}"
        self._record("on_job_start", config, {**kwargs, "task_function": task})

    def on_job_end(self, config: Any, job_return: Any, **kwargs: Any) -> None:
        """Record the call and the job's return."""
        result = describe_return(job_return)
        self.results.append(result["status"])
        self._record("on_job_end", config, {**kwargs, "job_return": result})

    def _record(self, hook: str, config: Any, arguments: dict[str, Any]) -> None:
        self.calls += 1
        line = {
            "hook": hook,
            "call": self.calls,
            "results": self.results,
            "pid": os.getpid(),
            "cwd": os.getcwd(),
            "variable": os.environ.get("DIFFERENTIAL"),
            "config": OmegaConf.to_yaml(config),
            "hydra_config": None,
            "global_hydra": GlobalHydra.instance().is_initialized(),
            "log_level": logging.getLogger().level,
            "arguments": arguments,
        }
        if HydraConfig.initialized():
            hydra = HydraConfig.get()
            line["hydra_config"] = {
                "num": OmegaConf.select(hydra, "job.num", throw_on_missing=False),
                "id": OmegaConf.select(hydra, "job.id", throw_on_missing=False),
                "output_dir": OmegaConf.select(hydra, "runtime.output_dir", throw_on_missing=False),
            }
        with (self.folder / "callbacks.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        log.info("MARK %s %d", hook, self.calls)


def describe_return(job_return: Any) -> dict[str, Any]:
    """Return a job's return as plain data."""
    value = job_return._return_value  # the property raises what the job raised
    # What hydra-core 1.4 keeps for a process that unpickles the return of a failed job.
    remote = getattr(job_return, "_remote_traceback", None) or []
    if isinstance(value, BaseException):
        value = [type(value).__qualname__, str(value)]
    return {
        "overrides": job_return.overrides,
        "cfg": OmegaConf.to_yaml(job_return.cfg),
        "cfg_resolved": OmegaConf.to_yaml(job_return.cfg, resolve=True),
        "cfg_flags": [OmegaConf.is_struct(job_return.cfg), OmegaConf.is_readonly(job_return.cfg)],
        "hydra_cfg": OmegaConf.to_yaml(job_return.hydra_cfg),
        "hydra_cfg_flags": [
            OmegaConf.is_struct(job_return.hydra_cfg),
            OmegaConf.is_readonly(job_return.hydra_cfg),
        ],
        "working_dir": job_return.working_dir,
        "task_name": job_return.task_name,
        "status": job_return.status.name,
        "value": value,
        "remote_frames": [name for _, name, _ in remote if name != "_run_job"],
    }
