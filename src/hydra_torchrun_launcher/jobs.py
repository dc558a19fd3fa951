"""Runs a sweep's jobs: a server, a keeper and agent for each job, JobReturns in order.

Runs in the launching process, which watches its jobs with one selector.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf, open_dict
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
from hydra_torchrun_launcher.hydra_job import HydraJob, share_settings
from hydra_torchrun_launcher.job_run import HandedOver, JobRun
from hydra_torchrun_launcher.payload import Program, Work, pack
from hydra_torchrun_launcher.plans import Surroundings, job_plan, with_thread_limit
from hydra_torchrun_launcher.processes import open_standard_streams
from hydra_torchrun_launcher.servers import Pool, Server
from hydra_torchrun_launcher.settings import Settings, check
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.wire import (
    anonymous_file,
    write_document,
)

log = logging.getLogger(__name__)


class Runner:
    """Runs the batches of jobs that a sweeper hands to its launcher."""

    def __init__(self, context: HydraContext, task_function: TaskFunction, config: Any) -> None:
        """Check the settings and start a server, which imports torch while the sweeper prepares.

        Raises:
            SettingsError: settings cannot work.
            StartError: torch is not installed, or too old; this process is itself a rank, or a
                frozen program; or the sweep directory cannot be made.
        """
        preconditions.check_place()
        preconditions.check_torch()
        open_standard_streams()
        preconditions.check_directory(str(config.hydra.sweep.dir))
        self._context = context
        self._task_function = task_function
        self._config = config
        self._pool = Pool()
        self._accelerators: dict[str, int] | None = None
        self._directories: dict[str, int] = {}
        self._warned: set[str] = set()
        self._shared: dict[str, Any] = {}
        self._running: JobRun | None = None
        environ = {**os.environ, **_env_set(config)}
        settings = _settings(config, environ)
        self._first_signals = settings.signals
        if settings.start_method is not StartMethod.fork:
            preconditions.check_interpreter()
            preconditions.check_preload(settings.preload)
            self._server(with_thread_limit(environ, settings.nproc_per_node), settings)

    def close(self) -> None:
        """End what still runs, and the servers."""
        if self._running is not None:
            self._running.close()
        self._pool.close()

    def run(self, job_overrides: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Run jobs one after another.

        Args:
            job_overrides: the overrides of each job.
            first_number: the number of the first of them in the sweep.

        Returns:
            A JobReturn for each job, in order; a failed job's has its exception inside.
        """
        setup_globals()
        self._log_as_sweep()
        try:
            Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise StartError(refused(problem)) from None
        count = len(job_overrides)
        log.info("Launching %d %s with torchrun", count, "job" if count == 1 else "jobs")
        watch = SignalWatch(self._first_signals)
        returns = []
        try:
            for number, overrides in enumerate(job_overrides, first_number):
                if watch.received is not None:
                    break
                log.info("\t#%d : %s", number, " ".join(filter_overrides(overrides)))
                returns.append(self._run_job(number, overrides, watch))
        finally:
            if watch.received is not None:
                self.close()
            watch.close()
        if watch.received is not None:
            signal.raise_signal(watch.received)
            raise JobStoppedError(watch.received)  # where the user's handler lets the app go on
        return returns

    def _run_job(self, number: int, overrides: Sequence[str], watch: SignalWatch) -> JobReturn:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        job = HydraJob(self._context, self._task_function, config)
        value, restarts = None, []
        error: BaseException | None = None
        try:
            work = job.begin()
        except OSError as problem:
            error = StartError(refused(problem))
            log.error("Job #%d failed: %s", number, error)  # noqa: TRY400 - a sentence is enough
            return job.not_begun(error)
        self._log_as_sweep()
        try:
            with closing(self._start(number, job, work, watch)) as run:
                self._running = run
                run.watch(watch)
                value, error = run.result()
                restarts = run.restarts
        except (LauncherError, OSError) as problem:
            error = problem if isinstance(problem, LauncherError) else StartError(refused(problem))
            if not isinstance(problem, JobStoppedError):
                log.error("Job #%d failed: %s", number, error)  # noqa: TRY400 - it is a sentence
        except Exception as problem:  # our mistake
            error = problem
            log.exception("Job #%d failed in the launching process", number)
        try:
            result = job.finish(value, error, restarts)
        finally:
            self._log_as_sweep()
        share_settings(result, self._shared)
        return result

    def _start(self, number: int, job: HydraJob, work: Work, watch: SignalWatch) -> JobRun:
        settings = _settings(job.config, job.environ)
        nproc = self._count(settings, job.environ, watch)
        for problem in [*settings.ranks_beyond(nproc), *machine.too_many_ranks(nproc, job.environ)]:
            self._warn_once(problem, "Job #%d: %s", number, problem)
        environ = with_thread_limit(job.environ, nproc)
        program = Program.of_this_process()
        work.label = self._label(number, job.output_dir)
        rank_files = self._rank_files(number, job, settings, work.label)
        plan = job_plan(
            settings, nproc, Surroundings(environ, job.working_dir, program, rank_files)
        )
        fork = settings.start_method is StartMethod.fork
        server = _fork_server(work, watch) if fork else self._server(environ, settings)
        document = anonymous_file("plan")
        write_document(document.fileno(), plan, b"" if fork else pack(work, program))
        handed_over = HandedOver(number, settings.max_restarts, settings.shutdown_timeout_s)
        return JobRun(handed_over, server, document, owns_server=fork)

    def _server(self, environ: Mapping[str, str], settings: Settings) -> Server:
        return self._pool.get(environ, settings.preload, settings.preload_env)

    def _rank_files(self, number: int, job: HydraJob, settings: Settings, label: str) -> str | None:
        if settings.log_dir is not None:
            root = os.path.join(settings.log_dir, str(number))
            return os.path.abspath(root)
        if job.leaves_no_files:
            return None
        return os.path.abspath(os.path.join(job.output_dir, "ranks", label))

    def _label(self, number: int, output_dir: str) -> str:
        """Return what sets a job's files apart, if another job of this sweep has its directory."""
        directory = os.path.realpath(output_dir)
        first = self._directories.setdefault(directory, number)
        if first == number:
            return ""
        self._warn_once(
            "directory",
            "Job #%d: its output directory %s is job #%d's too; files of the launcher carry the "
            "job's number, Hydra's own do not (hydra.sweep.subdir sets jobs apart)",
            number, directory, first,
        )  # fmt: skip
        return f"job{number}"

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

    def _log_as_sweep(self) -> None:
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)


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
