"""Shows teed output: whole lines from ranks' files on the console (runs in the agent; the launching
process keeps its lines between theirs).

Torch elastic follows such files too, but cuts a line where the rank is still writing it, and does
so in threads. A console that takes nothing (a pager, Ctrl-S) stops nothing but what is shown.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from hydra_torchrun_launcher.processes import Deadline

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A progress bar's returns end lines too, as in torchrun; of one that is last, more may come."""
_CHUNK = 1 << 16
"""What is shown before other jobs have their turn."""
_LONGEST_LINE = 64 << 20
"""What is longer is shown in pieces, so that memory is bounded."""
_SLICE = 512
"""What a stream that can be written to takes at once without waiting."""
_TURN, _LINE = 0, 1
"""What is locked of a console: who writes next, and who is in the middle of a line."""
_SAY_BUSY_S = 5
_STUCK_S = 15
"""How long another may keep a console that could take more."""
_ANOTHER_WRITES_S = 0.02
"""How long to leave the console to another job that is in the middle of a line."""
_LAUNCHER_WAITS_S = 1
"""How long the launching process, which has jobs to follow, waits for the end of such a line."""


@contextmanager
def between_lines(number: int) -> Iterator[None]:
    """Keep agents from being in the middle of a line meanwhile, if that is to be had in a second.

    Args:
        number: the descriptor of the console.
    """
    console, late = _Console(number), Deadline()
    late.within(_LAUNCHER_WAITS_S)
    try:
        while not console.lock(late) and not late.passed:
            select.poll().poll(_ANOTHER_WRITES_S * 1000)
        yield
    finally:
        console.unlock()
        console.close()


class Tails:
    """The files that are shown while their ranks write them."""

    def __init__(self) -> None:
        """Nothing is shown yet."""
        self._tails: list[_Tail] = []
        self._consoles: dict[tuple[int, int], _Console] = {}

    def __bool__(self) -> bool:
        return bool(self._tails)

    def follow(self, name: str, prefix: str, console: int) -> None:
        """Show a file from its beginning.

        Args:
            name: the file, which may not be there yet.
            prefix: what each line begins with.
            console: the descriptor to write to.
        """
        there = os.fstat(console)  # both streams may be one pipe or terminal
        key = there.st_dev, there.st_ino
        if key not in self._consoles:
            self._consoles[key] = _Console(console)
        start = prefix.encode("utf-8", "surrogateescape")
        self._tails.append(_Tail(name, start, self._consoles[key]))

    def show(self) -> bool:
        """Show some of what is new without waiting; tell whether more can be shown at once."""
        return any([tail.show() for tail in self._tails])  # noqa: C419 - each of them

    def finish(self, busy: Callable[[], None]) -> None:
        """Show the rest of what nobody writes any more, a last line without its end included.

        It waits for a console that takes nothing for now, unless a signal comes.

        Args:
            busy: called every few seconds.
        """
        said = time.monotonic()
        try:
            for tail in self._tails:
                tail.is_complete = True
            while self.show() or self._is_held_up():
                if self._is_held_up():
                    self._wait_for_consoles()
                if time.monotonic() - said > _SAY_BUSY_S:
                    said = time.monotonic()
                    busy()
        finally:
            self._tails.clear()
            for console in self._consoles.values():
                console.unlock()

    def _is_held_up(self) -> bool:
        return any(tail.is_held_up for tail in self._tails)

    def _wait_for_consoles(self) -> None:
        poll = select.poll()
        is_anothers = any(tail.console.is_anothers for tail in self._tails)
        for tail in self._tails:
            if tail.is_held_up and not is_anothers:
                poll.register(tail.console.fd, select.POLLOUT)
        poll.poll((_ANOTHER_WRITES_S if is_anothers else _SAY_BUSY_S) * 1000)


class _Console:
    """A stream of the launching process's, written to without ever waiting for its reader.

    Other ranks' files go there too, and those of other jobs, by their agents: whoever is in the
    middle of a line has it locked, by a record lock, which whatever a process has open can carry
    (a pipe, a terminal, a socket) and which goes with the process.
    """

    def __init__(self, number: int) -> None:
        self.fd = self._given = number
        self.is_anothers = False
        """Whether another agent was in the middle of a line at the last try."""
        self._writer: object | None = None
        mode = os.fstat(number).st_mode
        self._is_file = stat.S_ISREG(mode)  # takes all at once
        self._may_wait = not self._is_file
        self._can_lock = stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(number)
        self._is_stuck = Deadline()
        if stat.S_ISFIFO(mode) or stat.S_ISCHR(mode):
            # Opened anew: O_NONBLOCK holds for all who share a description, the user's shell too.
            with suppress(OSError):
                self.fd = os.open(f"/dev/fd/{number}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
                self._may_wait = False

    def lock(self, writer: object) -> bool:
        """Keep other writers out until `unlock`; tell whether nobody is in the middle of a line."""
        if self._writer is None:
            # Who waits for the line has the turn, so that nobody has two lines meanwhile.
            self.is_anothers = not (self._have(_TURN) and self._have(_LINE)) and not self._give_up()
            if self.is_anothers:
                return False
            self._leave(_TURN)
            self._is_stuck.clear()
            self._writer = writer
        return self._writer is writer

    def unlock(self) -> None:
        """Let others write again."""
        self._writer = None
        self._leave(_LINE)
        self._leave(_TURN)

    def close(self) -> None:
        """Close what was opened here."""
        if self.fd != self._given:
            os.close(self.fd)

    def _have(self, what: int) -> bool:
        try:
            if self._can_lock:
                fcntl.lockf(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, what)
        except (BlockingIOError, PermissionError):  # either, says POSIX
            return False
        except OSError:  # a console that knows no locks
            self._can_lock = False
        return True

    def _give_up(self) -> bool:
        """Lock no more where whoever is in a line could go on and does not: it is stopped."""
        self._is_stuck.within(_STUCK_S)
        if self._is_stuck.passed and self._takes_some():
            self._can_lock = False
        return not self._can_lock

    def _takes_some(self) -> bool:
        poll = select.poll()
        poll.register(self.fd, select.POLLOUT)
        return bool(poll.poll(0))

    def _leave(self, what: int) -> None:
        if self._can_lock:
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, what)

    def write(self, data: memoryview) -> int:
        """Write some; return how much, 0 if the reader takes nothing for now."""
        if self._may_wait:
            if not self._takes_some():
                return 0
            data = data[:_SLICE]
        elif not self._is_file:
            # A pipe takes so much at once or not at all: what others write comes between lines.
            end = bytes(data[: select.PIPE_BUF]).rfind(b"\n") + 1
            data = data[: end or select.PIPE_BUF]
        try:
            return os.write(self.fd, data)
        except BlockingIOError:
            return 0


class _Tail:
    def __init__(self, name: str, prefix: bytes, console: _Console) -> None:
        self.console = console
        self.is_complete = False
        """Whether its last line is one although nothing ends it."""
        self._name = name
        self._prefix = prefix
        self._is_gone = False
        self._read = 0
        self._line: list[bytes] = []
        """The pieces of the line that has no end yet."""
        self._length = 0
        self._unwritten = memoryview(b"")

    @property
    def is_held_up(self) -> bool:
        return len(self._unwritten) > 0

    def show(self) -> bool:
        """Write what is to be written, or read more; tell whether there was anything to do."""
        if not self._unwritten:
            chunk = self._next_chunk()
            if chunk:
                lines = self._whole_lines(chunk)
            elif self.is_complete and self._line:
                lines = [self._cut().rstrip(b"\r")]
            else:
                return False
            text = b"".join(self._prefix + line + b"\n" for line in lines)
            self._unwritten = memoryview(text)
        return self._write()

    def _next_chunk(self) -> bytes:
        # Opened for each look: a descriptor per rank would count against a low limit.
        with suppress(OSError), open(self._name, "rb", buffering=0) as file:
            file.seek(self._read)
            chunk = file.read(_CHUNK)
            self._read += len(chunk)
            return chunk
        return b""

    def _whole_lines(self, chunk: bytes) -> list[bytes]:
        """Return the lines that the chunk completes; keep the rest."""
        if self._line and self._line[-1].endswith(b"\r"):
            self._line[-1] = self._line[-1][:-1]
            chunk = b"\r" + chunk
        *lines, rest = _LINE_END.split(chunk)
        if lines:
            lines[0] = self._cut() + lines[0]
        if rest:
            self._line.append(rest)
            self._length += len(rest)
        if self._length > _LONGEST_LINE:
            lines.append(self._cut())
        return lines

    def _cut(self) -> bytes:
        """Take what there is of the unfinished line."""
        line = b"".join(self._line)
        self._line, self._length = [], 0
        return line

    def _write(self) -> bool:
        if self._is_gone:
            self._unwritten = memoryview(b"")
            return True
        if not self.console.lock(self):
            return False
        try:
            written = self.console.write(self._unwritten)
        except OSError:  # its reader is gone; the file has all
            self._is_gone, written = True, len(self._unwritten)
        self._unwritten = self._unwritten[written:]
        if not self._unwritten:
            self.console.unlock()
        return written > 0 or not self._unwritten
