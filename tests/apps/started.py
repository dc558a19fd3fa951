"""An app by our decorator, for ranks that torchrun or Slurm start; each writes what it sees."""

from __future__ import annotations

import atexit
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import rank_records
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import hydra_torchrun_launcher

log = logging.getLogger(__name__)
FOLDER = Path(os.environ["RANK_RECORDS"])


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Size:
    width: int = 3
    color: Color = Color.RED
    path: Path = Path("somewhere")


def dangerous() -> str:
    """End this rank while it composes, if the test wants that."""
    if os.environ.get("DIES_COMPOSING"):
        os.kill(os.getpid(), signal.SIGKILL)
    return "safe"


def stopping() -> str:
    """Stop this rank while it composes, if it is the one, and say that it does."""
    is_the_one = os.environ["RANK"] == os.environ.get("STOPS_COMPOSING")
    if is_the_one and not Path("stopped").exists():  # once, though Hydra resolves it again
        stop()
    return "safe"


def stop() -> None:
    """Stop this rank, and say that it does."""
    unfinished = Path("stopped.unfinished")
    unfinished.write_text(str(os.getpid()))
    unfinished.rename("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)


ConfigStore.instance().store(name="size", group="size", node=Size)
MORE = json.loads(os.environ.get("MORE", "{}"))
ConfigStore.instance().store(name="more", group="more", node=MORE)
OmegaConf.register_new_resolver("cached_in_script", random.random, use_cache=True)
OmegaConf.register_new_resolver("no_data", object, use_cache=True)
OmegaConf.register_new_resolver("dangerous", dangerous)
OmegaConf.register_new_resolver("stopping", stopping)
LARGE = {"text": "x" * int(os.environ.get("LARGE", "0"))}
ConfigStore.instance().store(name="large", group="large", node=LARGE)
if os.environ.get("BLOCKS"):
    Path("blocked", os.environ["BLOCKS"]).mkdir(parents=True, exist_ok=True)
if os.environ.get("STOPS_LEAVING"):
    atexit.register(stop)
if os.environ.get("DIES_AT_IMPORT"):
    sys.exit("dies at import")


def await_records(count: int) -> None:
    """Wait for the others' records: a rank that fails ends them."""
    deadline = time.monotonic() + 60
    while len(list(FOLDER.glob("task.*.json"))) < count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@hydra_torchrun_launcher.main(version_base="1.3", config_path=None)
def called(cfg: DictConfig) -> None:
    rank_records.write("call", x=cfg.x)


@hydra_torchrun_launcher.main(version_base="1.3", config_path=".", config_name="started")
def main(cfg: DictConfig) -> Any:
    size = OmegaConf.to_object(cfg.size)
    failures = len(list(FOLDER.glob("failed.*")))
    total = None
    if cfg.reduce:
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ranks = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(ranks)
        total = ranks.item()
        dist.destroy_process_group()
    log.info("told by rank %s", os.environ["RANK"])
    rank_records.write(
        "task",
        failures=failures,
        config=OmegaConf.to_yaml(cfg),
        moment=cfg.moment,
        once=cfg.once,
        mine=cfg.mine,
        size=[type(size).__name__, size.width, size.color.name, str(size.path)],
        size_is_ours=isinstance(size, Size) and size.color in (Color.RED, Color.BLUE),
        hydra=OmegaConf.to_yaml(HydraConfig.get()),
        resolved_dir=HydraConfig.get().run.dir,
        output_dir=HydraConfig.get().runtime.output_dir,
        set_by_job=os.environ.get("SET_BY_JOB"),
        cwd=os.getcwd(),
        env={k: v for k, v in os.environ.items() if k.isupper()},
        total=total,
    )
    if cfg.get("calls"):
        called(OmegaConf.create({"x": 3}))
    if cfg.get("nested") and os.environ["RANK"] == "1":
        command = [sys.executable, __file__, "hydra.run.dir=nested"]
        subprocess.run(command, check=True, timeout=60)
    if os.environ["RANK"] == str(cfg.fails_in) and failures < cfg.fail_until:
        await_records((failures + 1) * int(os.environ["WORLD_SIZE"]))
        (FOLDER / f"failed.{failures}").touch()
        raise ValueError("asked to fail")
    while cfg.hold and failures < cfg.fail_until:  # as in a collective with the rank that failed
        time.sleep(0.1)
    return 3


if __name__ == "__main__":
    main()
    print("after main", flush=True)
    if os.environ.get("ENDS_HARD"):
        os._exit(0)
