"""A batch of a sweep's jobs: starts as many at once as there is room for, and returns their
JobReturns in order (runs in the launching process).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hydra.core.utils import JobReturn, filter_overrides

from hydra_torchrun_launcher.errors import (
    FailFastError,
    StartError,
    SweepEndedError,
    first_line,
    refused,
)
from hydra_torchrun_launcher.events import EventFile, about, cause
from hydra_torchrun_launcher.hydra_job import HydraJob
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.plans import Begun
from hydra_torchrun_launcher.resume import Completed, mark
from hydra_torchrun_launcher.runner import JobRunner
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.slots import Share
from hydra_torchrun_launcher.tries import Tries

log = logging.getLogger(__name__)


@dataclass
class Waiting:
    """A job that has not started."""

    number: int
    overrides: Sequence[str]
    events: EventFile
    ranks: int = 0
    """How many it has per node; 0 where nothing is lent and it does not matter."""
    config: Any = None
    """Its composed config, where that had to be looked at."""
    before: Completed | None = None
    """How it completed in an earlier run, if that is taken over."""


@dataclass
class _Running:
    """A job that has."""

    job: HydraJob
    share: Share
    events: EventFile
    facts: dict[str, Any]
    """What its first event says beside its processes."""
    about: dict[str, Any]
    """What it is known by when it has completed."""
    tries: Tries
    started: float
    ended: Ended | None = None
    """How its last try ended, while it is decided what follows."""

    @property
    def seconds(self) -> float:
        """How long it has run."""
        return time.monotonic() - self.started


class Sweep(Protocol):
    """What a batch is of."""

    failed_fast: tuple[str, str] | None
    """The job whose failure has ended the sweep (hydra.launcher.fail_fast), and how it failed."""

    def make(self, waiting: Waiting) -> HydraJob:
        """Compose a job, if it is not yet."""

    def result_before(self, waiting: Waiting, before: Completed) -> JobReturn:
        """Return the result of a job that has completed before."""

    def finish(self, job: HydraJob, ended: Ended) -> JobReturn:
        """Do what comes after a job."""

    def log_as_sweep(self) -> None:
        """Put the sweep's logging in force, after a job's has been."""


class Batch:
    """The jobs of one batch: those that wait, those that run, and how the others ended."""

    def __init__(self, sweep: Sweep, jobs: JobRunner, watch: SignalWatch) -> None:
        """Have none yet.

        Args:
            sweep: what it is a batch of.
            jobs: runs them.
            watch: the signals that stop them.
        """
        self._sweep = sweep
        self._jobs = jobs
        self._watch = watch
        self._lender = jobs.lender(watch)
        self._running: dict[Begun, _Running] = {}
        self._returns: dict[int, JobReturn] = {}

    def run(self, jobs: Sequence[Waiting]) -> list[JobReturn]:
        """Run jobs until all have ended, or a signal has come and those that ran have.

        The largest of those that wait go first, and smaller ones take what is left. So a large job
        waits only for others of its size or larger, each of which gives back enough for it.
        """
        # What is taken over is noted before anything else is written to the jobs' files.
        for job in sorted(jobs, key=lambda job: job.before is None):
            job.events.add("queued", overrides=list(job.overrides))
            if job.before is not None:
                self._take_over(job, job.before)
        waiting = [job for job in jobs if job.before is None]
        waiting.sort(key=lambda job: -job.ranks)  # in their own order where alike
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

    def _take_over(self, waiting: Waiting, before: Completed) -> None:
        number, overrides = waiting.number, waiting.overrides
        shown = " ".join(filter_overrides(overrides))
        log.info("\t#%d : %s (completed before, as job #%d)", number, shown, before.ran_as)
        known = about(overrides, before.config, before.output_dir)
        ran = {"ran_as": before.ran_as, **before.ran}
        waiting.events.ended(Ended(before.value), before.seconds, {**known, **ran})
        self._returns[number] = self._sweep.result_before(waiting, before)

    def _start_those_that_fit(self, waiting: Sequence[Waiting]) -> list[Waiting]:
        """Start jobs as long as there is room, and return those that wait still."""
        left: list[Waiting] = []
        for job in waiting:
            is_like_last = left and left[-1].ranks == job.ranks  # there is no room for it either
            if is_like_last or not self._start(job):
                left.append(job)
        return left

    def _start(self, waiting: Waiting) -> bool:
        """Start a job if there is room for it."""
        if self._watch.received is not None:
            return False
        self._jobs.check_nodes()
        share = self._lender.take(waiting.ranks)
        if share is None:
            return False
        begun = self._begin(waiting, share)
        if begun is None:
            self._lender.give_back(share)
        else:
            self._go_on(begun)
        return True

    def _begin(self, waiting: Waiting, share: Share) -> Begun | None:
        """Do what Hydra does before a job; return None if the job ends with that."""
        job, number = self._sweep.make(waiting), waiting.number
        if self._sweep.failed_fast is not None:
            log.info("\t#%d : not started", number)
            self._end_before(waiting, job, FailFastError("not started", *self._sweep.failed_fast))
            return None
        log.info("\t#%d : %s", number, " ".join(filter_overrides(waiting.overrides)))
        config = mark(job.config)  # before callbacks change it
        try:
            begun = job.begin(number)
        except OSError as problem:
            error = StartError(refused(problem))
            log.error("Job #%d failed: %s", number, error)  # noqa: TRY400 - a sentence is enough
            self._end_before(waiting, job, error)
            self._fail_fast(f"job #{number}", error)
            return None
        self._sweep.log_as_sweep()
        known = about(waiting.overrides, config, begun.output_dir)
        facts = {"output_dir": begun.output_dir, "devices": share.devices, "cores": share.cores}
        tries = Tries(begun.name)
        self._running[begun] = _Running(
            job, share, waiting.events, facts, known, tries, time.monotonic()
        )
        return begun

    def _end_before(self, waiting: Waiting, job: HydraJob, error: Exception) -> None:
        """Note a job that ends before it has begun."""
        ended = Ended(error=error)
        waiting.events.ended(ended, seconds=0)
        self._returns[waiting.number] = job.not_run(ended)

    def _go_on(self, begun: Begun, ended: Ended | None = None) -> None:
        """Start a job, again if it may run again; note its end if it has come."""
        running = self._running[begun]

        def note(event: str, **facts: Any) -> None:
            more = running.facts if event == "started" else {}
            running.events.add(event, retry=running.tries.number, **facts, **more)

        running.ended = ended
        while running.ended is None or self._tries_again(begun, running.ended):
            running.ended = self._jobs.start(begun, running.share, self._watch, note)
            if running.ended is None:
                return
        ended = self._end(begun, running.ended)
        self._returns[begun.number or 0] = self._sweep.finish(running.job, ended)
        if ended.error is not None:
            self._fail_fast(begun.name.lower(), ended.error)

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
        running.events.ended(ended, running.seconds, running.about, running.tries.number)
        return running.tries.all_with(ended)

    def _fail_fast(self, name: str, error: BaseException) -> None:
        """Stop what runs, if a failed job is to end the sweep."""
        if self._jobs.fail_fast and self._sweep.failed_fast is None:
            self._sweep.failed_fast = name, first_line(error)
            self._stop_all(FailFastError("stopped", *self._sweep.failed_fast))

    def _stop_all(self, error: Exception) -> None:
        for begun in self._running:
            self._jobs.stop(begun, error)

    def _end_all(self, error: Exception) -> None:
        """End the jobs that run, where the sweep cannot go on: Hydra's part of another failed."""
        for begun, running in list(self._running.items()):
            if running.ended is not None:  # it was about to be noted
                self._end(begun, running.ended)
        self._stop_all(SweepEndedError(f"stopped, as the sweep ended: {type(error).__name__}"))
        while self._running:
            for begun, ended in self._jobs.wait(self._watch):
                self._end(begun, ended)
