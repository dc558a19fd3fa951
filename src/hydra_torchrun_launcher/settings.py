"""The checks of what a user has set that need only the settings (runs in the launching process)."""

from __future__ import annotations

import dataclasses
import difflib
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hydra_torchrun_launcher.config import StartMethod, TorchrunConf
from hydra_torchrun_launcher.errors import SettingsError

_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_RANKS = re.compile(r"\d+(,\d+)*")
_ENDPOINT = re.compile(r"[^\s:]+(:\d{1,5})?|\[[0-9a-fA-F:.%]+\](:\d{1,5})?")
_DEFAULT_SHUTDOWN_TIMEOUT_S = 30
_DAY_S = 86_400
_UNFIT = ("SIGKILL", "SIGSTOP", "SIGCHLD")
"""Signals that no process can handle, or that every process gets when a child ends."""


@dataclass(frozen=True)
class Settings:
    """The checked settings of one job, as plain data.

    Attributes:
        nproc_per_node: ranks per node, or the word that says how to count them.
        run_id: the job's id for torch elastic, or None for a new one.
        redirects: streams to files by local rank; key -1 stands for every rank not named.
        tee: the same for streams that also reach the console.
        console_ranks: local ranks that may reach the console; None for all.
        shutdown_timeout_s: seconds between asking ranks to leave and killing them.
        launch_config: fields of torch's LaunchConfig, by name, that the user asked for.
    """

    nproc_per_node: int | str
    run_id: str | None
    max_restarts: int
    monitor_interval_s: float
    role: str
    signals: tuple[str, ...]
    shutdown_timeout_s: int
    numa_binding: str | None
    start_method: StartMethod
    preload: tuple[str, ...]
    preload_env: tuple[str, ...]
    log_dir: str | None
    redirects: dict[int, int]
    tee: dict[int, int]
    console_ranks: tuple[int, ...] | None
    launch_config: dict[str, Any]

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
    values = {**raw, "shutdown_timeout": _shutdown_timeout(raw["shutdown_timeout"], environ)}
    parsed, problems = {}, []
    for name, (parse, allowed) in _RULES.items():
        try:
            parsed[name] = parse(values[name])
        except (ValueError, TypeError, OverflowError):
            problems.append(f"hydra.launcher.{name}={raw[name]!r}: expected {allowed}")
    problems += _contradictions(parsed)
    problems += _unknown(raw)
    if problems:
        raise SettingsError(problems)
    asked_for = {name: parsed[name] for name in ("virtual_local_rank", "local_addr")}
    return Settings(
        nproc_per_node=parsed["nproc_per_node"],
        run_id=parsed["rdzv_id"],
        max_restarts=parsed["max_restarts"],
        monitor_interval_s=parsed["monitor_interval"],
        role=parsed["role"],
        signals=parsed["signals_to_handle"],
        shutdown_timeout_s=parsed["shutdown_timeout"],
        numa_binding=parsed["numa_binding"],
        start_method=raw["start_method"],
        preload=parsed["preload"],
        preload_env=parsed["preload_env"],
        log_dir=parsed["log_dir"],
        redirects=parsed["redirects"],
        tee=parsed["tee"],
        console_ranks=parsed["local_ranks_filter"],
        launch_config={
            **{name: value for name, value in asked_for.items() if value},
            **parsed["extra"],
        },
    )


def _shutdown_timeout(value: int | None, environ: Mapping[str, str]) -> Any:
    default = environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_DEFAULT_SHUTDOWN_TIMEOUT_S))
    return default.strip() if value is None else value


def _unknown(raw: Mapping[str, Any]) -> list[str]:
    """Name what Hydra let in by a `+` and nobody would read."""
    known = [field.name for field in dataclasses.fields(TorchrunConf)]
    problems = []
    for name in sorted(set(map(str, raw)) - set(known)):
        if name.startswith("_"):
            continue  # Hydra's own words, such as _recursive_
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        problems.append(f"hydra.launcher.{name}={raw[name]!r}: there is no such setting{hint}")
    return problems


def _contradictions(parsed: dict[str, Any]) -> list[str]:
    """Compare the two spellings of the number of nodes."""
    if not {"nnodes", "min_nodes", "max_nodes"} <= set(parsed):
        return []
    nodes = parsed["nnodes"]
    least = parsed["min_nodes"] or (nodes[0] if nodes else 1)
    most = parsed["max_nodes"] or (nodes[1] if nodes else max(1, least))
    said = f"nnodes={_spelled(nodes)}, min_nodes={least}, max_nodes={most}"
    if (nodes and nodes != (least, most)) or least > most:
        return [f"hydra.launcher.{said}: they contradict each other; set nnodes alone"]
    if most > 1:
        problem = (
            f"hydra.launcher.nnodes={_spelled((least, most))} (or min_nodes, max_nodes): the "
            "launcher starts ranks on one node only; torchrun and srun start them on several, for "
            "an app with hydra_torchrun_launcher.main"
        )
        return [problem]
    rank = parsed.get("node_rank") or 0
    if rank >= most:
        return [f"hydra.launcher.node_rank={rank}: expected a number below the number of nodes, 1"]
    return []


def _spelled(nodes: tuple[int, int] | None) -> str:
    if nodes is None:
        return "null"
    least, most = nodes
    return str(least) if least == most else f"{least}:{most}"


def _require(condition: object) -> None:
    if not condition:
        raise ValueError


def _whole(least: int, *, optional: bool = False) -> Callable[[Any], int | None]:
    def parse(value: Any) -> int | None:
        if value is None and optional:
            return None
        _require(not isinstance(value, bool) and int(value) == float(value) and int(value) >= least)
        return int(value)

    return parse


def _nproc(value: Any) -> int | str:
    return str(value) if value in ("gpu", "cpu", "auto") else _whole(1)(value) or 0


def _nodes(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    least, _, most = str(value).partition(":")
    _require(least.isdecimal() and int(least) > 0 and (most.isdecimal() or ":" not in str(value)))
    return int(least), int(most or least)


def _interval(value: Any) -> float:
    _require(0 < value <= _DAY_S)
    return float(value)


def _signals(value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    _require(all(name in signal.Signals.__members__ and name not in _UNFIT for name in names))
    return names


def _streams(text: str) -> dict[int, int]:
    """Parse torchrun's syntax; torch's own parser takes one digit of a rank only."""
    _require(_STREAMS.fullmatch(text))
    if ":" not in text:
        return {-1: int(text)}
    return {int(rank): int(std) for rank, std in (pair.split(":") for pair in text.split(","))}


def _ranks(text: str) -> tuple[int, ...] | None:
    _require(not text or _RANKS.fullmatch(text))
    return tuple(map(int, text.split(","))) if text else None


def _one_of(*words: str) -> Callable[[Any], str | None]:
    def parse(value: Any) -> str | None:
        _require(value is None or value in words)
        return None if value is None else str(value)

    return parse


def _endpoint(value: str | None) -> str | None:
    _require(value is None or value == "" or _ENDPOINT.fullmatch(value))
    return value or None


def _run_id(value: str | None) -> str | None:
    return None if value in (None, "", "none") else str(value)


def _timeout(value: int | None) -> int | None:
    return None if value in (None, -1) else _whole(1)(value)


def _mapping(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        pairs = [pair.partition("=") for pair in value.split(",") if pair.strip()]
        _require(all(name.strip() and is_set for name, is_set, _ in pairs))
        return {name.strip(): text.strip() for name, _, text in pairs}
    return dict(value or {})


def _words(value: Any) -> tuple[str, ...]:
    _require(all(isinstance(word, str) and word.strip() for word in value))
    return tuple(value)


def _text(value: Any) -> str | None:
    _require(value is None or ("\0" not in str(value) and str(value).strip()))
    return None if value is None else str(value)


def _extra(value: Mapping[str, Any]) -> dict[str, Any]:
    _require(not _OURS & set(value))
    return dict(value)


_OURS = frozenset({
    "min_nodes", "max_nodes", "nproc_per_node", "logs_specs", "run_id", "role", "rdzv_endpoint",
    "rdzv_backend", "rdzv_configs", "rdzv_timeout", "max_restarts", "monitor_interval",
    "start_method", "local_addr", "numa_options", "signals_to_handle", "shutdown_timeout",
    "virtual_local_rank",
})  # fmt: skip
"""Fields of LaunchConfig that have a setting of their own here, or that the launcher sets."""

_STREAMS_ALLOWED = "0, 1, 2 or 3, or local ranks with one of them each, as in 0:3,12:1"
_MODULES_ALLOWED = "a list of names, as in [lightning,transformers]"

_RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nproc_per_node": (_nproc, "a number from 1, or gpu, cpu or auto"),
    "nnodes": (_nodes, "a number from 1, or MIN:MAX"),
    "min_nodes": (_whole(1, optional=True), "a number from 1, or null"),
    "max_nodes": (_whole(1, optional=True), "a number from 1, or null"),
    "node_rank": (_whole(0, optional=True), "a number from 0, or null"),
    "rdzv_backend": (_one_of("c10d", "static"), "c10d, static or null"),
    "rdzv_endpoint": (_endpoint, "HOST or HOST:PORT"),
    "rdzv_id": (_run_id, "a name"),
    "rdzv_timeout": (_timeout, "seconds from 1, or -1 or null for torch's own"),
    "rdzv_conf": (_mapping, "a mapping, or name=value pairs separated by commas"),
    "local_addr": (_text, "a host name or address"),
    "max_restarts": (_whole(0), "a number from 0"),
    "monitor_interval": (_interval, "seconds above 0, to a day"),
    "role": (_text, "a name"),
    "signals_to_handle": (
        _signals,
        "names of signals that can be handled, separated by commas, as in SIGTERM,SIGINT",
    ),
    "shutdown_timeout": (
        _whole(0),
        "whole seconds from 0, here or in TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    "numa_binding": (
        _one_of("node", "socket", "exclusive", "core-complex"),
        "node, socket, exclusive, core-complex or null",
    ),
    "virtual_local_rank": (bool, "true or false"),
    "preload": (_words, _MODULES_ALLOWED),
    "preload_env": (_words, "a list of names of variables, as in [MY_LIBRARY_CACHE]"),
    "log_dir": (_text, "a folder"),
    "redirects": (_streams, _STREAMS_ALLOWED),
    "tee": (_streams, _STREAMS_ALLOWED),
    "local_ranks_filter": (_ranks, "local ranks separated by commas, or nothing for all"),
    "extra": (_extra, "fields that have no setting here; not " + ", ".join(sorted(_OURS))),
}
"""How each setting is read, and what to say to a value that cannot be."""
