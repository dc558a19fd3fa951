"""An app on a machine that does not do what is asked of it: what the operating system would refuse,
or what the kernel would not end, is made up in the launcher's own processes (start method fork).
"""

from __future__ import annotations

import errno
import importlib
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


def no_process() -> int:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def nothing(*_: Any, **__: Any) -> None:
    """Do not obey."""


def break_machine(how: str) -> None:
    """Replace what the modules of the launcher ask the operating system for."""
    if how == "frozen":
        sys.frozen = True
    if how == "files":
        soft, hard = map(int, os.environ["FILES"].split())
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if how in ("server", "servers", "keeper"):
        importlib.import_module(f"hydra_torchrun_launcher.{how}").fork = no_process
    if how == "rank":
        keeper = importlib.import_module("hydra_torchrun_launcher.keeper")
        keeper.anonymous_file = lambda _: no_process()
    if how == "unkillable":
        keeper = importlib.import_module("hydra_torchrun_launcher.keeper")
        keeper.kill_descendants = nothing
        ranks = importlib.import_module("hydra_torchrun_launcher.ranks")
        ranks.kill_tree = ranks.kill_group = nothing
        processes = importlib.import_module("hydra_torchrun_launcher.processes")
        processes._KERNEL_OBEYS_S = 2


@hydra.main(version_base="1.3", config_path=".", config_name="faults")
def main(cfg: DictConfig) -> Any:
    folder = Path(HydraConfig.get().runtime.output_dir)
    if cfg.fault == "unkillable":
        if int(os.environ["RANK"]) == 1:
            (folder / f"unkillable.{os.getpid()}").touch()
            while True:
                time.sleep(3600)
        while not list(folder.glob("unkillable.*")):
            time.sleep(0.01)
        raise ValueError("the other rank does not end")
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


if __name__ == "__main__":
    break_machine(os.environ["BROKEN"])
    main()
