"""Runs a sweep's jobs, as many at once as there is room for, and returns their JobReturns in order
(runs in the launching process).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import open_dict

from hydra_torchrun_launcher import dry_run
from hydra_torchrun_launcher.errors import (
    FailFastError,
    JobStoppedError,
    SettingsError,
    StartError,
    refused,
)
from hydra_torchrun_launcher.events import EventFile, cause
from hydra_torchrun_launcher.guard import TASK
from hydra_torchrun_launcher.hydra_job import HydraJob, share_settings
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.plans import Begun
from hydra_torchrun_launcher.runner import JobRunner
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.slots import Share

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    """A job that has not started."""

    number: int
    overrides: Sequence[str]
    ranks: int
    """How many it has per node; 0 where nothing is lent and it does not matter."""
    config: Any = None
    """Its composed config, where that had to be looked at."""


@dataclass
class _Running:
    """A job that has."""

    job: HydraJob
    share: Share
    events: EventFile
    facts: dict[str, Any]
    """What its first event says beside its processes."""
    started: float
    retries: int = 0
    """How often it has run again."""
    tries: list[str] = field(default_factory=list)
    """What is said of those that failed."""


class SweepRunner:
    """Runs the batches of jobs that a sweeper hands to its launcher."""

    def __init__(self, context: HydraContext, task_function: TaskFunction, config: Any) -> None:
        """Check the settings and start a server, which imports torch while the sweeper prepares.

        Raises:
            LauncherError: as `JobRunner` does.
        """
        self._context = context
        self._task_function = getattr(task_function, TASK, task_function)
        self._config = config
        self._shared: dict[str, Any] = {}
        self._jobs = JobRunner(config, "hydra.sweep.dir")
        self.failed_fast: str | None = None
        """The job whose failure has ended the sweep, by hydra.launcher.fail_fast."""

    def close(self) -> None:
        """End what still runs, and the servers."""
        self._jobs.close()

    def run(self, job_overrides: Sequence[Sequence[str]], first_number: int) -> list[JobReturn]:
        """Run jobs until all have ended.

        Args:
            job_overrides: the overrides of each job.
            first_number: the number of the first of them in the sweep.

        Returns:
            A JobReturn for each job, in order; a failed job's has its exception inside.

        Raises:
            SettingsError: a job can never run.
            JobStoppedError: a signal came, and the user's handler for it lets the app go on.
        """
        setup_globals()
        self.log_as_sweep()
        try:
            Path(str(self._config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        except OSError as problem:
            raise StartError(refused(problem)) from None
        count = len(job_overrides)
        log.info("Launching %d %s with torchrun", count, "job" if count == 1 else "jobs")
        watch = SignalWatch(self._jobs.signals)
        returns = []
        try:
            jobs = self._sized(job_overrides, first_number, watch)
            if self._jobs.is_dry:
                self._describe(jobs, watch)
            returns = _Batch(self, self._jobs, watch).run(jobs)
        finally:
            if watch.received is not None:
                self.close()
            watch.close()
        if watch.received is not None:
            signal.raise_signal(watch.received)
            raise JobStoppedError(watch.received)  # where the user's handler lets the app go on
        return returns

    def _sized(
        self, job_overrides: Sequence[Sequence[str]], first_number: int, watch: SignalWatch
    ) -> list[_Waiting]:
        """Find out how many ranks each job has, where that decides when it can run."""
        lender = self._jobs.lender(watch)
        if lender.notice:
            log.warning(lender.notice)
        jobs, problems = [], []
        for number, overrides in enumerate(job_overrides, first_number):
            ranks, config = 0, None
            try:
                if lender.lends:
                    config = self._compose(number, overrides)
                    ranks = self._jobs.ranks(config, watch)
            except SettingsError as error:
                problems += [f"job #{number}: {problem}" for problem in error.problems]
            jobs.append(_Waiting(number, overrides, ranks, config))
        if problems:
            raise SettingsError(problems)
        return jobs

    def _describe(self, jobs: Sequence[_Waiting], watch: SignalWatch) -> NoReturn:
        """Say what the jobs would be, and leave: a sweeper would take values from them."""
        for job in jobs:
            config = job.config or self._compose(job.number, job.overrides)
            dry_run.show(self._jobs.describe(f"Job #{job.number}", config, watch))
        raise SystemExit(0)

    def events(self, number: int) -> EventFile:
        """Return a job's events; none are written where the user wants no files of ours."""
        directory = os.path.abspath(str(self._config.hydra.sweep.dir))
        is_project = os.path.realpath(directory) == os.path.realpath(os.getcwd())
        no_files = is_project and self._config.hydra.output_subdir is None
        return EventFile(None if no_files else directory, number)

    def make(self, waiting: _Waiting) -> HydraJob:
        """Compose a job, if it is not yet."""
        config = waiting.config or self._compose(waiting.number, waiting.overrides)
        return HydraJob(self._context, self._task_function, config)

    def _compose(self, number: int, overrides: Sequence[str]) -> Any:
        config = self._context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = str(number)
            config.hydra.job.num = number
        return config

    def finish(self, running: _Running, ended: Ended) -> JobReturn:
        """Do what comes after a job."""
        try:
            result = running.job.finish(ended)
        finally:
            self.log_as_sweep()
        share_settings(result, self._shared)
        return result

    def log_as_sweep(self) -> None:
        """Put the sweep's logging in force, after a job's has been."""
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)


class _Batch:
    """The jobs of one batch: those that wait, those that run, and how the others ended."""

    def __init__(self, sweep: SweepRunner, jobs: JobRunner, watch: SignalWatch) -> None:
        self._sweep = sweep
        self._jobs = jobs
        self._watch = watch
        self._lender = jobs.lender(watch)
        self._running: dict[Begun, _Running] = {}
        self._returns: dict[int, JobReturn] = {}

    def run(self, jobs: Sequence[_Waiting]) -> list[JobReturn]:
        """Run jobs until all have ended, or a signal has come and those that ran have.

        The largest of those that wait go first, and smaller ones take what is left. So a large job
        waits only for others of its size or larger, each of which gives back enough for it.
        """
        for job in jobs:
            self._sweep.events(job.number).add("queued", overrides=list(job.overrides))
        waiting = sorted(jobs, key=lambda job: -job.ranks)  # in their own order where alike
        while True:
            waiting = [job for job in waiting if not self._start(job)]
            if not self._running:
                break
            for begun, ended in self._jobs.wait(self._watch):
                self._end(begun, ended)
        return [self._returns[number] for number in sorted(self._returns)]

    def _start(self, waiting: _Waiting) -> bool:
        """Start a job if there is room for it."""
        if self._watch.received is not None:
            return False
        number, failed = waiting.number, self._sweep.failed_fast
        share = self._lender.take(waiting.ranks)
        if share is None:
            return False
        job = self._sweep.make(waiting)
        events = self._sweep.events(number)
        if failed is not None:
            self._lender.give_back(share)
            never = FailFastError("not started", failed)
            events.ended(Ended(error=never), 0)
            self._returns[number] = job.not_begun(never)
            return True
        log.info("\t#%d : %s", number, " ".join(filter_overrides(waiting.overrides)))
        try:
            begun = job.begin(number)
        except OSError as problem:
            error = StartError(refused(problem))
            log.error("Job #%d failed: %s", number, error)  # noqa: TRY400 - a sentence is enough
            self._lender.give_back(share)
            events.ended(Ended(error=error), 0)
            self._returns[number] = job.not_begun(error)
            self._fail_fast(f"job #{number}")
            return True
        self._sweep.log_as_sweep()
        facts = {"output_dir": begun.output_dir, "devices": share.devices, "cores": share.cores}
        self._running[begun] = _Running(job, share, events, facts, time.monotonic())
        self._try(begun)
        return True

    def _try(self, begun: Begun) -> None:
        running = self._running[begun]

        def note(event: str, **facts: Any) -> None:
            more = running.facts if event == "started" else {}
            running.events.add(event, retry=running.retries, **facts, **more)

        ended = self._jobs.start(begun, running.share, self._watch, note)
        if ended is not None:
            self._end(begun, ended)

    def _end(self, begun: Begun, ended: Ended) -> None:
        running = self._running[begun]
        if ended.error is not None and self._may_retry(begun, ended.error):
            running.events.add("failed_try", retry=running.retries, **cause(ended))
            running.retries += 1
            again = f"it runs again (retry {running.retries} of {self._jobs.retries(begun)})"
            log.warning("%s failed: %s", begun.name, again)
            said = f"{type(ended.error).__name__}: {str(ended.error).partition(chr(10))[0]}"
            running.tries += [*ended.restarts, f"{again}, as it failed: {said}"]
            self._try(begun)
            return
        del self._running[begun]
        self._lender.give_back(running.share)
        running.events.ended(ended, time.monotonic() - running.started)
        ended = replace(ended, restarts=[*running.tries, *ended.restarts])
        self._returns[begun.number or 0] = self._sweep.finish(running, ended)
        if ended.error is not None:
            self._fail_fast(begun.name.lower())

    def _may_retry(self, begun: Begun, error: BaseException) -> bool:
        is_stopping = self._watch.received is not None or self._sweep.failed_fast is not None
        if is_stopping or isinstance(error, SettingsError | JobStoppedError):
            return False
        return self._running[begun].retries < self._jobs.retries(begun)

    def _fail_fast(self, name: str) -> None:
        """Stop what runs, if a failed job is to end the sweep."""
        if self._jobs.fail_fast and self._sweep.failed_fast is None:
            self._sweep.failed_fast = name
            for begun in self._running:
                self._jobs.stop(begun, FailFastError("stopped", name))
