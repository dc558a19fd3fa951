"""A terminal for tests: a pseudo-terminal, and an emulator that says what a person would see."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pyte

HANG_S = float(os.environ.get("TEST_HANG_S", "120"))


class Terminal:
    """A program on a terminal of its own."""

    def __init__(
        self, command: list[str], cwd: Path, environ: Mapping[str, str], size: tuple[int, int]
    ) -> None:
        """Start it.

        Args:
            command: its arguments after the interpreter's name.
            cwd: where it starts.
            environ: variables in addition to this process's.
            size: lines and columns.
        """
        self._screen = pyte.HistoryScreen(size[1], size[0], history=10_000, ratio=0.1)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""
        self._terminal, other = os.openpty()
        self._set_size(*size)
        # What speaks of the terminal that the tests have, if they have one.
        inherited = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
        self.popen = subprocess.Popen(
            [sys.executable, "-c", _OWN_TERMINAL, sys.executable, *command],
            stdin=other,
            stdout=other,
            stderr=other,
            cwd=cwd,
            env={**inherited, **environ},
            start_new_session=True,
        )
        os.close(other)

    def _set_size(self, lines: int, columns: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("4H", lines, columns, 0, 0))

    def resize(self, lines: int, columns: int) -> None:
        """Make the window another size."""
        self._set_size(lines, columns)
        self._screen.resize(lines, columns)
        for line in [line for line in self._screen.buffer if line >= lines]:
            del self._screen.buffer[line]  # else they come back when it grows

    def lines(self) -> list[str]:
        """Return what stands on the screen."""
        return [line.rstrip() for line in self._screen.display]

    def everything(self) -> str:
        """Return what stands there and what has been scrolled away."""
        gone = [
            "".join(line[column].data for column in range(self._screen.columns)).rstrip()
            for line in self._screen.history.top
        ]
        return "\n".join([*gone, *self.lines()])

    @property
    def is_whole(self) -> bool:
        """Whether all of it scrolls, as far as the program said."""
        regions = re.findall(rb"\x1b\[[\d;]*r", self.written)
        return not regions or regions[-1] == b"\x1b[r"

    def await_screen(self, condition: Callable[[list[str]], bool]) -> list[str]:
        """Wait until the screen is as wanted."""
        deadline = time.monotonic() + HANG_S
        while not condition(self.lines()):
            if not self._read(deadline):
                raise AssertionError("never seen; at the end:\n" + self.everything())
        return self.lines()

    def wait(self) -> int:
        """Wait for the program's end, and return its exit status."""
        deadline = time.monotonic() + HANG_S
        while self._read(deadline):
            pass
        return self.popen.wait(max(0.1, deadline - time.monotonic()))

    def close(self) -> None:
        """End what still runs, and the terminal."""
        with self.popen:
            self.popen.terminate()
        os.close(self._terminal)

    def _read(self, deadline: float) -> bool:
        """Take in what is written next; tell whether there was anything."""
        if not select.select((self._terminal,), (), (), max(0, deadline - time.monotonic()))[0]:
            return False
        with contextlib.suppress(OSError):  # nobody has the terminal any more
            data = os.read(self._terminal, 1 << 16)
            self.written += data
            self._stream.feed(data)
            return bool(data)
        return False

    def show(self, data: bytes) -> None:
        """Let another program write there."""
        self._stream.feed(data)

    def type(self, text: bytes) -> None:
        """Press keys."""
        os.write(self._terminal, text)


_OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
for number in range(os.get_terminal_size().lines):
    print("before", number, flush=True)
os.execv(sys.argv[1], sys.argv[1:])
"""
