"""Decides what part of this machine each job of a sweep gets (runs in the launching process)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hydra_torchrun_launcher import machine
from hydra_torchrun_launcher.errors import SettingsError
from hydra_torchrun_launcher.settings import Sharing
from hydra_torchrun_launcher.slots import Accelerators, Share, Slots


class Lender:
    """The machine as a sweep's jobs share it: its accelerators, or its cores if it has none.

    Without `n_jobs` and `devices` nothing is lent: one job after another sees the whole machine.
    """

    def __init__(
        self,
        sharing: Sharing,
        wanted: int | str,
        accelerators: Callable[[], Accelerators],
        environ: Mapping[str, str],
    ) -> None:
        """Find out what there is to lend.

        Args:
            sharing: the user's settings.
            wanted: the sweep's own `nproc_per_node`: with `cpu` its jobs share cores.
            accelerators: tells what torch sees; asked only where that matters.
            environ: the launching process's variables.

        Raises:
            SettingsError: a device is named that is not there.
        """
        self._sharing = sharing
        self._accelerators = accelerators
        self.variable = ""
        """The variable that hides other jobs' accelerators from a job."""
        self._devices: tuple[str, ...] = ()
        self._cores: tuple[str, ...] = ()
        self.notice = ""
        """What the user should know about it, in a sentence."""
        jobs, places = sharing.n_jobs, sharing.jobs_per_device
        if not sharing.lends:
            self._slots = Slots((), places=1, at_once=1)
        elif sharing.devices is not None or (wanted != "cpu" and accelerators().count):
            self.variable = accelerators().visibility(environ)
            self._devices = accelerators().names(environ, sharing.devices)
            self._slots = Slots(self._devices, places=places, at_once=jobs)
        else:
            self._cores = tuple(map(str, machine.core_numbers()))
            places = -(-(jobs or 1) // len(self._cores))
            self._slots = Slots(self._cores, places=places, at_once=jobs)
            if places > 1:
                self.notice = (
                    f"hydra.launcher.n_jobs={jobs}: this process may use {len(self._cores)} CPU "
                    f"cores, so up to {places} jobs share one"
                )

    @property
    def lends(self) -> bool:
        """Whether a job gets a part of the machine."""
        return self._sharing.lends

    @property
    def is_parallel(self) -> bool:
        """Whether jobs may run at once."""
        return self._sharing.n_jobs != 1

    def ranks(self, wanted: int | str) -> int:
        """Return how many ranks per node a job has.

        Args:
            wanted: a number, or `gpu`, `cpu` or `auto`: an equal part of what there is for each of
                the jobs that run at once.

        Raises:
            SettingsError: `gpu`, and torch sees none; `cpu`, and the sweep's jobs share devices.
        """
        if isinstance(wanted, int):
            return wanted
        if wanted == "cpu" and self._devices:
            problem = (
                "hydra.launcher.nproc_per_node='cpu': the jobs of this sweep share accelerators, "
                f"one for each rank ({', '.join(self._devices)}): expected gpu, auto or a number"
            )
            raise SettingsError([problem])
        found = Accelerators(0, 0) if wanted == "cpu" else self._accelerators()
        if wanted == "gpu" and not found.gpus:
            problem = (
                "hydra.launcher.nproc_per_node='gpu': torch sees no GPU here; use cpu or a number"
            )
            raise SettingsError([problem])
        jobs = self._sharing.n_jobs or 1
        if self._devices:
            places = len(self._devices) * self._sharing.jobs_per_device
            return min(len(self._devices), max(1, places // jobs))
        count = found.gpus if wanted == "gpu" else found.count
        return count or max(1, machine.cpu_cores() // jobs)

    def problem(self, ranks: int) -> str | None:
        """Say why a job of so many ranks can never run, if it cannot."""
        there = len(self._devices)
        if not there or ranks <= there:
            return None
        return (
            f"it needs {ranks} accelerators, one for each rank (hydra.launcher.nproc_per_node="
            f"{ranks}), and the sweep has {there}: {', '.join(self._devices)}"
        )

    def take(self, ranks: int) -> Share | None:
        """Return the share of a job of so many ranks, or None if it has to wait."""
        taken = self._slots.take(self._needs(ranks))
        return None if taken is None else self._share(taken)

    def _share(self, taken: tuple[str, ...]) -> Share:
        devices = taken if self._devices else None
        cores = tuple(map(int, taken)) if self._cores else None
        return Share(devices, cores)

    @property
    def names(self) -> str:
        """What is lent."""
        return ", ".join(self._devices or self._cores)

    def typical(self, ranks: int) -> Share:
        """Return the share of a job of so many ranks if all were free."""
        first = (self._devices or self._cores)[: self._needs(ranks)]
        return self._share(first)

    def give_back(self, share: Share) -> None:
        """Take a job's share back."""
        self._slots.give_back(share.devices or tuple(map(str, share.cores or ())))

    def _needs(self, ranks: int) -> int:
        if self._devices:
            return ranks
        there, jobs = len(self._cores), self._sharing.n_jobs
        return min(ranks, there) if jobs is None else min(there, max(1, there // jobs))
