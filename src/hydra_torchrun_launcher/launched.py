"""Tells whether this process is a rank that torchrun or Slurm started, and which (in such a rank).

Torchrun's variables are the common language; where Slurm started the rank, what is missing of them
is taken from Slurm's.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from hydra_torchrun_launcher.errors import StartError

_CANDIDATES = 8
_PORTS = range(12_000, 32_000)
"""Below those that Linux hands out by itself (32768 and more)."""


@dataclass(frozen=True)
class Place:
    """A rank's place among the ranks that were started with it.

    Attributes:
        by: who started it, for messages.
        rank: its number among all.
        world_size: how many there are.
        variables: torchrun's variables that were missing, but for the port.
        host: where rank 0 can be reached.
        port: the port that somebody has chosen for torch's store (MASTER_PORT), or None.
        token: what tells this start from any other that may use the same ports.
        shares_store: whether the agent holds a store for its ranks at that port.
        is_on_one_node: whether all ranks are.
        may_be_a_node: whether each is alone on its node, so that it may be meant to start ranks.
    """

    by: str
    rank: int
    world_size: int
    variables: Mapping[str, str]
    host: str
    port: int | None
    token: str
    shares_store: bool
    is_on_one_node: bool
    may_be_a_node: bool

    @property
    def candidates(self) -> tuple[int, ...]:
        """Ports at which ranks meet, one after the other, where no store tells one."""
        if self.shares_store:
            return ()
        numbers = range(_CANDIDATES)
        return tuple(
            _PORTS[zlib.crc32(f"{self.token}.{n}".encode()) % len(_PORTS)] for n in numbers
        )

    @property
    def mark(self) -> str:
        """What a rank writes into MARK, by which what it starts is known to be no rank itself."""
        return f"{self.token}/{self.rank}/{os.getpid()}"

    def is_inherited(self, mark: str) -> bool:
        """Tell whether a mark is that of another process with this place: this is a child of it."""
        start, _, pid = mark.rpartition("/")
        return start == f"{self.token}/{self.rank}" and pid != str(os.getpid())


MARK = "HYDRA_TORCHRUN_RANK"
"""Variable of ranks, by which an app that a rank starts knows that the rank's variables are not its
own."""


def find_place(environ: Mapping[str, str]) -> Place | None:
    """Return this process's place, or None if it is nobody's rank.

    Raises:
        StartError: a variable that tells a place is no number.
    """
    place = _find_place(environ)
    return None if place is None or place.is_inherited(environ.get(MARK, "")) else place


def _find_place(environ: Mapping[str, str]) -> Place | None:
    is_set = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= environ.keys()
    if is_set and "TORCHELASTIC_RUN_ID" in environ:
        return _by_variables(environ)
    if "PET_NNODES" in environ:  # a training operator has started a node, and counts nodes by RANK
        return None
    if "SLURM_PROCID" in environ and _number(environ, "SLURM_STEP_NUM_TASKS", "1") > 1:
        return _by_slurm(environ)
    return _by_variables(environ) if is_set and _number(environ, "WORLD_SIZE") > 1 else None


def _number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    text = environ.get(name, default)
    if not text.strip().isdecimal():
        problem = f"{name}={text!r}: expected a whole number, as torchrun and Slurm set it"
        raise StartError(problem)
    return int(text)


def _by_variables(environ: Mapping[str, str]) -> Place:
    elastic = "TORCHELASTIC_RUN_ID" in environ
    host, port = environ["MASTER_ADDR"], _number(environ, "MASTER_PORT")
    return Place(
        by="torchrun" if elastic else "whoever set RANK and WORLD_SIZE",
        rank=_number(environ, "RANK"),
        world_size=_number(environ, "WORLD_SIZE"),
        variables={},
        host=host,
        port=port,
        token=f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{host}/{port}",
        shares_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        is_on_one_node=environ.get("LOCAL_WORLD_SIZE") == environ["WORLD_SIZE"],
        may_be_a_node=False,
    )


def _by_slurm(environ: Mapping[str, str]) -> Place:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    node = _number(environ, "SLURM_NODEID", "0")
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", environ.get("SLURM_NNODES", "1"))
    per_node = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", "127.0.0.1"))
    from_slurm = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(per_node[node] if node < len(per_node) else 1),
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "MASTER_ADDR": "127.0.0.1" if nodes == 1 else first_host(hosts),
    }
    known = {**from_slurm, **environ}
    return Place(
        by="srun",
        rank=_number(known, "RANK"),
        world_size=_number(known, "WORLD_SIZE"),
        variables={name: value for name, value in from_slurm.items() if name not in environ},
        host=known["MASTER_ADDR"],
        port=_number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else None,
        token=".".join(environ.get(name, "0") for name in names),
        shares_store=False,
        is_on_one_node=nodes == 1,
        may_be_a_node=nodes > 1 and str(nodes) == known["WORLD_SIZE"],
    )


def _tasks_per_node(text: str) -> list[int]:
    """Expand Slurm's short form: `2(x3),1` is 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """Return the first of Slurm's host list: `gpu[03-05,9],cpu1` begins with gpu03."""
    match = re.match(r"([^\[,]+)(?:\[([^\],-]+)[^\]]*\]([^,\[]*))?", nodes)
    if match is None:
        return nodes
    prefix, number, suffix = match.groups()
    return f"{prefix}{number or ''}{suffix or ''}"
