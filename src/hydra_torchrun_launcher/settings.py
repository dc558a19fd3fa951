"""The checks of what a user has set that need only the settings (runs in the launching process)."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydra_torchrun_launcher.config import StartMethod, TorchrunConf
from hydra_torchrun_launcher.errors import SettingsError
from hydra_torchrun_launcher.node_settings import Nodes, nodes_of
from hydra_torchrun_launcher.rules import RULES

_DEFAULT_SHUTDOWN_TIMEOUT_S = 30


@dataclass(frozen=True)
class Sharing:
    """How the jobs of a sweep share the machine; one for the whole sweep.

    Attributes:
        n_jobs: how many run at once; None for as many as fit.
        devices: names of the accelerators that may be lent; None for all that are seen.
        jobs_per_device: how many jobs may share one.
        fail_fast: whether a failed job ends the sweep.
        resume: whether jobs that completed before are taken over.
        dry_run: whether nothing is to be started.
        debug_rank: the rank that has the terminal, or None.
        progress: what is shown of the sweep.
    """

    n_jobs: int | None
    devices: tuple[str, ...] | None
    jobs_per_device: int
    fail_fast: bool
    resume: bool
    dry_run: bool
    debug_rank: int | None
    progress: str

    @property
    def lends(self) -> bool:
        """Whether jobs get a part of the machine; else each sees all of it."""
        return self.n_jobs != 1 or self.devices is not None


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
        sharing: how a sweep's jobs share the machine.
        retries: how often the job runs again after it failed.
        timeout_s: seconds that it may take, or None.
        nodes: the nodes that it runs on; None for one.
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
    sharing: Sharing
    retries: int
    timeout_s: float | None
    nodes: Nodes | None

    def given_terminal(self) -> Settings:
        """Return the settings of a job in which one rank has the terminal, if the user wants it."""
        rank = self.sharing.debug_rank
        if rank is None:
            return self
        files = {"redirects": {}, "tee": {}, "console_ranks": (rank,)}
        signals = tuple(name for name in self.signals if name != "SIGINT")  # the rank's own
        return dataclasses.replace(self, **files, signals=signals, timeout_s=None)  # type: ignore[arg-type]

    def of_single_run(self) -> Settings:
        """Return the settings of a job that shares the machine with no other."""
        return dataclasses.replace(self, sharing=dataclasses.replace(self.sharing, n_jobs=1))

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


def read(config: Any, environ: Mapping[str, str]) -> Settings:
    """Return the settings in a composed config, as `check` does."""
    try:
        raw = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    except OmegaConfBaseException as error:  # a variable that is no number, an unknown resolver
        raise SettingsError([f"hydra.launcher: {str(error).splitlines()[0]}"]) from None
    return check(raw, environ)  # type: ignore[arg-type]


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
    for name, (parse, allowed) in RULES.items():
        try:
            parsed[name] = parse(values[name])
        except (ValueError, TypeError, OverflowError):
            problems.append(f"hydra.launcher.{name}={raw[name]!r}: expected {allowed}")
    nodes, impossible = nodes_of(parsed, environ)
    problems += [*impossible, *_contradictions(parsed)]
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
        sharing=Sharing(**{f.name: parsed[f.name] for f in dataclasses.fields(Sharing)}),
        retries=parsed["retries"],
        timeout_s=parsed["timeout_s"],
        nodes=nodes,
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
    problems = []
    if parsed.get("debug_rank") is not None and parsed.get("n_jobs", 1) != 1:
        problem = (
            f"hydra.launcher.debug_rank={parsed['debug_rank']} gives a rank the terminal, which "
            "one job has at a time: expected n_jobs=1"
        )
        problems.append(problem)
    return problems
