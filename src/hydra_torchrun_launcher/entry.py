"""`hydra_torchrun_launcher.main`, the drop-in for `hydra.main` (runs in the user's script).

Imported with the package, by every Hydra app in the environment: what works is imported when a run
needs it.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode, TaskFunction
from omegaconf import OmegaConf

from hydra_torchrun_launcher import guard
from hydra_torchrun_launcher.config import TorchrunConf
from hydra_torchrun_launcher.errors import JobStoppedError, LauncherError, StartError
from hydra_torchrun_launcher.launched import find_place

if TYPE_CHECKING:
    from hydra.core.utils import JobReturn

    from hydra_torchrun_launcher.outcomes import Ended
    from hydra_torchrun_launcher.single import SingleRun

_UNSEEN = (
    "hydra_torchrun_launcher.main has not seen this run begin and starts no ranks: the config must "
    "keep hydra.callbacks.torchrun_guard, which hydra/launcher=torchrun brings, and hydra-core "
    "1.3's --experimental-rerun is for runs in one process\n"
)

P = ParamSpec("P")
R = TypeVar("R")


def _with_signature_of(original: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the signature of another, for type checkers and for `inspect`."""

    def give(function: Callable[..., R]) -> Callable[P, R]:
        function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        return cast("Callable[P, R]", function)

    return give


@_with_signature_of(hydra.main)
def main(*args: Any, **kwargs: Any) -> Callable[[TaskFunction], Any]:
    """Decorate a task function as `hydra.main` does, with its arguments, for ranks in single runs.

    With `hydra/launcher=torchrun` a run without `-m` is a job of ranks in Hydra's RUN mode: its
    output is in `hydra.run.dir`, and a failed job ends the app with its cause and status 1. All
    other runs are those of `hydra.main`.

    Args:
        args: what `hydra.main` of the installed Hydra takes.
        kwargs: the same.

    Returns:
        A decorator for the task function.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hydra_main = hydra.main(*args, **kwargs)
    for warning in caught:  # Hydra's are about the line that calls this
        warnings.warn(warning.message, stacklevel=2)

    def decorate(task_function: TaskFunction) -> Callable[..., Any]:
        caller = sys._getframe(1).f_code.co_filename  # noqa: SLF001 - as Hydra looks for it
        return _decorated(task_function, hydra_main, caller)

    return decorate


def _decorated(task_function: TaskFunction, hydra_main: Any, caller: str) -> Callable[..., Any]:
    @functools.wraps(task_function)
    def in_hydra(config: Any) -> Any:
        with _NoFramesOfOurs():
            ended = guard.in_charge and guard.in_charge.run_task(task_function, config)
            return task_function(config) if ended is None else ended.result()

    setattr(in_hydra, guard.TASK, task_function)
    if not inspect.isroutine(inspect.unwrap(task_function)):
        _stand_where(in_hydra, task_function, caller)
    with_hydra = hydra_main(in_hydra)

    @functools.wraps(task_function)
    def decorated(cfg_passthrough: Any = None) -> Any:
        if cfg_passthrough is None:
            return _start(with_hydra, task_function)
        charge, guard.in_charge = guard.in_charge, None  # this is a call and no run
        try:
            return with_hydra(cfg_passthrough)
        finally:
            guard.in_charge = charge

    return decorated


class _NoFramesOfOurs:
    """Leaves the user's frames only in the traceback of what is raised (Python 3.11 and later)."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, Exception):
            from hydra_torchrun_launcher.recording import drop_own_frames

            drop_own_frames(error)


def _stand_where(function: Any, task: Any, file: str) -> None:
    """Let Hydra find the file of a callable object, which it looks for among the callers."""
    code = (lambda: None).__code__.replace(co_filename=file)
    function.__wrapped__ = types.FunctionType(code, {})
    function.__wrapped__.__module__ = task.__module__


def _start(with_hydra: Callable[[], Any], task_function: TaskFunction) -> Any:
    """Start the app."""
    guard.starting()
    try:
        place = find_place(os.environ)
    except StartError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None
    if place is not None:
        from hydra_torchrun_launcher import external

        is_node = external.is_a_node(with_hydra) if place.may_be_a_node else False
        if is_node is None:
            return None
        if not is_node:
            return external.run(place, with_hydra)
    charge = guard.in_charge = _Charge(task_function)
    try:
        return with_hydra()
    except (SystemExit, JobStoppedError):
        if charge.signum is None:
            raise
    finally:
        guard.in_charge = None
        charge.close()
    signal.raise_signal(charge.signum)
    raise SystemExit(1)  # where the user's handler lets the app go on


def _asks_for_ranks() -> bool:
    if not HydraConfig.initialized():
        return False
    node: Any = HydraConfig.get()
    target = OmegaConf.select(node, "launcher._target_")
    return node.mode is RunMode.RUN and target == TorchrunConf._target_


class _Charge:
    """What `main` does within a run of Hydra's: the guard's hooks hand over to it."""

    def __init__(self, task_function: TaskFunction) -> None:
        self._task_function = task_function
        self._run: SingleRun | None = None
        self._failed: Exception | None = None
        self._error: BaseException | None = None

    @property
    def signum(self) -> int | None:
        """The signal that stopped the job."""
        return None if self._run is None else self._run.signum

    def close(self) -> None:
        """End what still runs."""
        if self._run is not None:
            self._run.close()

    def on_run_start(self, config: Any) -> None:
        """Check and prepare before Hydra makes a directory."""
        from hydra_torchrun_launcher.single import SingleRun

        try:
            self._run = SingleRun(config, self._task_function)
        except JobStoppedError as stopped:  # while accelerators were counted, in a dry run
            signal.raise_signal(stopped.signum)
            raise SystemExit(1) from None
        except LauncherError as error:  # Hydra takes what a callback raises for a warning
            sys.stderr.write(f"{error}\n")
            raise SystemExit(1) from None
        except Exception as error:  # noqa: BLE001 - raised where Hydra does not make it a warning
            self._failed = error

    def run_task(self, task_function: TaskFunction, config: Any) -> Ended | None:
        """Run the task function in ranks; do nothing if the run does not ask for them."""
        if not _asks_for_ranks():
            return None
        if self._failed is not None:
            raise self._failed
        if self._run is None:
            sys.stderr.write(_UNSEEN)
            raise SystemExit(1)
        ended = self._run.run(task_function, config)
        self._error = ended.error
        return ended

    def on_job_end(self, job_return: JobReturn) -> None:
        """Take our own frames from our own errors: hydra-core 1.4 would show them."""
        if isinstance(self._error, LauncherError):
            from hydra_torchrun_launcher.hydra_job import add_remote_traceback

            self._error.__traceback__ = None
            add_remote_traceback(job_return, self._error)
