"""What the kernel offers for owning processes: death signals, adoption, waiting (used in all).

Everything here is called by single-threaded processes, or between fork and exec.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from types import FrameType

import psutil

from hydra_torchrun_launcher.wire import Fd

_KERNEL_OBEYS_S = 30
"""How long the kernel has to end a killed process: much memory is not freed in a moment."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform.startswith("linux")


def _prctl(option: int, value: int) -> None:
    if _LINUX:  # macOS has neither: there a killed parent leaves children to launchd
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def python_command(path: list[str], module: str, function: str, *arguments: object) -> list[str]:
    """Return the command line of a new interpreter that calls one function of ours.

    Args:
        path: its sys.path.
        module: where the function is.
        function: its name.
        arguments: what it is called with; anything that `repr` can write as Python.
    """
    call = f"{function}({', '.join(map(repr, arguments))})"
    code = f"import sys; sys.path[:] = {path!r}; from {module} import {function}; {call}"
    # The interpreter's own options (-O, -W, -X …), as multiprocessing passes them on.
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined] # noqa: SLF001
    return [sys.executable, *options, "-c", code]


def path_entries() -> list[str]:
    """Return what Python itself uses of sys.path: it ignores what is no text, such as a Path."""
    entries: list[object] = list(sys.path)
    return [entry for entry in entries if isinstance(entry, str)]


def open_standard_streams() -> None:
    """Open the null device on every standard descriptor that is closed.

    Otherwise a socket of ours would get such a number, and be taken for a stream by a child.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:  # noqa: PLR2004 - standard error
        os.set_inheritable(fd, True)
    os.close(fd)


def flush_standard_streams() -> None:
    """Write out what is buffered; what stands in a stream's place may be None or anything."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel SIGKILL this process when its parent ends; leave if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends (a child subreaper)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill(pid: int, signum: int) -> None:
    """Send a signal; a process that is gone already is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)


def kill_group(pid: int, signum: int) -> None:
    """Send a signal to the session that `pid` leads, as torchrun does to its ranks."""
    try:
        os.killpg(pid, signum)
    except ProcessLookupError:
        kill(pid, signum)  # it was forked this moment and leads no session yet
    except PermissionError:
        return


def start_time(pid: int) -> float | None:
    """Return when a process began, a number that no other process of its number has; None: gone.

    On Linux it counts ticks since boot: psutil's time of day moves when the clock is set.
    """
    try:
        if _LINUX:
            with open(f"/proc/{pid}/stat", "rb") as file:
                state, *others = file.read().rpartition(b")")[2].split()
            return None if state in (b"Z", b"X") else float(others[18])
        return float(psutil.Process(pid).create_time())
    except (OSError, psutil.Error):
        return None


def status_of(pid: int) -> str:
    """Return what a process is at: running, sleeping, stopped, disk-sleep …"""
    try:
        return str(psutil.Process(pid).status())
    except psutil.Error:
        return "gone"


def children(*, recursive: bool) -> list[int]:
    """Return the pids of this process's children, or of all its descendants."""
    return [child.pid for child in psutil.Process().children(recursive=recursive)]


_JANITORS = ("multiprocessing.resource_tracker", "torch_shm_manager")
"""Processes that remove shared memory when those who use it have ended, and then end."""


def kill_descendants(spare: Iterable[int] = (), *, janitors: bool = True) -> None:
    """SIGKILL every descendant but `spare` and theirs; adopted ones turn up at the next call.

    Args:
        spare: who lives on.
        janitors: kill also those who remove what the others leave.
    """
    spared = set(spare)
    for pid in spared.copy():
        with contextlib.suppress(psutil.NoSuchProcess):
            spared.update(child.pid for child in psutil.Process(pid).children(recursive=True))
    _kill_all(psutil.Process().children(recursive=True), spared, janitors=janitors)


def kill_tree(pid: int, *, janitors: bool) -> None:
    """SIGKILL a process and its descendants, as `kill_descendants` does."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        _kill_all([root, *root.children(recursive=True)], set(), janitors=janitors)


def _kill_all(processes: list[psutil.Process], spared: set[int], *, janitors: bool) -> None:
    for process in processes:
        if process.pid not in spared and (janitors or not _is_janitor(process)):
            kill(process.pid, signal.SIGKILL)


def _is_janitor(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(name in command for name in _JANITORS)


class ChildWatch:
    """Makes the end of any child readable, for a selector.

    SIGCHLD and waitpid(-1) are used alone: a process that adopts orphans does not know the pids
    of its children, and pidfd waits mixed with waitpid(-1) lose exit statuses.
    """

    def __init__(self) -> None:
        """Install the handler; must be called in the main thread."""
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        self._read, self._write = Fd(read), Fd(write)
        # Whoever started the app may have blocked signals: blocked, no end of a child is seen.
        self._mask = signal.pthread_sigmask(signal.SIG_SETMASK, [])
        self._before = signal.signal(signal.SIGCHLD, _noop)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._read.fileno()

    def reap(self) -> list[tuple[int, int]]:
        """Return (pid, wait status) of every child that ended."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read.fileno(), 4096):
                pass
        ended = []
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                ended.append((pid, status))
        return ended

    def restore(self) -> None:
        """Undo the handler: what a forked child calls first."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, self._before)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)


def _noop(_signum: int, _frame: FrameType | None) -> None:
    pass


def exit_code(status: int) -> int:
    """Turn a wait status into an exit code; negative: the signal's number."""
    return os.waitstatus_to_exitcode(status)


class Deadline:
    """A moment on the monotonic clock, or never."""

    def __init__(self, seconds: float | None = None) -> None:
        """Start as never, or as `seconds` from now."""
        self._at: float | None = None
        if seconds is not None:
            self.within(seconds)

    def within(self, seconds: float) -> None:
        """Bring it to `seconds` from now, unless it lies nearer already."""
        at = time.monotonic() + seconds
        self._at = at if self._at is None else min(self._at, at)

    def clear(self) -> None:
        """Make it never."""
        self._at = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds left, at least 0; None for never."""
        return None if self._at is None else max(0.0, self._at - time.monotonic())

    @property
    def passed(self) -> bool:
        """Whether it lies behind us."""
        return self._at is not None and time.monotonic() >= self._at


class Ultimatum(Deadline):
    """A deadline, and then a SIGKILL every second until the kernel has obeyed."""

    def __init__(self) -> None:
        """Start as never."""
        super().__init__()
        self._strikes = 0

    def clear(self) -> None:
        """Make it never."""
        super().clear()
        self._strikes = 0

    def strikes(self) -> bool:
        """Whether it is time for a SIGKILL; the caller sends it."""
        if not self.passed:
            return False
        super().clear()
        self.within(1)
        self._strikes += 1
        return True

    @property
    def is_repeated(self) -> bool:
        """Whether a SIGKILL was sent before the last one."""
        return self._strikes > 1

    @property
    def is_in_vain(self) -> bool:
        """Whether the kernel has had its time (a process on a dead file server does not end)."""
        return self._strikes > _KERNEL_OBEYS_S
