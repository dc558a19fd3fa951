"""Runs a sweep's jobs one after another and returns their JobReturns in order (runs in the
launching process).
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, configure_log, filter_overrides, setup_globals
from hydra.types import HydraContext, TaskFunction
from omegaconf import open_dict

from hydra_torchrun_launcher.errors import JobStoppedError, StartError, refused
from hydra_torchrun_launcher.guard import TASK
from hydra_torchrun_launcher.hydra_job import HydraJob, share_settings
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
        self._jobs = JobRunner(config, "hydra.sweep.dir")

    def close(self) -> None:
        """End what still runs, and the servers."""
        self._jobs.close()

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
        watch = SignalWatch(self._jobs.signals)
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
        try:
            begun = job.begin(number)
        except OSError as problem:
            error = StartError(refused(problem))
            log.error("Job #%d failed: %s", number, error)  # noqa: TRY400 - a sentence is enough
            return job.not_begun(error)
        self._log_as_sweep()
        ended = self._jobs.run(begun, watch)
        try:
            result = job.finish(ended)
        finally:
            self._log_as_sweep()
        share_settings(result, self._shared)
        return result

    def _log_as_sweep(self) -> None:
        configure_log(self._config.hydra.hydra_logging, self._config.hydra.verbose)
