"""What a user may set under `hydra.launcher`, and the checks that need only the settings.

Imported by every Hydra app in the environment (through the door): no heavy imports here.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from hydra_torchrun_launcher.errors import SettingsError

_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_RANKS = re.compile(r"\d+(,\d+)*")
_DEFAULT_SHUTDOWN_TIMEOUT_S = 30
_DAY_S = 86_400
_UNFIT = ("SIGKILL", "SIGSTOP", "SIGCHLD")
"""Signals that no process can handle, or that every process gets when a child ends."""
_OURS = {
    "min_nodes",
    "max_nodes",
    "nproc_per_node",
    "logs_specs",
    "run_id",
    "role",
    "rdzv_backend",
    "rdzv_configs",
    "max_restarts",
    "monitor_interval",
    "signals_to_handle",
    "shutdown_timeout",
    "start_method",
}
"""Fields of LaunchConfig that the launcher sets itself."""


class StartMethod(Enum):
    """How a rank's process comes to be."""

    forkserver = "forkserver"
    """Forked from a server of ours that has imported torch and no code of the user's."""
    spawn = "spawn"
    """A new interpreter for each rank, as torchrun's."""
    fork = "fork"
    """Forked from the launching process, whose memory it sees."""


@dataclass
class TorchrunConf:
    """Settings of `hydra/launcher=torchrun`; names are torchrun's wherever it has one.

    Each job reads them from its own composed config, so an experiment file may set them.
    """

    _target_: str = "hydra_plugins.hydra_torchrun_launcher.TorchrunLauncher"

    nproc_per_node: Any = "auto"
    """Ranks per node: a number from 1, or `gpu`, `cpu`, or `auto` (accelerators if there are any,
    else CPU cores)."""

    max_restarts: int = 0
    """How often a job whose rank failed is started again, all ranks of it; torchrun's default."""

    monitor_interval: float = 0.1
    """Seconds between torch elastic's looks at the group of nodes. A rank's end is seen at once."""

    role: str = "default"
    """Name of the ranks' role: the variable ROLE_NAME and the prefix of teed lines."""

    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    """Signals that stop the job and the sweep and are passed on to the ranks. One that was ignored
    when the app was started (nohup ignores SIGHUP) stays ignored."""

    shutdown_timeout: int | None = None
    """Seconds that ranks have to leave once they were asked to, before they are killed. Null: the
    variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30."""

    start_method: StartMethod = StartMethod.forkserver
    """forkserver, spawn or fork."""

    preload: list[str] = field(default_factory=list)
    """Modules that the fork server imports besides torch: heavy libraries, not your own code."""

    log_dir: str | None = None
    """Folder for the ranks' output, a subfolder per job. Null: `ranks` in the job's output
    directory."""

    redirects: str = "0"
    """Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; for all ranks, or by local
    rank as in `0:3,12:1`."""

    tee: str = "0"
    """Streams that go to files and to the console; values as for `redirects`."""

    local_ranks_filter: str = "0"
    """Local ranks whose output may reach the console, as in `0,1`; the others write to their files.
    Empty: all."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Any other field of the installed torch's LaunchConfig, by its name."""


@dataclass(frozen=True)
class Settings:
    """The checked settings of one job, as plain data.

    Attributes:
        nproc_per_node: ranks per node, or the word that says how to count them.
        redirects: streams to files by local rank; key -1 stands for every rank not named.
        tee: the same for streams that also reach the console.
        console_ranks: local ranks that may reach the console; None for all.
        shutdown_timeout_s: seconds between asking ranks to leave and killing them.
    """

    nproc_per_node: int | str
    max_restarts: int
    monitor_interval_s: float
    role: str
    signals: tuple[str, ...]
    shutdown_timeout_s: int
    start_method: StartMethod
    preload: tuple[str, ...]
    log_dir: str | None
    redirects: dict[int, int]
    tee: dict[int, int]
    console_ranks: tuple[int, ...] | None
    extra: dict[str, Any]

    def ranks_beyond(self, nproc: int) -> list[str]:
        """Say which settings name a local rank that a job of `nproc` ranks per node has not."""
        named = {
            "redirects": self.redirects,
            "tee": self.tee,
            "local_ranks_filter": self.console_ranks or (),
        }
        return [
            f"hydra.launcher.{name} names local rank {max(ranks)}, the job has 0 to {nproc - 1}"
            for name, ranks in named.items()
            if max(ranks, default=0) >= nproc
        ]


def check(raw: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Turn a job's `hydra.launcher` node into checked settings.

    Args:
        raw: the node as a plain mapping.
        environ: the job's environment, for the variables that torchrun reads as defaults.

    Raises:
        SettingsError: names every setting that cannot work, its value and what is allowed.
    """
    nproc = _nproc(raw["nproc_per_node"])
    timeout_s = _shutdown_timeout_s(raw["shutdown_timeout"], environ)
    signals = tuple(name.strip() for name in raw["signals_to_handle"].split(",") if name.strip())
    ranks = raw["local_ranks_filter"]
    streams = "0, 1, 2 or 3, or local ranks with one of them each, as in 0:3,12:1"
    rules = [
        ("nproc_per_node", nproc is not None, "a number from 1, or gpu, cpu or auto"),
        ("max_restarts", raw["max_restarts"] >= 0, "a number from 0"),
        ("monitor_interval", 0 < raw["monitor_interval"] <= _DAY_S, "seconds above 0, to a day"),
        (
            "signals_to_handle",
            all(name in signal.Signals.__members__ and name not in _UNFIT for name in signals),
            "names of signals that can be handled, separated by commas, as in SIGTERM,SIGINT",
        ),
        (
            "shutdown_timeout",
            timeout_s is not None and timeout_s >= 0,
            "whole seconds from 0, here or in TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        (
            "extra",
            not _OURS & set(raw["extra"]),
            "fields that have no setting here; not " + ", ".join(sorted(_OURS)),
        ),
        ("redirects", _STREAMS.fullmatch(raw["redirects"]), streams),
        ("tee", _STREAMS.fullmatch(raw["tee"]), streams),
        (
            "local_ranks_filter",
            not ranks or _RANKS.fullmatch(ranks),
            "local ranks separated by commas, or nothing for all",
        ),
    ]
    problems = [
        f"hydra.launcher.{name}={raw[name]!r}: expected {allowed}"
        for name, right, allowed in rules
        if not right
    ]
    if problems or nproc is None or timeout_s is None:
        raise SettingsError(problems)
    return Settings(
        nproc_per_node=nproc,
        max_restarts=raw["max_restarts"],
        monitor_interval_s=raw["monitor_interval"],
        role=raw["role"],
        signals=signals,
        shutdown_timeout_s=timeout_s,
        start_method=raw["start_method"],
        preload=tuple(raw["preload"]),
        log_dir=raw["log_dir"],
        redirects=_streams(raw["redirects"]),
        tee=_streams(raw["tee"]),
        console_ranks=tuple(map(int, ranks.split(","))) if ranks else None,
        extra=dict(raw["extra"]),
    )


def _nproc(value: Any) -> int | str | None:
    if value in ("gpu", "cpu", "auto"):
        return str(value)
    if isinstance(value, str) and value.isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    return None


def _shutdown_timeout_s(value: int | None, environ: Mapping[str, str]) -> int | None:
    if value is not None:
        return value
    text = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_DEFAULT_SHUTDOWN_TIMEOUT_S))
    return int(text) if text.strip().isdecimal() else None


def _streams(text: str) -> dict[int, int]:
    """Parse torchrun's syntax; torch's own parser takes one digit of a rank only."""
    if ":" not in text:
        return {-1: int(text)}
    return {int(rank): int(std) for rank, std in (pair.split(":") for pair in text.split(","))}


def cpu_cores() -> int:
    """Return how many cores this process may use: its affinity and its cgroup's quota.

    `os.cpu_count()`, which torchrun uses, sees neither; in a container with a quota of two cores
    on a large host it would start a rank for each core of the host.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        with open("/sys/fs/cgroup/cpu.max", encoding="ascii") as file:
            quota, period = file.read().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
