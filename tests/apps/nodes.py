"""A job on several nodes: every rank notes what it sees, and does as it is told."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

import hydra_torchrun_launcher


class Colour(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Optimizer:
    name: str = "sgd"
    rates: list[float] = field(default_factory=lambda: [0.1])


@dataclass
class Settings:
    x: int = 0
    what: str = "nothing"
    on: int = 1
    attempts: int = 1
    records: str = "."
    colour: Colour = Colour.RED
    optimizer: Optimizer = field(default_factory=Optimizer)
    stamp: str = "${now:%f}"


@dataclass
class OtherSettings(Settings):
    momentum: float = 0.9


other = "OTHER_SCHEMA" in os.environ
ConfigStore.instance().store("nodes", OtherSettings if other else Settings)


def run(config: Any) -> Any:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total)
    settings = OmegaConf.to_object(config)
    found = HydraConfig.get()
    note = {
        "x": config.x,
        "job": OmegaConf.select(found, "job.num", throw_on_missing=False),
        "rank": rank,
        "world": world,
        "host": socket.gethostname(),
        "attempt": attempt,
        "sum": total.item(),
        "kinds": [type(settings).__name__, type(settings.optimizer).__name__],
        "config": OmegaConf.to_yaml(config, resolve=True),
        "overrides": list(found.overrides.task),
        "output_dir": found.runtime.output_dir,
        "cwd": os.getcwd(),
        "master": os.environ["MASTER_ADDR"],
        "run_id": os.environ["TORCHELASTIC_RUN_ID"],
        "pid": os.getpid(),
        "set": os.environ.get("SET"),
    }
    with (Path(config.records) / f"{socket.gethostname()}.{rank}.jsonl").open("a") as file:
        file.write(json.dumps(note) + "\n")
    if config.what == "late":  # it fails when the others' processes have left
        dist.destroy_process_group()
        fail_late(Path(config.records), rank)
        return None
    wait_or_fail(config, rank, attempt)
    act(config, rank, attempt)
    dist.barrier()
    dist.destroy_process_group()
    if config.what == "unsendable":
        return object()
    return {
        "x": config.x,
        7: Colour.BLUE,
        "path": Path("a/b"),
        "raw": b"\x00\xff",
        "nan": float("nan"),
    }


def fail_late(records: Path, rank: int) -> None:
    if rank == 0:
        return
    noted = next(records.glob("*.0.jsonl")).read_text().splitlines()[-1]
    other = json.loads(noted)["pid"]  # the hosts of a test see each other's processes
    while Path(f"/proc/{other}").exists():
        time.sleep(0.02)
    raise ValueError("late")


def wait_or_fail(config: Any, rank: int, attempt: int) -> None:
    if config.what == "hold":
        go = Path(config.records) / "go"
        while not go.exists():
            time.sleep(0.02)
    if config.what == "once" and rank == config.on:
        done = Path(config.records) / "done"
        if not done.exists():
            done.touch()
            raise ValueError("once")
    if config.what == "in turn":  # whose rank fails is the attempt's, the other is stopped
        if rank == attempt % 2:
            raise ValueError("in turn")
        time.sleep(600)


def act(config: Any, rank: int, attempt: int) -> None:
    if rank != config.on or attempt >= config.attempts:
        return
    if config.what == "raise":
        raise ValueError(f"told to, x={config.x}")
    if config.what == "exit":
        sys.exit(7)
    if config.what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if config.what == "write":
        print("long line" * 100_000, flush=True)


if __name__ == "__main__":
    decorate = hydra_torchrun_launcher.main if "OURS" in os.environ else hydra.main
    decorate(version_base=None, config_name="nodes", config_path=None)(run)()
