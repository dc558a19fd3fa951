"""How each setting under `hydra.launcher` is read, and what is said of a value that cannot work (in
the launching process).
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Mapping
from typing import Any

_STREAMS = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")
_RANKS = re.compile(r"\d+(,\d+)*")
_ENDPOINT = re.compile(r"[^\s:]+(:\d{1,5})?|\[[0-9a-fA-F:.%]+\](:\d{1,5})?")
_DAY_S = 86_400
_YEAR_S = 366 * _DAY_S
_LAST_PORT = 65_535
_UNFIT = ("SIGKILL", "SIGSTOP", "SIGCHLD")
"""Signals that no process can handle, or that every process gets when a child ends."""


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


def _nodes(value: Any) -> tuple[int, int] | str | None:
    if value is None or value == "auto":
        return value  # type: ignore[no-any-return]
    least, _, most = str(value).partition(":")
    _require(least.isdecimal() and int(least) > 0 and (most.isdecimal() or ":" not in str(value)))
    return int(least), int(most or least)


def _kind_of_progress(value: Any) -> str:
    _require(value in {"auto", "plain", "none"})
    return str(value)


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


def _port(value: Any) -> int | None:
    port = _whole(1, optional=True)(value)
    _require(port is None or port <= _LAST_PORT)
    return port


def _node_timeout(value: Any) -> float:
    _require(not isinstance(value, bool) and 1 <= value <= _DAY_S)
    return float(value)


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


def _n_jobs(value: Any) -> int | None:
    return None if value == "auto" else _whole(1)(value)


def _devices(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    listed = value.split(",") if isinstance(value, str) else value
    listed = [listed] if isinstance(listed, int) else listed
    _require(isinstance(listed, list | tuple))
    _require(all(isinstance(name, str) or type(name) is int for name in listed))
    names = tuple(str(name).strip() for name in listed)
    _require(names and all(names) and len(set(names)) == len(names))
    _require(not any("," in name or name.startswith("-") for name in names))
    return names


def _seconds(value: Any) -> float | None:
    _require(value is None or (not isinstance(value, bool) and 0 < value <= _YEAR_S))
    return None if value is None else float(value)


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

RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nproc_per_node": (_nproc, "a number from 1, or gpu, cpu or auto"),
    "nnodes": (_nodes, "a number from 1, or auto"),
    "min_nodes": (_whole(1, optional=True), "a number from 1, or null"),
    "max_nodes": (_whole(1, optional=True), "a number from 1, or null"),
    "node_rank": (_whole(0, optional=True), "a number from 0, or null"),
    "rdzv_backend": (_one_of("c10d", "static"), "c10d, static or null"),
    "rdzv_endpoint": (_endpoint, "HOST or HOST:PORT"),
    "master_addr": (_text, "a host name or address"),
    "master_port": (_port, "a port, from 1 to 65535, or null"),
    "rdzv_id": (_run_id, "a name"),
    "rdzv_timeout": (_timeout, "seconds from 1, or -1 or null for torch's own"),
    "node_timeout_s": (_node_timeout, "seconds from 1"),
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
    "n_jobs": (_n_jobs, "a number from 1, or auto"),
    "devices": (_devices, "null, or names without doubles, as in [0,1] or [GPU-8f2c,GPU-91aa]"),
    "jobs_per_device": (_whole(1), "a number from 1"),
    "fail_fast": (bool, "true or false"),
    "resume": (bool, "true or false"),
    "retries": (_whole(0), "a number from 0"),
    "timeout_s": (_seconds, "seconds above 0, or null"),
    "progress": (_kind_of_progress, "auto, plain or none"),
    "dry_run": (bool, "true or false"),
    "debug_rank": (_whole(0, optional=True), "a rank's number, or null"),
    "extra": (_extra, "fields that have no setting here; not " + ", ".join(sorted(_OURS))),
}
"""How each setting is read, and what to say to a value that cannot be."""
