"""Runs a sweep's jobs: a server, a keeper and agent for each job, JobReturns in order.

Runs in the launching process, which watches its jobs with one selector.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import selectors
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf, open_dict

from hydra_torchrun_launcher import config as settings_of
from hydra_torchrun_launcher import worker
from hydra_torchrun_launcher.config import Settings, StartMethod
from hydra_torchrun_launcher.errors import (
    JobStoppedError,
    LauncherError,
    SettingsError,
    StartError,
)
from hydra_torchrun_launcher.hydra_job import HydraJob
from hydra_torchrun_launcher.job_files import RankFolders
from hydra_torchrun_launcher.outcomes import Failure, describe, load_value
from hydra_torchrun_launcher.payload import MAIN, Program, Work, pack
from hydra_torchrun_launcher.servers import Pool, Server
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.wire import (
    Closed,
    Fd,
    anonymous_file,
    channel_pair,
    write_document,
)

log = logging.getLogger(__name__)


class Runner:
    """Runs the batches of jobs that a sweeper hands to its launcher."""

    def __init__(self, context: HydraContext, task_function: TaskFunction, config: Any) -> None:
        """Check the settings and start a server, which imports torch while the sweeper prepares.

        Raises:
            SettingsError: settings cannot work.
            StartError: torch is not installed.
        """
        if importlib.util.find_spec("torch") is None:
            problem = (
                f"torch is not installed for {sys.executable}; hydra/launcher=torchrun needs it"
            )
            raise StartError(problem)
        self._context = context
        self._task_function = task_function
        self._config = config
        self._pool = Pool()
        self._accelerators: dict[str, int] | None = None
        environ = {**os.environ, **_env_set(config)}
        settings = _settings(config, environ)
        self._first_signals = settings.signals
        if settings.start_method is not StartMethod.fork:
            self._pool.get(_with_thread_limit(environ, settings.nproc_per_node), settings.preload)

    def close(self) -> None:
        """End the servers."""
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
        Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        log.info("Launching %d jobs with torchrun", len(job_overrides))
        # Types of the script are named by its name in the ranks, whatever comes back from them.
        sys.modules.setdefault(MAIN, sys.modules["__main__"])
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
            watch.restore()
        if watch.received is not None:
            signal.raise_signal(watch.received)
            raise JobStoppedError(watch.received)  # where the user's handler lets the app go on
        return returns

    def _run_job(self, number: int, overrides: Sequence[str], watch: SignalWatch) -> JobReturn:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        settings = _settings(config, {**os.environ, **_env_set(config)})
        job = HydraJob(self._context, self._task_function, config)
        work = job.begin()
        self._log_as_sweep()
        try:
            run = self._start(number, job, work, settings, watch)
            run.watch(watch)
            value, error = run.result()
        except LauncherError as problem:
            value, error = None, problem
            log.error("Job #%d: %s", number, problem)  # noqa: TRY400 - a sentence is enough
        try:
            return job.finish(value, error)
        finally:
            self._log_as_sweep()

    def _start(
        self, number: int, job: HydraJob, work: Work, settings: Settings, watch: SignalWatch
    ) -> JobRun:
        nproc = self._count(settings, job.environ)
        environ = _with_thread_limit(job.environ, nproc)
        program = Program.of_this_process()
        root = os.path.join(settings.log_dir, str(number)) if settings.log_dir else ""
        folders = RankFolders.next_free(
            os.path.abspath(root or os.path.join(job.output_dir, "ranks"))
        )
        plan = {
            "environ": environ,
            "cwd": job.working_dir,
            "program": program.as_dict(),
            "start_method": settings.start_method.name,
            "shutdown_timeout_s": settings.shutdown_timeout_s,
            "agent": _agent_plan(settings, nproc, folders),
        }
        fork = settings.start_method is StartMethod.fork
        get = self._pool.get
        server = _fork_server(work, watch) if fork else get(environ, settings.preload)
        document = anonymous_file("plan")
        write_document(document.fileno(), plan, b"" if fork else pack(work, program))
        return JobRun(number, server, document, folders, owns_server=fork)

    def _count(self, settings: Settings, environ: Mapping[str, str]) -> int:
        """Return the number of ranks, counting accelerators or cores where that is asked for."""
        wanted = settings.nproc_per_node
        if isinstance(wanted, int):
            return wanted
        if wanted == "cpu":
            return settings_of.cpu_cores()
        if self._accelerators is None:
            server = self._pool.get(_with_thread_limit(environ, wanted), settings.preload)
            self._accelerators = server.ask("count")
        if wanted == "gpu" and not self._accelerators["gpus"]:
            problem = (
                "hydra.launcher.nproc_per_node='gpu': torch sees no GPU here; use cpu or a number"
            )
            raise SettingsError([problem])
        found = self._accelerators["gpus" if wanted == "gpu" else "accelerators"]
        return found or settings_of.cpu_cores()

    def _log_as_sweep(self) -> None:
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)


def _settings(config: Any, environ: Mapping[str, str]) -> Settings:
    raw = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    return settings_of.check(raw, environ)  # type: ignore[arg-type]


def _env_set(config: Any) -> dict[str, str]:
    """Return what the job sets itself; run_job applies it, a server may have to know it before."""
    try:
        values = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
    except Exception:  # noqa: BLE001 - resolvable within a job only
        return {}
    return {str(key): str(value) for key, value in values.items()}  # type: ignore[union-attr]


def _with_thread_limit(environ: Mapping[str, str], nproc: int | str) -> dict[str, str]:
    """Keep ranks from each using all cores, as the torchrun command does (torch's API does not)."""
    limit = {} if nproc == 1 or "OMP_NUM_THREADS" in environ else {"OMP_NUM_THREADS": "1"}
    return {**environ, **limit}


def _agent_plan(settings: Settings, nproc: int, folders: RankFolders) -> dict[str, Any]:
    return {
        "nproc_per_node": nproc,
        "max_restarts": settings.max_restarts,
        "monitor_interval_s": settings.monitor_interval_s,
        "role": settings.role,
        "signals": settings.signals,
        "shutdown_timeout_s": settings.shutdown_timeout_s,
        "redirects": settings.redirects,
        "tee": settings.tee,
        "console_ranks": settings.console_ranks,
        "extra": settings.extra,
        "folders": asdict(folders),
    }


def _fork_server(work: Work, watch: SignalWatch) -> Server:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        problem = (
            "hydra.launcher.start_method='fork': CUDA is initialized in the launching process, and "
            "its state does not survive a fork; use forkserver or spawn"
        )
        raise SettingsError([problem])

    def in_child() -> None:
        watch.restore()
        worker.inherited = work

    return Server.fork(in_child)


class JobRun:
    """One job's processes, as the launching process sees them."""

    def __init__(
        self, number: int, server: Server, document: Fd, folders: RankFolders, *, owns_server: bool
    ) -> None:
        """Hand the job to its server."""
        self._number = number
        self._server = server
        self._folders = folders
        self._owns_server = owns_server
        self._failures: list[Failure] = []
        self._attempt = 0
        self._done: dict[str, Any] | None = None
        self._value: Fd | None = None
        self._ended: dict[str, Any] | None = None
        self._signals_sent = 0
        self._job, keepers_end = channel_pair()
        _flush()
        null = Fd(os.open(os.devnull, os.O_RDWR))
        streams = [number if _is_open(number) else null.fileno() for number in range(3)]
        try:
            fds = (keepers_end.fileno(), document.fileno(), *streams)
            server.channel.send({"op": "job", "job": number}, fds)
        except Closed as error:
            problem = f"the launcher's server (pid {server.pid}) was lost"
            raise StartError(problem) from error
        finally:
            keepers_end.close()
            document.close()

    def watch(self, watch: SignalWatch) -> None:
        """Follow the job until nothing of it is left."""
        handlers: dict[Any, Callable[[], None]] = {
            watch: watch.drain,
            self._job: self._hear_keeper,
            self._server.channel: self._hear_server,
        }
        while self._job.fileno() >= 0 or not (self._ended or self._server.dead):
            self._pass_on(watch)
            with selectors.DefaultSelector() as selector:
                for source in handlers:
                    if source.fileno() >= 0:
                        selector.register(source, selectors.EVENT_READ)
                ready = [key.fileobj for key, _ in selector.select()]
            for source in ready:
                handlers[source]()
        if self._owns_server:
            self._server.close()

    def _pass_on(self, watch: SignalWatch) -> None:
        """Hand signals on: the first asks the ranks to leave, a second kills them."""
        while self._signals_sent < min(watch.count, 2) and self._job.fileno() >= 0:
            self._signals_sent += 1
            order: dict[str, Any] = {"op": "kill"}
            if self._signals_sent == 1:
                order = {"op": "stop", "signal": watch.received}
                name = signal.Signals(watch.received or 0).name
                log.warning("Job #%d: stopping on %s; a second signal kills it", self._number, name)
            try:
                self._job.send(order)
            except Closed:
                return

    def _hear_server(self) -> None:
        message = self._server.hear()
        if message is not None and message["op"] == "ended" and message["job"] == self._number:
            self._ended = message

    def _hear_keeper(self) -> None:
        try:
            message, fds = self._job.receive()
        except Closed:
            self._job.close()
            return
        operation = message["op"]
        if operation == "failed":
            self._note_failure(Failure.read(message, fds[0], self._folders))
        elif operation == "lingered":
            log.warning(
                "Job #%d: rank %d returned but did not leave in time (a thread or an exit handler "
                "that does not end); it was killed", self._number, message["global_rank"],
            )  # fmt: skip
        elif operation == "done":
            self._done = message
            self._value = fds[0] if fds else None

    def _note_failure(self, failure: Failure) -> None:
        if failure.attempt != self._attempt:
            self._attempt, self._failures = failure.attempt, []
        self._failures.append(failure)
        if len(self._failures) == 1:
            log.error("Job #%d failed: %s", self._number, failure.report())
        else:
            log.error("Job #%d: also failed: %s", self._number, failure.line())

    def result(self) -> tuple[Any, BaseException | None]:
        """Return rank 0's value, or None and why the job failed."""
        done = self._done or {"state": "keeper lost"}
        state = done["state"]
        if state == "succeeded" and self._value is not None:
            return load_value(self._value)
        if state == "stopped":
            return None, JobStoppedError(done["signal"])
        if state in ("refused", "broken"):
            return None, self._log_start_error(done["message"])
        if self._failures:
            return None, self._failures[0].error(self._failures[1:])
        return None, self._log_start_error(describe(state, done, self._ended))

    def _log_start_error(self, message: str) -> StartError:
        log.error("Job #%d failed: %s", self._number, message)
        return StartError(message)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True
