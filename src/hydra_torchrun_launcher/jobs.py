"""A sweep: composes the jobs that a sweeper hands to its launcher, and does what Hydra does around
them (runs in the launching process).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, configure_log, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import open_dict

from hydra_torchrun_launcher import dry_run, guard
from hydra_torchrun_launcher.batches import Batch, Waiting
from hydra_torchrun_launcher.claims import Claim
from hydra_torchrun_launcher.errors import (
    JobStoppedError,
    SettingsError,
    StartError,
    refused,
    signal_name,
)
from hydra_torchrun_launcher.events import FOLDER, EventFile
from hydra_torchrun_launcher.guard import TASK
from hydra_torchrun_launcher.hydra_job import HydraJob, share_settings
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.resume import Completed, Records, records_to_resume, remains
from hydra_torchrun_launcher.runner import JobRunner
from hydra_torchrun_launcher.several import Company, in_company
from hydra_torchrun_launcher.signals import SignalWatch

log = logging.getLogger(__name__)

_REMAINS_LEAVE_S = 120
"""How long to wait for the ranks of a run whose launching process was killed."""


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
        self._folder = self._record_folder()
        self._has_begun = False
        self._records: Records | None = None
        self._company: Company | None = None
        self._has_failed = False
        self._signum: int | None = None
        self.failed_fast: tuple[str, str] | None = None
        """The job whose failure has ended the sweep (hydra.launcher.fail_fast), and its error."""

    def prepare(self) -> None:
        """Lead the other nodes, if there are any; on a node that follows, follow and leave.

        Raises:
            SystemExit: this node has followed; the status is the sweep's.
            LauncherError: this node cannot lead, or has no leader, or has lost it; the sweep's
                directory cannot be made; or there is nothing to resume.
        """
        loader = self._context.config_loader
        try:
            self._company = in_company(
                self._jobs, "sweep", loader, self._task_function, self._config
            )
            self._jobs.check_directory(self._config)
            if self._jobs.is_resumed:
                self._records = records_to_resume(self._folder, self._config.hydra)
        except BaseException:
            self.close()
            raise
        if self._company is not None:
            guard.at_multirun_end.append(self._end_well)

    def _end_well(self) -> None:
        """Tell the other nodes that the sweep is over, and has gone well."""
        if self._company is not None and not self._company.end(0):
            raise SystemExit(1)

    def close(self) -> None:
        """End what still runs, and the servers; leave the directory and the other nodes."""
        self._jobs.close()
        if self._company is not None:
            is_told = "torchrun_guard" in (self._config.hydra.callbacks or {})
            self._company.end(int(is_told or self._has_failed), self._signum)
        claim, self._jobs.claim = self._jobs.claim, None
        if claim is not None and self._has_begun:
            claim.release()
        elif claim is not None:
            claim.withdraw()

    def _record_folder(self) -> Path | None:
        """Return where the sweep's records are; None where the user wants no files of ours."""
        directory = os.path.abspath(str(self._config.hydra.sweep.dir))
        is_project = os.path.realpath(directory) == os.path.realpath(os.getcwd())
        no_files = is_project and self._config.hydra.output_subdir is None
        return None if no_files else Path(directory, FOLDER)

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
            self._claim()
        except OSError as problem:
            raise StartError(refused(problem)) from None
        count = len(job_overrides)
        log.info("Launching %d %s with torchrun", count, "job" if count == 1 else "jobs")
        watch = SignalWatch(self._jobs.signals)
        returns = []
        try:
            with suppress(JobStoppedError):  # a signal came while something was waited for
                if self._company is not None:
                    self._company.gather(watch)
                jobs = self._sized(job_overrides, first_number, watch)
                self._has_begun = True
                if self._jobs.is_dry:
                    self._describe(jobs, watch)
                with self._jobs.progress.shown():
                    returns = Batch(self, self._jobs, watch).run(jobs)
        except BaseException:
            self.close()
            raise
        finally:
            self._signum = watch.received
            if watch.received is not None:
                self.close()
            watch.close()
        if watch.received is not None:
            name, left = signal_name(watch.received), count - len(returns)
            log.warning("Stopped by %s; not started: %d of %d jobs", name, left, count)
            signal.raise_signal(watch.received)
            raise JobStoppedError(watch.received)  # where the user's handler lets the app go on
        return returns

    def _claim(self) -> None:
        """Keep other sweeps out of the directory."""
        if self._folder is not None and self._jobs.claim is None and not self._jobs.is_dry:
            name, directory = str(self._config.hydra.job.name), str(self._config.hydra.sweep.dir)
            facts = {"app": name, "command": sys.orig_argv}
            self._jobs.claim = Claim.take(self._folder, directory, facts)
            self._await_remains(self._folder)

    def _await_remains(self, folder: Path) -> None:
        """Wait for the ranks of an earlier run that was killed: they may write here until they go.

        Raises:
            StartError: they do not go.
        """
        left = remains(folder)
        if left:
            log.info("Waiting for what is left of the run before (%d jobs)", len(left))
        _, alive = psutil.wait_procs(left, _REMAINS_LEAVE_S)
        if alive:
            pids = ", ".join(str(process.pid) for process in alive)
            problem = (
                f"{folder.parent}: jobs of the run before still run there {_REMAINS_LEAVE_S} s "
                f"after their launching process ended (keeper processes {pids}): end them"
            )
            raise StartError(problem)

    def _sized(
        self, job_overrides: Sequence[Sequence[str]], first_number: int, watch: SignalWatch
    ) -> list[Waiting]:
        """Find out how many ranks each job has, where that decides when it can run."""
        lender = self._jobs.lender(watch)
        if lender.notice:
            log.warning(lender.notice)
        jobs, problems = [], []
        for number, overrides in enumerate(job_overrides, first_number):
            ranks = 0
            before, config = self._completed_before(number, overrides)
            try:
                if lender.lends and before is None:
                    config = config or self._compose(number, overrides)
                    ranks = self._jobs.ranks(config, watch)
            except SettingsError as error:
                problems += [f"job #{number}: {problem}" for problem in error.problems]
            jobs.append(Waiting(number, overrides, self._events(number), ranks, config, before))
        problems += self._collisions(jobs)
        if problems:
            raise SettingsError(problems)
        return jobs

    def _completed_before(
        self, number: int, overrides: Sequence[str]
    ) -> tuple[Completed | None, Any]:
        """Return how a job completed in an earlier run, and its config if it had to be composed."""
        if self._records is None:
            return None, None
        config = self._compose(number, overrides) if self._records.of(overrides) else None
        before, why = self._records.find(number, overrides, config)
        if before is None:
            log.info("Job #%d (%s) runs: %s", number, " ".join(overrides), why)
        return before, config

    def _collisions(self, jobs: Sequence[Waiting]) -> list[str]:
        """Say which jobs would write where the results are that others take over."""
        moved = {}
        for job in jobs:
            if job.before is not None:
                there = os.path.realpath(job.before.output_dir)
                if there != self._directory(job.config):  # else the user has them share one
                    moved[there] = job
        problems = []
        for job in jobs if moved else ():
            if job.before is None:
                job.config = job.config or self._compose(job.number, job.overrides)
                directory = self._directory(job.config)
                other = moved.get(directory)
                if other is not None:
                    this, that = (" ".join(each.overrides) for each in (job, other))
                    problems.append(
                        f"job #{job.number} ({this}) would write to {directory}, where the result "
                        f"of job #{other.number} ({that}) is: keep the order of the jobs and add "
                        "new ones at the end, or set hydra.sweep.subdir by the overrides"
                    )
        return problems

    def _directory(self, config: Any) -> str:
        """Return where a job's files would be."""
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)
        try:
            sweep = config.hydra.sweep
            return os.path.realpath(os.path.join(str(sweep.dir), str(sweep.subdir)))
        finally:
            HydraConfig.instance().cfg = before

    def _describe(self, jobs: Sequence[Waiting], watch: SignalWatch) -> NoReturn:
        """Say what the jobs would be, and leave: a sweeper would take values from them."""
        said = {}
        for job in sorted(jobs, key=lambda job: -job.ranks):  # as they would start
            if job.before is not None:
                overrides = " ".join(job.overrides)
                said[job.number] = f"Job #{job.number}: {overrides}\n  has completed before"
                continue
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
        return EventFile(self._folder, number, self._jobs.progress.take_in)

    def result_before(self, waiting: Waiting, before: Completed) -> JobReturn:
        """Return the result of a job that has completed before."""
        return self.make(waiting).not_run(Ended(before.value), before.output_dir)

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
            self._has_failed = self._has_failed or ended.error is not None
            result = job.finish(ended)
        finally:
            self.log_as_sweep()
        share_settings(result, self._shared)
        return result

    def log_as_sweep(self) -> None:
        """Put the sweep's logging in force, after a job's has been."""
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
