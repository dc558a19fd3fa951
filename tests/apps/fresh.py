"""An app whose ranks write down what they are and what they see."""

from __future__ import annotations

import atexit
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import either
import numpy as np
import torch
import torch.backends.cudnn
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from torch.utils.data import DataLoader

log = logging.getLogger(__name__)
torch.backends.cudnn.benchmark = False
LOCK = threading.Lock()
folders: list[tempfile.TemporaryDirectory[str]] = []
np.random.get_state()  # noqa: NPY002 - numpy makes its generator when it is first used
AT_IMPORT = {
    name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "SET_BY_JOB", "OF_THE_JOB")
}

OmegaConf.register_new_resolver("from_script", lambda number: int(number) * 2)
OmegaConf.register_new_resolver("cached_in_script", time.monotonic_ns, use_cache=True)


class Color(Enum):
    RED = 1


@dataclass
class Size:
    width: int = 3
    color: Color = Color.RED


ConfigStore.instance().store(name="size", group="size", node=Size)


def exit_note(path: Path) -> None:
    path.with_suffix(".exited").touch()


def until_joined(path: Path) -> None:
    threading.main_thread().join()  # the interpreter has begun to wait for other threads
    path.with_suffix(".joined").touch()


def until_terminated(path: Path) -> None:
    def leave(*_: Any) -> None:
        path.with_suffix(".terminated").touch()
        os._exit(0)

    signal.signal(signal.SIGTERM, leave)
    path.with_suffix(".child").touch()
    while True:
        time.sleep(3600)


@either.main(version_base="1.3", config_path=".", config_name="fresh")
def main(cfg: DictConfig) -> Any:
    output = Path(HydraConfig.get().runtime.output_dir)
    path = output / f"rank{os.environ['RANK']}.json"
    atexit.register(exit_note, path)
    threading.Thread(target=until_joined, args=(path,)).start()
    log.info("told by rank %s", os.environ["RANK"])
    print("printed by rank", os.environ["RANK"])
    size = OmegaConf.to_object(cfg.size)
    folders.append(tempfile.TemporaryDirectory())  # goes at exit
    multiprocessing.get_context("fork").Process(
        target=until_terminated, args=(path,), daemon=True
    ).start()
    with LOCK:
        record = {
            "env": {k: v for k, v in os.environ.items() if k.isupper()},
            "at_import": AT_IMPORT,
            "argv": sys.argv,
            "path": sys.path,
            "stdin": sys.stdin.read(),
            "cwd": os.getcwd(),
            "start_method": multiprocessing.get_start_method(allow_none=True),
            "parent": multiprocessing.parent_process() is None,
            "process": multiprocessing.current_process().name,
            "children": len(multiprocessing.active_children()),
            "threads": threading.active_count(),
            "session": os.getsid(0) == os.getpid(),
            "term": repr(signal.getsignal(signal.SIGTERM)),
            "interrupt": repr(signal.getsignal(signal.SIGINT)),
            "child_signal": repr(signal.getsignal(signal.SIGCHLD)),
            "numpy": float(np.random.rand()),  # noqa: NPY002
            "python": random.random(),
            "torch": torch.rand(1).item(),
            "torch_threads": torch.get_num_threads(),
            "main_name": sys.modules["__main__"].__dict__.get("__name__"),
            "moment": cfg.moment,
            "again": cfg.again,
            "late": cfg.late,
            "mine": cfg.mine,
            "once": cfg.once,
            "size_is_ours": isinstance(size, Size) and size.color is Color.RED,
            "num": either.job_number(HydraConfig.get()),
            "output_dir": HydraConfig.get().runtime.output_dir,
            "fds": sorted(os.listdir("/proc/self/fd")),
            "loaded": list(DataLoader([1, 2, 3], num_workers=1)),
            "loaded_by_lambda": list(
                DataLoader(
                    [1, 2, 3],
                    num_workers=1,
                    collate_fn=lambda items: items,
                    multiprocessing_context="fork",  # Python 3.14's default pickles it
                )
            ),
            "preloaded": getattr(sys.modules.get("slow_import"), "READ", None),
            "pid": os.getpid(),
        }
    while not path.with_suffix(".child").exists():
        time.sleep(0.01)
    path.write_text(json.dumps(record, default=torch.Tensor.tolist))
    return record["moment"]


if __name__ == "__main__":
    main()
