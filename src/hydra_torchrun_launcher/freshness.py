"""Gives a forked rank what a new interpreter has and the copy of another process has not."""

from __future__ import annotations

import atexit
import io
import logging
import multiprocessing.process
import multiprocessing.util
import os
import random
import sys
import weakref
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Inherited:
    """A job's work, and the state of Python's random generator, which forking seeds anew."""

    work: Any
    random_state: Any


inherited: Inherited | None = None
"""Set where this process was forked from the launching process (start method fork)."""


def restore() -> None:
    """Make standard streams, random state and exit handlers this process's own."""
    _open_streams()
    if inherited is not None:
        # The random state is the script's own, on purpose.
        random.setstate(inherited.random_state)
        _forget_what_is_the_parents()
        threads = os.environ.get("OMP_NUM_THREADS", "")
        if "torch" in sys.modules and threads.isdecimal():
            # Its OpenMP read the variable when it was loaded, before it was set for the ranks.
            sys.modules["torch"].set_num_threads(int(threads))
        return
    # Python seeds its own generator anew in a forked child; these libraries do not.
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()


def _open_streams() -> None:
    # Under fork either may have been closed when the app was started, or replaced by the script.
    encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"
    errors = getattr(sys.__stdout__, "errors", None) or "strict"
    sys.stdin = open(0, closefd=False, encoding=encoding, errors=errors)  # noqa: SIM115
    sys.__stdin__ = sys.stdin  # type: ignore[misc]
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = open(number, "wb", buffering=0, closefd=False)  # noqa: SIM115
        lenient = "backslashreplace" if number == 2 else errors  # noqa: PLR2004
        # As `python -u`, which torchrun uses: what a killed rank printed is not lost.
        stream = io.TextIOWrapper(raw, encoding=encoding, errors=lenient, write_through=True)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _forget_what_is_the_parents() -> None:
    """Drop children, finalizers and exit handlers of the launching process.

    The standard library's own exit handlers serve what the rank makes itself: they are registered
    again. Nothing here has a public name; test_ranks.py and test_seams.py fail if one moves.
    """
    multiprocessing.process._children.clear()  # type: ignore[attr-defined] # noqa: SLF001
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined] # noqa: SLF001
    weakref.finalize._registry.clear()  # type: ignore[attr-defined] # noqa: SLF001
    weakref.finalize._registered_with_atexit = False  # type: ignore[attr-defined] # noqa: SLF001
    atexit._clear()  # noqa: SLF001
    atexit.register(logging.shutdown)
    atexit.register(multiprocessing.util._exit_function)  # type: ignore[attr-defined] # noqa: SLF001
