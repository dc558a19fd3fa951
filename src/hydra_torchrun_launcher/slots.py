"""Lends each running job its accelerators or CPU cores and takes them back (runs in the launching
process).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hydra_torchrun_launcher.errors import SettingsError


@dataclass(frozen=True)
class Accelerators:
    """What torch sees on this machine.

    Attributes:
        count: how many accelerators.
        gpus: how many of them are GPUs for torch.cuda.
        variables: the variables by which a process sees fewer of them, the usual one first.
    """

    count: int
    gpus: int
    variables: tuple[str, ...] = ("CUDA_VISIBLE_DEVICES",)

    def visibility(self, environ: Mapping[str, str]) -> str:
        """Return the variable that says which are seen: one that is set, or the usual one."""
        return next((name for name in self.variables if name in environ), self.variables[0])

    def names(self, environ: Mapping[str, str], wanted: Sequence[str] | None) -> tuple[str, ...]:
        """Return the names of those that jobs may use.

        Args:
            environ: the launching process's variables.
            wanted: those that the user has named; None for all that are seen.

        Raises:
            SettingsError: the user has named one that is not seen.
        """
        variable = self.visibility(environ)
        seen = self._seen(environ.get(variable))
        if wanted is None or not self.count:  # where none is seen nothing can be checked
            return tuple(wanted or seen)
        strange = [name for name in wanted if self._is_strange(name, seen, environ.get(variable))]
        if strange:
            shown = f"{variable}={environ[variable]}" if variable in environ else "torch"
            problem = (
                f"hydra.launcher.devices names {', '.join(strange)}; {shown} shows this process "
                f"{', '.join(seen)}"
            )
            raise SettingsError([problem])
        return tuple(wanted)

    def _seen(self, shown: str | None) -> tuple[str, ...]:
        if shown is None:
            return tuple(map(str, range(self.count)))
        names = [name.strip() for name in shown.split(",")]
        # CUDA shows one slice of a GPU at a time: such names cannot be counted.
        is_sliced = any(name.startswith("MIG") for name in names)
        return tuple(names if is_sliced else names[: self.count])

    def _is_strange(self, name: str, seen: Sequence[str], shown: str | None) -> bool:
        # A name that is no index can be told from others only where the variable has names.
        return name not in seen and (shown is not None or name.isdecimal())


@dataclass(frozen=True)
class Share:
    """What one job has of the machine.

    Attributes:
        devices: names of its accelerators; None: all that are seen.
        cores: its CPU cores; None: all.
    """

    devices: tuple[str, ...] | None = None
    cores: tuple[int, ...] | None = None


class Slots:
    """What there is to lend, and who has what.

    A job gets as many of the names as it needs, those that are lent least often.
    """

    def __init__(self, names: Sequence[str], *, places: int, at_once: int | None) -> None:
        """Have everything to lend.

        Args:
            names: accelerators, or cores.
            places: how many jobs may share one of them.
            at_once: how many jobs may run at once; None for as many as fit.
        """
        self._lent = dict.fromkeys(names, 0)
        self._places = places
        self._at_once = at_once
        self._jobs = 0

    def take(self, count: int) -> tuple[str, ...] | None:
        """Return that many names for a job, in their order, or None if it has to wait."""
        free = [name for name, lent in self._lent.items() if lent < self._places]
        is_full = self._at_once is not None and self._jobs >= self._at_once
        if is_full or len(free) < count:
            return None
        least = set(sorted(free, key=self._lent.__getitem__)[:count])  # sorted keeps the order
        self._jobs += 1
        for name in least:
            self._lent[name] += 1
        return tuple(name for name in self._lent if name in least)

    def give_back(self, names: Sequence[str]) -> None:
        """Take back what a job had."""
        self._jobs -= 1
        for name in names:
            self._lent[name] -= 1
