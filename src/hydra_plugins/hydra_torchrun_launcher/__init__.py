"""The door: tells Hydra that this launcher exists. Every Hydra app in the environment imports it,
so it is light; what runs a sweep is imported when one is set up.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher

from hydra_torchrun_launcher import guard
from hydra_torchrun_launcher.config import TorchrunConf
from hydra_torchrun_launcher.errors import PlatformError

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from hydra_torchrun_launcher.jobs import SweepRunner


class TorchrunLauncher(Launcher):
    """Runs each job of a sweep in torch.distributed ranks on this machine."""

    def __init__(self, **_settings: object) -> None:
        """Accept the settings, which Hydra passes one by one; a job's own config is what counts."""
        self._runner: SweepRunner

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Check the settings and start what takes long, while the sweeper prepares its jobs.

        Raises:
            SystemExit: this node of several has followed the one that leads, and has done.
            SettingsError: settings cannot work.
            StartError: the nodes do not find each other.
            PlatformError: this is no system for it.
        """
        if sys.platform == "win32":
            raise PlatformError(sys.platform)
        from hydra_torchrun_launcher.jobs import SweepRunner

        self._runner = SweepRunner(hydra_context, task_function, config)
        # Hydra has no tear-down for launchers: the servers go with the launcher, at the latest
        # when the interpreter ends.
        weakref.finalize(self, self._runner.close)
        self._runner.prepare()

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs and return their results in order.

        Raises:
            LauncherError: the launcher itself could not work. A failed job raises nothing here.
        """
        return self._runner.run(job_overrides, initial_job_idx)


ConfigStore.instance().store(
    group="hydra/launcher",
    name="torchrun",
    package="_global_",
    node={"hydra": {"launcher": TorchrunConf, "callbacks": {"torchrun_guard": guard.ENTRY}}},
    provider="hydra_torchrun_launcher",
)
