"""A single run, in Hydra's RUN mode, whose task function runs in ranks (runs in the launching
process).

Hydra's own run does all else: its run_job calls this in the place of the task function.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime, configure_log, setup_globals
from hydra.types import TaskFunction

from hydra_torchrun_launcher import dry_run, payload, rank_logging
from hydra_torchrun_launcher.errors import LauncherError, NodeLostError, StartError
from hydra_torchrun_launcher.hydra_job import hydra_logs_failures, log_ended
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.plans import Begun
from hydra_torchrun_launcher.runner import JobRunner
from hydra_torchrun_launcher.several import in_company
from hydra_torchrun_launcher.signals import SignalWatch


class SingleRun:
    """One job, in the directory `hydra.run.dir`."""

    def __init__(self, config: Any, task_function: TaskFunction) -> None:
        """Check the settings and start a server, before Hydra makes the directory.

        Args:
            config: the composed config, from which Hydra will make the task's.
            task_function: the task.

        Raises:
            SystemExit: it was a dry run, or this node of several has followed and has done.
            LauncherError: as `JobRunner` does.
        """
        self._config = config
        self.signum: int | None = None
        """The signal that stopped it."""
        setup_globals()
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(config)  # the directory's name may ask for it
        try:
            payload.evaluate_cached_resolvers(config)
            self._jobs = JobRunner(config, is_single=True)
            with ExitStack() as stack:
                stack.callback(self._jobs.close)
                self._describe_or_meet(task_function)
                stack.pop_all()
        finally:
            HydraConfig.instance().cfg = before

    def _describe_or_meet(self, task_function: TaskFunction) -> None:
        if self._jobs.is_dry:
            self._jobs.check_directory(self._config)
            with closing(SignalWatch(self._jobs.signals)) as watch:
                dry_run.show(self._jobs.describe("Job", self._config, watch))
            raise SystemExit(0)
        loader = GlobalHydra.instance().config_loader()
        self._company = in_company(self._jobs, "single run", loader, task_function, self._config)
        try:
            self._jobs.check_directory(self._config)
        except StartError:
            self.close()
            raise

    def close(self) -> None:
        """End what still runs, and the servers; have other nodes leave."""
        self._jobs.close()
        if self._company is not None:
            self._company.end(1, self.signum)

    def run(self, task_function: TaskFunction, task_config: Any) -> Ended:
        """Run the task function in ranks, where Hydra would call it itself."""
        hydra = self._config.hydra
        whitelist = rank_logging.active_whitelist()
        work = payload.Work(
            task=task_function,
            config=task_config,
            hydra_config=HydraConfig.instance().cfg,
            job_name=str(JobRuntime.instance().get("name")),
            search_path=GlobalHydra.instance().config_loader().get_search_path(),
            resolvers=payload.resolvers(),
            execution_whitelist=whitelist,
        )
        output_dir = str(hydra.runtime.output_dir)
        begun = Begun(None, self._config, output_dir, dict(os.environ), os.getcwd(), work)
        # The job's log is rank 0's while it runs.
        configure_log(hydra.hydra_logging, hydra.verbose)
        with closing(SignalWatch(self._jobs.signals)) as watch:
            ended = self._run(begun, watch)
            self.signum = watch.received
            self.close()
        logged = replace(ended, error=None) if hydra_logs_failures() else ended
        log_ended(begun.name, hydra, logged, whitelist)
        return ended

    def _run(self, begun: Begun, watch: SignalWatch) -> Ended:
        """Run the job, on all nodes."""
        if self._company is None:
            return self._jobs.run(begun, watch)
        try:
            self._company.gather(watch)
        except LauncherError as error:
            return Ended(error=error)
        ended = self._jobs.run(begun, watch)
        self.signum = watch.received
        status = 0 if ended.error is None else 1
        if self._company.end(status, self.signum) or ended.error is not None:
            return ended
        return Ended(error=NodeLostError("other nodes were not heard to take the end of the run"))
