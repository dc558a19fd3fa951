"""Shows teed output: whole lines from ranks' files on the console (runs in the agent).

Torch elastic follows such files too, but cuts a line where the rank is still writing it.
"""

from __future__ import annotations

import os
import re
import select
from contextlib import suppress

_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
"""A progress bar's returns end lines too, as in torchrun; of one that is last, more may come."""
_CHUNK = 1 << 20
_LONGEST_LINE = 64 << 20
"""What is longer is shown in pieces, so that memory is bounded."""


class Tails:
    """The files that are shown while their ranks write them."""

    def __init__(self) -> None:
        """Nothing is shown yet."""
        self._tails: list[_Tail] = []

    def __bool__(self) -> bool:
        return bool(self._tails)

    def follow(self, name: str, prefix: str, console: int) -> None:
        """Show a file from its beginning.

        Args:
            name: the file, which may not be there yet.
            prefix: what each line begins with.
            console: the descriptor to write to.
        """
        self._tails.append(_Tail(name, prefix.encode("utf-8", "surrogateescape"), console))

    def show(self) -> bool:
        """Show some of what is new; tell whether there may be more."""
        return any([tail.show() for tail in self._tails])  # noqa: C419 - each of them

    def finish(self) -> None:
        """Show the rest of what nobody writes any more, a last line without its end included."""
        while self.show():
            pass
        for tail in self._tails:
            tail.finish()
        self._tails.clear()


class _Tail:
    def __init__(self, name: str, prefix: bytes, console: int) -> None:
        self._name = name
        self._prefix = prefix
        self._console: int | None = console
        self._read = 0
        self._rest = b""

    def show(self) -> bool:
        chunk = self._next_chunk()
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        if len(self._rest) > _LONGEST_LINE:
            lines, self._rest = [*lines, self._rest], b""
        self._write(lines)
        return bool(chunk)

    def finish(self) -> None:
        lines, self._rest = [self._rest.rstrip(b"\r")] if self._rest else [], b""
        self._write(lines)

    def _next_chunk(self) -> bytes:
        # Opened for each look: a descriptor per rank would count against a low limit.
        with suppress(FileNotFoundError), open(self._name, "rb", buffering=0) as file:
            file.seek(self._read)
            chunk = file.read(_CHUNK)
            self._read += len(chunk)
            return chunk
        return b""

    def _write(self, lines: list[bytes]) -> None:
        left = memoryview(b"".join(self._prefix + line + b"\n" for line in lines))
        while left and self._console is not None:
            try:
                left = left[os.write(self._console, left) :]
            except BlockingIOError:  # whoever shares the console made it so
                select.select([], [self._console], [])
            except OSError:  # its reader is gone; the file has all
                self._console = None
