"""Signals of the launching process while jobs run: noted, readable by a selector, raised later."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from hydra_torchrun_launcher.wire import Fd


class SignalWatch:
    """Notes the first signal instead of letting it interrupt whatever runs.

    Handlers and wake-up descriptor are the user's own again after `restore`. An ignored signal
    stays ignored (nohup). Outside the main thread Python allows no handlers: then nothing is
    watched.
    """

    def __init__(self, names: Iterable[str]) -> None:
        """Install handlers for the signals of these names."""
        self.received: int | None = None
        self.interrupts_are_a_ranks = False
        """Whether a rank has the terminal: Ctrl-C is for it."""
        self.count = 0
        self._before: dict[int, Any] = {}
        read, write = os.pipe()
        self._read, self._write = Fd(read), Fd(write)
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        self._wakeup: int | None = None
        self._owner = os.getpid()
        if threading.current_thread() is not threading.main_thread():
            return
        self._wakeup = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for name in names:
            signum = signal.Signals[name]
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                self._before[signum] = signal.signal(signum, self._note)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal arrives."""
        return self._read.fileno()

    def drain(self) -> None:
        """Make the descriptor unreadable until the next signal."""
        try:
            while os.read(self._read.fileno(), 4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Stop watching."""
        self.restore()
        self._read.close()
        self._write.close()

    def restore(self) -> None:
        """Give the user's handlers back."""
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
            self._wakeup = None
        while self._before:
            signal.signal(*self._before.popitem())

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT and self.interrupts_are_a_ranks:
            return
        self.count += 1
        if self.received is None:
            self.received = signum
        insisted = self.count > 2  # noqa: PLR2004 - asked, killed, and now: at once
        # A child that a callback of the user's forked has a life of its own.
        if insisted or os.getpid() != self._owner:
            before: Callable[[int, FrameType | None], Any] | int = self._before[signum]
            self.restore()
            if callable(before):
                before(signum, frame)
            else:
                signal.raise_signal(signum)
