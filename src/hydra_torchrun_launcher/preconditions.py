"""What must hold before a sweep starts anything (runs in the launching process).

Each check raises a LauncherError that says what is wrong and what to do.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hydra_torchrun_launcher.errors import SettingsError, StartError

_OLDEST_TORCH = (2, 4)
"""Before, torch elastic has no way to hand a rendezvous' own store to the ranks."""


def check_place() -> None:
    """Refuse to start ranks in a rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        problem = (
            "hydra/launcher=torchrun was started inside a rank of a distributed job (RANK="
            f"{os.environ.get('RANK')}, TORCHELASTIC_RUN_ID={os.environ['TORCHELASTIC_RUN_ID']}): "
            "it starts the ranks itself, so run the app once and without torchrun"
        )
        raise StartError(problem)


def check_interpreter() -> None:
    """Refuse a frozen program, for a start method that needs an interpreter."""
    if getattr(sys, "frozen", False):
        problem = (
            f"{sys.executable} is a frozen program and no Python interpreter, of which the "
            "launcher's server would be one: use hydra.launcher.start_method=fork"
        )
        raise StartError(problem)


def check_preload(names: Sequence[str]) -> None:
    """Refuse modules that are not there; only their outermost packages are looked for."""
    missing = [name for name in names if not _is_there(name.partition(".")[0])]
    if missing:
        problem = f"hydra.launcher.preload: no module named {', '.join(map(repr, missing))}"
        raise SettingsError([problem])


def _is_there(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def check_directory(setting: str, value: str) -> None:
    """Refuse a directory that cannot be made; Hydra makes it and would only crash.

    Args:
        setting: Hydra's setting, such as hydra.sweep.dir.
        value: the directory.
    """
    there = Path(value).absolute()
    while not os.path.lexists(there):
        if len(os.fsencode(there.name)) > os.pathconf("/", "PC_NAME_MAX"):
            problem = f"{setting}={value}: the name {there.name[:40]}… in it is too long"
            raise StartError(problem)
        there = there.parent
    if not (there.is_dir() and os.access(there, os.W_OK | os.X_OK)):
        problem = f"{setting}={value}: {there} is no directory that can be written to"
        raise StartError(problem)
    if there != Path(value).absolute():
        try:  # root may write in /proc, say, and yet nothing can be made there
            os.rmdir(tempfile.mkdtemp(prefix=".hydra-torchrun-", dir=there))
        except OSError as error:
            problem = f"{setting}={value}: nothing can be made in {there} ({error.strerror})"
            raise StartError(problem) from None


def check_torch() -> None:
    """Refuse a torch that is missing or too old, without importing it."""
    needed = "hydra/launcher=torchrun needs torch {}.{} or later".format(*_OLDEST_TORCH)
    if importlib.util.find_spec("torch") is None:
        problem = f"torch is not installed for {sys.executable}: {needed}"
        raise StartError(problem)
    found = importlib.metadata.version("torch")
    if tuple(map(int, found.split(".")[:2])) < _OLDEST_TORCH:
        problem = f"{needed}; {sys.executable} has {found}"
        raise StartError(problem)
