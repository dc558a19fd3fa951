"""Runs a sweep's jobs, as many at once as there is room for, and returns their JobReturns in order
(runs in the launching process).
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    SweepEndedError,
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
from hydra_torchrun_launcher.tries import Tries

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Waiting:
    """A job that has not started."""

    number: int
    overrides: Sequence[str]
    events: EventFile
    ranks: int = 0
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
    tries: Tries
    started: float

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self.started


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
        self._jobs = JobRunner(config)
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
            with suppress(JobStoppedError):  # a signal came while accelerators were counted
                jobs = self._sized(job_overrides, first_number, watch)
                if self._jobs.is_dry:
                    self._describe(jobs, watch)
                returns = _Batch(self, self._jobs, watch).run(jobs)
        except BaseException:
            self.close()
            raise
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
            jobs.append(_Waiting(number, overrides, self._events(number), ranks, config))
        if problems:
            raise SettingsError(problems)
        return jobs

    def _describe(self, jobs: Sequence[_Waiting], watch: SignalWatch) -> NoReturn:
        """Say what the jobs would be, and leave: a sweeper would take values from them."""
        for job in jobs:
            config = job.config or self._compose(job.number, job.overrides)
            dry_run.show(self._jobs.describe(f"Job #{job.number}", config, watch))
        dry_run.show(
            f"Jobs: {len(jobs)}, and none was started (hydra.launcher.dry_run). A sweeper that "
            "proposes jobs in batches would go on from their values"
        )
        raise SystemExit(0)

    def _events(self, number: int) -> EventFile:
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

    def finish(self, job: HydraJob, ended: Ended) -> JobReturn:
        """Do what comes after a job."""
        try:
            result = job.finish(ended)
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
            job.events.add("queued", overrides=list(job.overrides))
        waiting = sorted(jobs, key=lambda job: -job.ranks)  # in their own order where alike
        try:
            while True:
                waiting = self._start_those_that_fit(waiting)
                if not self._running:
                    break
                for begun, ended in self._jobs.wait(self._watch):
                    self._go_on(begun, ended)
        except Exception as error:
            self._end_all(error)
            raise
        return [self._returns[number] for number in sorted(self._returns)]

    def _start_those_that_fit(self, waiting: Sequence[_Waiting]) -> list[_Waiting]:
        """Start jobs as long as there is room, and return those that wait still."""
        left: list[_Waiting] = []
        for job in waiting:
            is_like_last = left and left[-1].ranks == job.ranks  # there is no room for it either
            if is_like_last or not self._start(job):
                left.append(job)
        return left

    def _start(self, waiting: _Waiting) -> bool:
        """Start a job if there is room for it."""
        if self._watch.received is not None:
            return False
        share = self._lender.take(waiting.ranks)
        if share is None:
            return False
        begun = self._begin(waiting, share)
        if begun is None:
            self._lender.give_back(share)
        else:
            self._go_on(begun)
        return True

    def _begin(self, waiting: _Waiting, share: Share) -> Begun | None:
        """Do what Hydra does before a job; return None if the job ends with that."""
        job, number = self._sweep.make(waiting), waiting.number
        if self._sweep.failed_fast is not None:
            self._end_before(waiting, job, FailFastError("not started", self._sweep.failed_fast))
            return None
        log.info("\t#%d : %s", number, " ".join(filter_overrides(waiting.overrides)))
        try:
            begun = job.begin(number)
        except OSError as problem:
            error = StartError(refused(problem))
            log.error("Job #%d failed: %s", number, error)  # noqa: TRY400 - a sentence is enough
            self._end_before(waiting, job, error)
            self._fail_fast(f"job #{number}")
            return None
        self._sweep.log_as_sweep()
        facts = {"output_dir": begun.output_dir, "devices": share.devices, "cores": share.cores}
        tries = Tries(begun.name)
        self._running[begun] = _Running(job, share, waiting.events, facts, tries, time.monotonic())
        return begun

    def _end_before(self, waiting: _Waiting, job: HydraJob, error: Exception) -> None:
        """Note a job that ends before it has begun."""
        waiting.events.ended(Ended(error=error), 0)
        self._returns[waiting.number] = job.not_begun(error)

    def _go_on(self, begun: Begun, ended: Ended | None = None) -> None:
        """Start a job, again if it may run again; note its end if it has come."""
        running = self._running[begun]

        def note(event: str, **facts: Any) -> None:
            more = running.facts if event == "started" else {}
            running.events.add(event, retry=running.tries.number, **facts, **more)

        while ended is None or self._tries_again(begun, ended):
            ended = self._jobs.start(begun, running.share, self._watch, note)
            if ended is None:
                return
        ended = self._end(begun, ended)
        self._returns[begun.number or 0] = self._sweep.finish(running.job, ended)
        if ended.error is not None:
            self._fail_fast(begun.name.lower())

    def _tries_again(self, begun: Begun, ended: Ended) -> bool:
        is_stopping = self._watch.received is not None or self._sweep.failed_fast is not None
        running = self._running[begun]
        number = running.tries.number
        if is_stopping or not self._jobs.tries_again(begun, running.tries, ended):
            return False
        seconds = round(running.seconds, 3)
        running.events.add("failed_try", retry=number, **cause(ended), seconds=seconds)
        return True

    def _end(self, begun: Begun, ended: Ended) -> Ended:
        """Note the end of a job that ran; return it with what is said of its tries."""
        running = self._running.pop(begun)
        self._lender.give_back(running.share)
        running.events.ended(ended, running.seconds)
        return running.tries.all_with(ended)

    def _fail_fast(self, name: str) -> None:
        """Stop what runs, if a failed job is to end the sweep."""
        if self._jobs.fail_fast and self._sweep.failed_fast is None:
            self._sweep.failed_fast = name
            self._stop_all(FailFastError("stopped", name))

    def _stop_all(self, error: Exception) -> None:
        for begun in self._running:
            self._jobs.stop(begun, error)

    def _end_all(self, error: Exception) -> None:
        """End the jobs that run, where the sweep cannot go on: Hydra's part of another failed."""
        self._stop_all(SweepEndedError(f"stopped, as the sweep ended: {type(error).__name__}"))
        while self._running:
            for begun, ended in self._jobs.wait(self._watch):
                self._end(begun, ended)
