"""What this machine has for ranks, found out without torch (runs in the launching process)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

_RANKS_PER_CORE = 8
"""More than that is a slip of the keyboard rather than a plan."""


def network_variables(address: str) -> dict[str, str]:
    """Return what gloo needs to use the interface that has one of this machine's addresses.

    By itself it takes the one of the host's name, which may be none or the loopback.
    """
    for name, found in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == address for each in found):
            return {"GLOO_SOCKET_IFNAME": name}
    return {}


def cpu_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use: its affinity and its cgroup's quota.

    `os.cpu_count()`, which torchrun uses, sees neither; in a container with a quota of two cores
    on a large host it would start a rank for each core of the host.

    Args:
        root: where the file systems of the kernel begin.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quotas = [quota // period for quota, period in _quotas(root) if quota > 0 and period > 0]
    return max(1, min([cores, *quotas]))


def _quotas(root: Path) -> Iterator[tuple[int, int]]:
    """Yield quota and period of this process's cgroups, for both versions of cgroups.

    A container often sees its own cgroup where the host has the root of all; and those above a
    cgroup limit it too.
    """
    try:
        groups = (
            (root / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines()
        )
    except OSError:
        groups = []
    for group in [*groups, "0::/", "1:cpu:/"]:
        number, controllers, path = [*group.split(":", 2), "", ""][:3]
        is_second = number == "0" and not controllers
        if not is_second and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("" if is_second else controllers)
        here = mount / path.strip("/")
        for folder in [here, *here.parents]:
            if not folder.is_relative_to(mount):
                break
            names = ("cpu.max",) if is_second else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            with suppress(OSError, ValueError):  # no limit: max, -1 or no such file
                texts = [(folder / name).read_text(encoding="ascii") for name in names]
                quota, period = " ".join(texts).split()
                yield int(quota), int(period)


def core_numbers() -> tuple[int, ...]:
    """Return the cores that this process may use, as many as its cgroup's quota allows."""
    count = cpu_cores()
    if not hasattr(os, "sched_getaffinity"):
        return tuple(range(count))
    return tuple(sorted(os.sched_getaffinity(0))[:count])


_DRIVERS = (
    "proc/driver/nvidia/gpus", "dev/nvidiactl", "dev/kfd", "dev/dri", "dev/dxg", "dev/accel",
    "dev/davinci_manager",
)  # fmt: skip
"""Where the kernel shows NVIDIA, AMD, Intel and other accelerators."""


def may_have_accelerators(root: Path = Path("/")) -> bool:
    """Tell whether torch may see accelerators here: only it can say, and that takes its time.

    Args:
        root: where the file systems of the kernel begin.
    """
    return any((root / name).exists() for name in _DRIVERS)


def nvidia_gpus(environ: Mapping[str, str], root: Path = Path("/")) -> int:
    """Return how many NVIDIA GPUs a process with this environment sees, without touching them.

    Args:
        environ: CUDA_VISIBLE_DEVICES in it hides some.
        root: where the file systems of the kernel begin.
    """
    try:
        there = len(os.listdir(root / "proc/driver/nvidia/gpus"))
    except OSError:
        return 0
    shown = environ.get("CUDA_VISIBLE_DEVICES")
    return there if shown is None else min(there, len([x for x in shown.split(",") if x.strip()]))


def too_many_ranks(nproc: int, environ: Mapping[str, str], root: Path = Path("/")) -> list[str]:
    """Say, if it is so, that a job has many more ranks than fit; torchrun allows it."""
    gpus = nvidia_gpus(environ, root)
    cores = cpu_cores(root)
    if nproc > _RANKS_PER_CORE * cores:
        return [f"hydra.launcher.nproc_per_node={nproc}: this process may use {cores} CPU cores"]
    if not 0 < gpus < nproc:
        return []
    number = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
    seen = f"hydra.launcher.nproc_per_node={nproc}: this process sees {number}"
    return [f"{seen}; ranks that ask for a GPU of their own will fail"]
