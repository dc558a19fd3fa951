"""Where a rank stands when its time is up: Python's own dump of all threads' stacks, on a signal
that needs no cooperation of the task (set up in ranks, read in the launching process).
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sysconfig

from hydra_torchrun_launcher.wire import Fd

SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGINFO if hasattr(signal, "SIGINFO") else None)
"""Nobody's: neither Python nor torch nor schedulers send or handle it."""
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_OURS = os.path.dirname(__file__)
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


def ignore() -> None:
    """Leave the signal without effect, until `dump_to` and in a new interpreter."""
    if SIGNAL is not None:
        signal.signal(SIGNAL, signal.SIG_IGN)


def dump_to(file: Fd) -> None:
    """Have the interpreter write all threads' stacks to a file when the signal comes."""
    if SIGNAL is not None:
        faulthandler.register(SIGNAL, file=file.fileno(), all_threads=True)


def where(dump: str) -> str:
    """Return in a phrase where the main thread stands: its innermost frame, and the app's."""
    if dump.rstrip().endswith("\n..."):  # faulthandler stops at a hundred, and this one is the last
        return "a main thread that is not shown: there are too many threads"
    main_thread = re.split(r"^(?:Current thread|Thread) .*:$", dump, flags=re.MULTILINE)[-1]
    frames = [match.groups() for match in map(_FRAME.fullmatch, main_thread.splitlines()) if match]
    if not frames:
        return "no Python code"
    own = [frame for frame in frames if _is_users(frame[0])]
    shown = [frames[0]] if not own or own[0] is frames[0] else [frames[0], own[0]]
    return ", called from ".join(f"{file}:{line} in {name}" for file, line, name in shown)


def _is_users(file: str) -> bool:
    is_installed = {"site-packages", "dist-packages"} & set(file.split(os.sep))
    return not is_installed and not file.startswith((*_LIBRARIES, _OURS, "<"))
