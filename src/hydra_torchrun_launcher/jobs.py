"""A sweep: composes the jobs that a sweeper hands to its launcher, and does what Hydra does around
them (runs in the launching process).
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import open_dict

from hydra_torchrun_launcher import dry_run
from hydra_torchrun_launcher.batches import Batch, Waiting
from hydra_torchrun_launcher.errors import (
    JobStoppedError,
    SettingsError,
    StartError,
    refused,
    signal_name,
)
from hydra_torchrun_launcher.events import EventFile
from hydra_torchrun_launcher.guard import TASK
from hydra_torchrun_launcher.hydra_job import HydraJob, share_settings
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.runner import JobRunner
from hydra_torchrun_launcher.signals import SignalWatch

log = logging.getLogger(__name__)


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
        self.failed_fast: tuple[str, str] | None = None
        """The job whose failure has ended the sweep (hydra.launcher.fail_fast), and its error."""

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
                returns = Batch(self, self._jobs, watch).run(jobs)
        except BaseException:
            self.close()
            raise
        finally:
            if watch.received is not None:
                self.close()
            watch.close()
        if watch.received is not None:
            name, left = signal_name(watch.received), count - len(returns)
            log.warning("Stopped by %s; not started: %d of %d jobs", name, left, count)
            signal.raise_signal(watch.received)
            raise JobStoppedError(watch.received)  # where the user's handler lets the app go on
        return returns

    def _sized(
        self, job_overrides: Sequence[Sequence[str]], first_number: int, watch: SignalWatch
    ) -> list[Waiting]:
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
            jobs.append(Waiting(number, overrides, self._events(number), ranks, config))
        if problems:
            raise SettingsError(problems)
        return jobs

    def _describe(self, jobs: Sequence[Waiting], watch: SignalWatch) -> NoReturn:
        """Say what the jobs would be, and leave: a sweeper would take values from them."""
        said = {}
        for job in sorted(jobs, key=lambda job: -job.ranks):  # as they would start
            config = job.config or self._compose(job.number, job.overrides)
            said[job.number] = self._jobs.describe(f"Job #{job.number}", config, watch)
        for _, text in sorted(said.items()):
            dry_run.show(text)
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

    def make(self, waiting: Waiting) -> HydraJob:
        """Compose a job, if it is not yet."""
        config, waiting.config = waiting.config, None  # a job that is over keeps none here
        config = config or self._compose(waiting.number, waiting.overrides)
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
