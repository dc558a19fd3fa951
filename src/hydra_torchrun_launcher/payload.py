"""How a task function, its config and Hydra's state travel from the launching process to a rank.

By reference wherever a name leads to the object: the rank imports the user's script first, so what
stands in it is one and the same object there. By value only for what has no name (closures,
lambdas), and then with the rank's own module globals, so that nothing of a module is copied.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import logging
import os
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobRuntime, setup_globals
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from hydra_torchrun_launcher import guard
from hydra_torchrun_launcher.errors import TransportError
from hydra_torchrun_launcher.pickling import dumps
from hydra_torchrun_launcher.processes import path_entries

MAIN = "__mp_main__"
"""Name of the user's script in a rank: `if __name__ == "__main__"` is false there. It is the name
that multiprocessing uses too, which makes it an alias of `__main__` in the launching process, so
that types of the script come back as what they are there."""


@dataclass(frozen=True)
class Program:
    """What a rank is before it knows its task: the launching process's start, as plain data.

    Attributes:
        argv: sys.argv.
        path: sys.path.
        main_path: file of the script that was started, if it was one.
        main_module: name of the module that was started with `python -m`, if it was.
    """

    argv: list[str]
    path: list[str]
    main_path: str | None
    main_module: str | None

    @classmethod
    def of_this_process(cls) -> Program:
        """Describe the program that runs here."""
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        path = getattr(main, "__file__", None)
        if spec is not None and spec.name != "__main__":
            return cls(list(sys.argv), path_entries(), None, spec.name)
        if path is not None and os.path.isfile(path) and not getattr(sys, "frozen", False):
            return cls(list(sys.argv), path_entries(), os.path.abspath(path), None)
        return cls(list(sys.argv), path_entries(), None, None)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for the job's plan."""
        return asdict(self)

    @property
    def main_is_importable(self) -> bool:
        """Whether a rank can import the launching process's main module."""
        return self.main_path is not None or self.main_module is not None

    def enter(self) -> None:
        """Make this fresh process the program: arguments, import path, then the script itself."""
        sys.argv[:] = self.argv
        sys.path[:] = self.path
        # The script's own logger keeps the name that its settings and its readers know.
        logging.Logger.manager.loggerDict[MAIN] = logging.getLogger("__main__")
        if not self.main_is_importable:
            return
        module = types.ModuleType(MAIN)
        if self.main_path is not None:
            with io.open_code(self.main_path) as file:
                code = compile(file.read(), self.main_path, "exec", dont_inherit=True)
            module.__file__ = self.main_path
            module.__dict__["__cached__"] = None
        else:
            code = _module_code(module, str(self.main_module))
        sys.modules["__main__"] = sys.modules[MAIN] = module
        with _hydra_is_not_started(), suppress(_HydraStarted):
            exec(code, module.__dict__)  # noqa: S102 - the user's own script


class _HydraStarted(BaseException):
    """The script called its decorated function while it was imported: it has no guard."""


@contextmanager
def _hydra_is_not_started() -> Iterator[None]:
    """End the import of a script without a guard where it would start Hydra a second time.

    What comes after that call has not run in the launching process either when the ranks start.
    """
    # The name by which the decorator starts Hydra; test_seams.py fails if it moves.
    decorator: Any = importlib.import_module("hydra.main")
    start, ours = decorator._run_hydra, guard.starting  # noqa: SLF001

    def stop(*_: Any, **__: Any) -> None:
        raise _HydraStarted

    decorator._run_hydra = guard.starting = stop  # noqa: SLF001
    try:
        yield
    finally:
        decorator._run_hydra, guard.starting = start, ours  # noqa: SLF001


def _module_code(module: types.ModuleType, name: str) -> types.CodeType:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        problem = f"No module named {name}"
        raise ModuleNotFoundError(problem)
    code = spec.loader.get_code(name)  # type: ignore[attr-defined]
    module.__spec__, module.__loader__, module.__package__ = spec, spec.loader, spec.parent
    module.__file__ = spec.origin
    return code  # type: ignore[no-any-return]


@dataclass
class Work:
    """What a rank does, and the state of Hydra in which it does it."""

    task: Callable[[Any], Any]
    config: Any
    hydra_config: Any
    job_name: str
    search_path: Any
    resolvers: dict[str, bytes | str]
    execution_whitelist: Any
    label: str = ""
    """Sets the job's files apart from those of other jobs in the same directory."""


def pack(work: Work, program: Program) -> bytes:
    """Pickle a job's work for its ranks.

    Raises:
        TransportError: names what cannot be sent.
    """
    importable = program.main_is_importable
    try:
        return dumps(work, main_is_importable=importable)
    except Exception as error:
        parts = {"config": (work.config, work.hydra_config), "task function": work.task}
        guilty = [name for name, part in parts.items() if not _can_be_sent(part, importable)]
        problem = (
            f"The {guilty[0] if guilty else 'job'} cannot be sent to the ranks: "
            f"{type(error).__name__}: {error}. Define it at the top level of a module, without "
            "objects that belong to one process (locks, open files, threads), or use "
            "hydra.launcher.start_method=fork."
        )
        raise TransportError(problem) from error


def _can_be_sent(part: Any, main_is_importable: bool) -> bool:  # noqa: FBT001
    try:
        dumps(part, main_is_importable=main_is_importable)
    except Exception:  # noqa: BLE001 - the question itself
        return False
    return True


def resolvers() -> dict[str, bytes | str]:
    """Pickle each resolver that the user registered, or say why one cannot be."""
    packed: dict[str, bytes | str] = {}
    for name, resolver in BaseContainer._resolvers.items():  # noqa: SLF001 - OmegaConf has no list of them
        if name.startswith("oc.") or name in ("hydra", "now", "python_version"):
            continue
        try:
            packed[name] = dumps(resolver)
        except Exception as error:  # noqa: BLE001 - said when it is used
            packed[name] = f"{type(error).__name__}: {error}"
    return packed


def restore(work: Work) -> None:
    """Set up Hydra in a rank as it is in the launching process around the task."""
    setup_globals()
    for name, packed in work.resolvers.items():
        if not OmegaConf.has_resolver(name):
            # The packed function is OmegaConf's own wrapper, cache included: it goes back as it is.
            BaseContainer._resolvers[name] = (  # noqa: SLF001
                pickle.loads(packed) if isinstance(packed, bytes) else _missing(name, packed)  # noqa: S301
            )
    HydraConfig.instance().cfg = work.hydra_config
    JobRuntime.instance().set("name", work.job_name)
    GlobalHydra.instance().hydra = _ComposeOnDemand(work)  # type: ignore[assignment]


class _ComposeOnDemand:
    """Hydra's global object for `hydra.compose` in a rank, made when it is used: making it imports
    every Hydra plugin in the environment.
    """

    def __init__(self, work: Work) -> None:
        self._work = work

    def __getattr__(self, name: str) -> Any:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.hydra import Hydra

        Plugins.instance()
        with _silenced("hydra.core.utils"):  # the task's own log starts with the task
            made = Hydra(self._work.job_name, ConfigLoaderImpl(self._work.search_path))
        GlobalHydra.instance().hydra = made
        return getattr(made, name)


@contextmanager
def _silenced(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _missing(name: str, reason: str) -> Callable[..., Any]:
    def resolver(*_: Any) -> Any:
        problem = (
            f"The resolver '{name}' cannot be sent to the ranks ({reason}): register it at the top "
            "level of your script or of a module that it imports."
        )
        raise TransportError(problem)

    return resolver


def evaluate_cached_resolvers(config: Any) -> None:
    """Evaluate every value that names a resolver registered with `use_cache=True`, such as `now`.

    Their values are part of the job: all its ranks must see one and the same. OmegaConf keeps them
    in the root's cache, which is copied and pickled with the config. A value that cannot be
    evaluated here is left to the rank that reads it.
    """
    _evaluate(config, OmegaConf.to_container(config, resolve=False), cached_resolvers_mark())


def cached_resolvers_mark() -> re.Pattern[str]:
    """Return how values that name a resolver with `use_cache=True` can be known, as in `${now:`."""
    resolvers = BaseContainer._resolvers.items()  # noqa: SLF001
    names = "|".join(re.escape(name) for name, resolver in resolvers if _uses_cache(resolver))
    return re.compile(rf"\$\{{\s*({names or '(?!)'})\s*:")


def _uses_cache(resolver: Any) -> bool:
    # OmegaConf keeps this only in its wrapper's closure; test_seams.py fails if it moves.
    return bool(inspect.getclosurevars(resolver).nonlocals.get("use_cache", False))


def _evaluate(node: Any, raw: Any, mark: re.Pattern[str]) -> None:
    """Read every value of `node` whose unresolved form in `raw` has the mark."""
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw):
        names_one = isinstance(value, str) and bool(mark.search(value))
        if not names_one and not isinstance(value, dict | list):
            continue
        try:
            found = node[key]
        except Exception:  # noqa: BLE001, S112 - the reader's error, if anyone reads it
            continue
        if not names_one:
            _evaluate(found, value, mark)
