"""A job's plan: what its keeper, its agent and its ranks are told, as plain data (made in the
launching process).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra_torchrun_launcher.payload import Program, Work
from hydra_torchrun_launcher.settings import Settings
from hydra_torchrun_launcher.slots import Share

_EVERYTHING = Share()


@dataclass(frozen=True, eq=False)
class Begun:
    """A job for which Hydra has done all that comes before the task.

    Attributes:
        number: its number in the sweep; None for a single run.
        config: its composed config, with the `hydra` node.
        output_dir: its output directory.
        environ: the environment in which the task would run.
        working_dir: the directory in which it would.
        work: what its ranks do.
    """

    number: int | None
    config: Any = field(repr=False)
    output_dir: str
    environ: Mapping[str, str] = field(repr=False)
    working_dir: str
    work: Work = field(repr=False)

    @property
    def name(self) -> str:
        """What messages call it."""
        return "Job" if self.number is None else f"Job #{self.number}"

    @property
    def leaves_no_files(self) -> bool:
        """Whether the user wants none in what is the directory of the project."""
        here = os.path.realpath(self.output_dir) == os.path.realpath(os.getcwd())
        return here and self.config.hydra.output_subdir is None


@dataclass(frozen=True)
class Surroundings:
    """What a job's ranks find.

    Attributes:
        environ: their environment, before torch elastic's variables.
        working_dir: where they run.
        program: the user's program.
        rank_files: folder for their files; None for none.
        share: their part of the machine.
        job_label: what lines on the console begin with where jobs run at once; else empty.
        run_id: the job's id for torch elastic, or None for a new one.
        node: as in `Role`.
    """

    environ: Mapping[str, str]
    working_dir: str
    program: Program
    rank_files: str | None
    share: Share
    job_label: str
    run_id: str | None
    node: dict[str, Any] | None


def job_plan(settings: Settings, nproc: int, found: Surroundings) -> dict[str, Any]:
    """Return the plan of a job of `nproc` ranks per node."""
    return {
        "environ": {**found.environ},
        "cwd": found.working_dir,
        "program": found.program.as_dict(),
        "start_method": settings.start_method.name,
        "shutdown_timeout_s": settings.shutdown_timeout_s,
        "numa_binding": settings.numa_binding,
        "cores": found.share.cores,
        "debug_rank": settings.sharing.debug_rank,
        "agent": {
            "nproc_per_node": nproc,
            "run_id": found.run_id,
            "node": found.node,
            "max_restarts": settings.max_restarts,
            "monitor_interval_s": settings.monitor_interval_s,
            "role": settings.role,
            "signals": settings.signals,
            "shutdown_timeout_s": settings.shutdown_timeout_s,
            "redirects": settings.redirects,
            "tee": settings.tee,
            "console_ranks": settings.console_ranks,
            "launch_config": settings.launch_config,
            "rank_files": found.rank_files,
            "job_label": found.job_label,
        },
    }


def with_thread_limit(
    environ: Mapping[str, str], nproc: int | str, share: Share = _EVERYTHING
) -> dict[str, str]:
    """Keep ranks from each using all cores, as the torchrun command does (torch's API does not).

    A job that has cores of its own uses them all.
    """
    if "OMP_NUM_THREADS" in environ:
        return {**environ}
    if share.cores is not None and isinstance(nproc, int):
        return {**environ, "OMP_NUM_THREADS": str(max(1, len(share.cores) // nproc))}
    limit = {} if nproc == 1 else {"OMP_NUM_THREADS": "1"}
    return {**environ, **limit}
