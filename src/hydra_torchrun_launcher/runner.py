"""Runs jobs that Hydra has begun: checks and servers before the first, then a keeper for each (runs
in the launching process).
"""

from __future__ import annotations

import logging
import os
import random
import sys
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydra_torchrun_launcher import freshness, machine, preconditions
from hydra_torchrun_launcher.config import StartMethod
from hydra_torchrun_launcher.errors import (
    JobStoppedError,
    LauncherError,
    SettingsError,
    StartError,
    refused,
)
from hydra_torchrun_launcher.job_run import HandedOver, JobRun
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.payload import Program, Work, pack
from hydra_torchrun_launcher.plans import Begun, Surroundings, job_plan, with_thread_limit
from hydra_torchrun_launcher.processes import open_standard_streams
from hydra_torchrun_launcher.servers import Pool, Server
from hydra_torchrun_launcher.settings import Settings, check
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.wire import anonymous_file, write_document

log = logging.getLogger(__name__)


class JobRunner:
    """Runs the jobs of a sweep, or of a single run."""

    def __init__(self, config: Any, directory: str) -> None:
        """Check what can be checked and start a server, which imports torch meanwhile.

        Args:
            config: the sweep's or the run's own config.
            directory: the setting of Hydra's that says where it writes: sweep.dir or run.dir.

        Raises:
            SettingsError: settings cannot work.
            StartError: torch is not installed, or too old; this process is itself a rank, or a
                frozen program; or the directory cannot be made.
        """
        preconditions.check_place()
        preconditions.check_torch()
        open_standard_streams()
        preconditions.check_directory(directory, str(OmegaConf.select(config, directory)))
        self._pool = Pool()
        self._accelerators: dict[str, int] | None = None
        self._directories: dict[str, int | None] = {}
        self._warned: set[str] = set()
        self._running: JobRun | None = None
        environ = {**os.environ, **_env_set(config)}
        settings = _settings(config, environ)
        self.signals = settings.signals
        """Names of the signals that stop the sweep."""
        if settings.start_method is not StartMethod.fork:
            preconditions.check_interpreter()
            preconditions.check_preload(settings.preload)
            self._server(with_thread_limit(environ, settings.nproc_per_node), settings)

    def close(self) -> None:
        """End what still runs, and the servers."""
        if self._running is not None:
            self._running.close()
        self._pool.close()

    def run(self, job: Begun, watch: SignalWatch) -> Ended:
        """Run a job to its end; what goes wrong is said on the console and returned."""
        try:
            with closing(self._start(job, watch)) as run:
                self._running = run
                run.watch(watch)
                value, error = run.result()
                return Ended(value, error, run.restarts)
        except (LauncherError, OSError) as problem:
            error = problem if isinstance(problem, LauncherError) else StartError(refused(problem))
            if not isinstance(problem, JobStoppedError):
                log.error("%s failed: %s", job.name, error)  # noqa: TRY400 - it is a sentence
        except Exception as problem:  # our mistake
            error = problem
            log.exception("%s failed in the launching process", job.name)
        return Ended(error=error)

    def _start(self, job: Begun, watch: SignalWatch) -> JobRun:
        settings = _settings(job.config, job.environ)
        nproc = self._count(settings, job.environ, watch)
        for problem in [*settings.ranks_beyond(nproc), *machine.too_many_ranks(nproc, job.environ)]:
            self._warn_once(problem, "%s: %s", job.name, problem)
        environ = with_thread_limit(job.environ, nproc)
        program = Program.of_this_process()
        job.work.label = self._label(job)
        rank_files = _rank_files(job, settings)
        plan = job_plan(
            settings, nproc, Surroundings(environ, job.working_dir, program, rank_files)
        )
        fork = settings.start_method is StartMethod.fork
        server = _fork_server(job.work, watch) if fork else self._server(environ, settings)
        document = anonymous_file("plan")
        write_document(document.fileno(), plan, b"" if fork else pack(job.work, program))
        handed_over = HandedOver(
            job.number or 0, job.name, settings.max_restarts, settings.shutdown_timeout_s
        )
        return JobRun(handed_over, server, document, owns_server=fork)

    def _server(self, environ: Mapping[str, str], settings: Settings) -> Server:
        return self._pool.get(environ, settings.preload, settings.preload_env)

    def _label(self, job: Begun) -> str:
        """Return what sets a job's files apart, if another job of this sweep has its directory."""
        directory = os.path.realpath(job.output_dir)
        first = self._directories.setdefault(directory, job.number)
        if first == job.number:
            return ""
        self._warn_once(
            "directory",
            "%s: its output directory %s is job #%d's too; files of the launcher carry the job's "
            "number, Hydra's own do not (hydra.sweep.subdir sets jobs apart)",
            job.name, directory, first,
        )  # fmt: skip
        return f"job{job.number}"

    def _warn_once(self, subject: str, text: str, *values: object) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning(text, *values)

    def _count(self, settings: Settings, environ: Mapping[str, str], watch: SignalWatch) -> int:
        """Return the number of ranks, counting accelerators or cores where that is asked for."""
        wanted = settings.nproc_per_node
        if isinstance(wanted, int):
            return wanted
        if wanted == "cpu":
            return machine.cpu_cores()
        if self._accelerators is None:
            server = self._server(with_thread_limit(environ, wanted), settings)
            self._accelerators = server.ask("count", watch)
        if wanted == "gpu" and not self._accelerators["gpus"]:
            problem = (
                "hydra.launcher.nproc_per_node='gpu': torch sees no GPU here; use cpu or a number"
            )
            raise SettingsError([problem])
        found = self._accelerators["gpus" if wanted == "gpu" else "accelerators"]
        return found or machine.cpu_cores()


def _rank_files(job: Begun, settings: Settings) -> str | None:
    if settings.log_dir is not None:
        number = () if job.number is None else (str(job.number),)
        return os.path.abspath(os.path.join(settings.log_dir, *number))
    if job.leaves_no_files:
        return None
    return os.path.abspath(os.path.join(job.output_dir, "ranks", job.work.label))


def _settings(config: Any, environ: Mapping[str, str]) -> Settings:
    try:
        raw = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    except OmegaConfBaseException as error:  # a variable that is no number, an unknown resolver
        raise SettingsError([f"hydra.launcher: {str(error).splitlines()[0]}"]) from None
    return check(raw, environ)  # type: ignore[arg-type]


def _env_set(config: Any) -> dict[str, str]:
    """Return what the job sets itself; run_job applies it, a server may have to know it before."""
    try:
        values = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
    except Exception:  # noqa: BLE001 - resolvable within a job only
        return {}
    return {str(key): str(value) for key, value in values.items()}  # type: ignore[union-attr]


def _fork_server(work: Work, watch: SignalWatch) -> Server:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        problem = (
            "hydra.launcher.start_method='fork': CUDA is initialized in the launching process, and "
            "its state does not survive a fork; use forkserver or spawn"
        )
        raise SettingsError([problem])

    random_state = random.getstate()

    def in_child() -> None:
        watch.restore()
        freshness.inherited = freshness.Inherited(work, random_state)

    return Server.fork(in_child)
