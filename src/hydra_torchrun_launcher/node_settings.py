"""Which nodes a sweep runs on, from its settings and from Slurm's variables (in the launching
process).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from hydra_torchrun_launcher.launched import first_host

_PORT = 29_400
"""torchrun's, for c10d."""
_JOIN_S = 600
"""torch's, for c10d."""
_LAST_CALL_S = 30
"""torch's, for c10d."""
_ONE = (1, 1)
_SLURM_PORTS = range(20_000, 30_000)
_TRUE = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
_LOOPBACK = ("localhost", "ip6-localhost")


@dataclass(frozen=True)
class Nodes:
    """The nodes of a sweep.

    Attributes:
        least: how many there have to be.
        most: how many there may be, two or more; above `least`, nodes join and leave meanwhile.
        rank: this node's rank among them, or None where it is still to be given.
        leads: whether this node leads; None: if the endpoint is an address of this machine.
        host: the leader's name or address.
        port: where it listens.
        join_timeout_s: seconds that nodes wait for each other.
        last_call_s: seconds that those wait for more who are enough already.
        lost_after_s: seconds without a word from a node after which it is lost.
        run_id: what only the nodes of this run have, or nothing.
        local_addr: this node's name or address for the others, or None.
    """

    least: int
    most: int
    rank: int | None
    leads: bool | None
    host: str
    port: int
    join_timeout_s: float
    last_call_s: float
    lost_after_s: float
    run_id: str
    local_addr: str | None

    @property
    def is_elastic(self) -> bool:
        """Whether nodes join and leave meanwhile."""
        return self.least < self.most

    @property
    def count(self) -> str:
        """How many there are, as the setting `nnodes` says it."""
        return _spelled((self.least, self.most))

    @property
    def endpoint(self) -> str:
        """Where they meet, for messages."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def nodes_of(
    parsed: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Nodes | None, list[str]]:
    """Return the nodes that settings ask for, None for one node, and what cannot work."""
    (least, most), problems = _count(parsed, environ)
    names = ("rdzv_conf", "node_rank", "rdzv_endpoint", "master_addr", "node_timeout_s")
    if problems or most == 1 or not set(names) <= set(parsed):
        return None, problems
    slurm = _Slurm.of_step(environ, most)
    rank = slurm.rank if parsed["node_rank"] is None else parsed["node_rank"]
    if rank is not None and rank >= most:
        allowed = f"expected a number below the number of nodes, {most}"
        problems.append(f"hydra.launcher.node_rank={rank}: {allowed}")
    conf = dict(parsed["rdzv_conf"])
    leads, problem = _is_host(conf.pop("is_host", None))
    problems += problem
    wait, problem = _join_timeout(parsed, conf)
    problems += problem
    last_call, problem = _last_call(conf)
    problems += problem
    problems += slurm.problems
    host, port = _endpoint(parsed, slurm)
    if not host:
        problems.append(
            f"hydra.launcher.rdzv_endpoint=null: {most} nodes need it, as in node0:29400: name "
            "and port of the node that leads, the same on all (Slurm's first host where Slurm has "
            "started the app on every node by srun)"
        )
    if problems:
        return None, problems
    nodes = Nodes(
        least=least,
        most=most,
        rank=rank,
        leads=(None if rank is None else rank == 0) if leads is None else leads,
        host=host,
        port=port,
        join_timeout_s=wait,
        last_call_s=last_call,
        lost_after_s=parsed["node_timeout_s"],
        run_id=parsed["rdzv_id"] or "",
        local_addr=parsed["local_addr"],
    )
    return nodes, []


def _count(
    parsed: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[tuple[int, int], list[str]]:
    """Compare the two spellings of the number of nodes; return the least and the most."""
    if not {"nnodes", "min_nodes", "max_nodes"} <= set(parsed):
        return _ONE, []
    nodes = parsed["nnodes"]
    if nodes == "auto":
        given = environ.get("SLURM_STEP_NUM_NODES", environ.get("SLURM_JOB_NUM_NODES", "1"))
        nodes = (int(given), int(given)) if given.isdecimal() else (1, 1)
    least = parsed["min_nodes"] or (nodes[0] if nodes else 1)
    most = parsed["max_nodes"] or (nodes[1] if nodes else max(1, least))
    said = f"nnodes={_spelled(nodes)}, min_nodes={least}, max_nodes={most}"
    if (nodes and nodes != (least, most)) or least > most:
        return _ONE, [f"hydra.launcher.{said}: they contradict each other; set nnodes alone"]
    rank = parsed.get("node_rank") or 0
    if most == 1 and rank >= 1:
        problem = f"hydra.launcher.node_rank={rank}: expected a number below the number of nodes, 1"
        return _ONE, [problem]
    return (least, most), []


def _spelled(nodes: tuple[int, int] | None) -> str:
    if nodes is None:
        return "null"
    least, most = nodes
    return str(least) if least == most else f"{least}:{most}"


def _is_host(value: Any) -> tuple[bool | None, list[str]]:
    if value is None:
        return None, []
    known = _TRUE.get(str(value).lower())
    if known is None:
        return None, [f"hydra.launcher.rdzv_conf.is_host={value!r}: expected true or false"]
    return known, []


def _join_timeout(parsed: Mapping[str, Any], conf: dict[str, Any]) -> tuple[float, list[str]]:
    found = [conf.pop(name) for name in ("join_timeout", "timeout") if name in conf]
    asked = parsed.get("rdzv_timeout") or (found[0] if found else _JOIN_S)
    try:
        seconds = float(asked)
    except (TypeError, ValueError):
        seconds = 0
    if not seconds > 0:
        return 0, [f"hydra.launcher.rdzv_conf.join_timeout={asked!r}: expected seconds above 0"]
    return seconds, []


def _last_call(conf: dict[str, Any]) -> tuple[float, list[str]]:
    asked = conf.pop("last_call_timeout", _LAST_CALL_S)
    try:
        seconds = float(asked)
    except (TypeError, ValueError):
        seconds = -1
    if not seconds >= 0:
        return 0, [f"hydra.launcher.rdzv_conf.last_call_timeout={asked!r}: expected seconds from 0"]
    return seconds, []


def _endpoint(parsed: Mapping[str, Any], slurm: _Slurm) -> tuple[str, int]:
    text = parsed["rdzv_endpoint"] or ""
    if not text:
        host = parsed["master_addr"] or slurm.host
        return host.strip("[]"), parsed.get("master_port") or slurm.port
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, int(port[1:] or _PORT)
    host, _, port = text.partition(":")
    return host, int(port or _PORT)


@dataclass(frozen=True)
class _Slurm:
    """What Slurm knows of the nodes, where srun has started the app once on each."""

    rank: int | None = None
    host: str = ""
    port: int = _PORT
    problems: tuple[str, ...] = ()

    @classmethod
    def of_step(cls, environ: Mapping[str, str], count: int) -> _Slurm:
        hosts = environ.get("SLURM_STEP_NODELIST", environ.get("SLURM_JOB_NODELIST", ""))
        tasks = environ.get("SLURM_STEP_NUM_TASKS", "")
        if not hosts:
            return cls()
        number = f"{environ.get('SLURM_JOB_ID', '0')}{environ.get('SLURM_STEP_ID', '0')}"
        digits = int("".join(filter(str.isdecimal, number)) or 0)
        port = _SLURM_PORTS[digits % len(_SLURM_PORTS)]
        rank = environ.get("SLURM_NODEID", "")
        is_step = tasks == str(count) and rank.isdecimal()
        problems = []
        if tasks.isdecimal() and int(tasks) > count:
            problems.append(
                f"srun has started this app {tasks} times on {count} nodes "
                "(SLURM_STEP_NUM_TASKS): expected once on each (srun --ntasks-per-node=1); the "
                "launcher starts the ranks"
            )
        return cls(int(rank) if is_step else None, first_host(hosts), port, tuple(problems))


def is_own_address(host: str) -> bool:
    """Tell whether a name or address is of this machine."""
    if host.lower() in _LOOPBACK or host.lower() == socket.gethostname().lower():
        return True
    return any(True for _ in _own_addresses(host))


def own_address(host: str) -> str:
    """Return by which of its addresses others reach this machine under a name; empty if unknown."""
    found = (each for each in _own_addresses(host) if not each.startswith("127.") and each != "::1")
    return next(found, "")


def _own_addresses(host: str) -> Iterator[str]:
    try:
        found = {str(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return
    own = {_bare(each.address) for all_ in psutil.net_if_addrs().values() for each in all_}
    yield from (
        each for each in sorted(found) if _bare(each) in own or _bare(each).startswith("127.")
    )


def _bare(address: str) -> str:
    return address.partition("%")[0]
