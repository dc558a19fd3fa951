"""Shows a running sweep to the person who waits for it: a line for each job that completes, and on
a terminal a table below all other output (runs in the launching process). It decides nothing.
"""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra_torchrun_launcher import telling
from hydra_torchrun_launcher.errors import one_line
from hydra_torchrun_launcher.sweep_state import SweepState
from hydra_torchrun_launcher.tails import between_lines

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

log = logging.getLogger(__name__)

_FRAME_S = 1.0
"""Between two pictures of the table: its times are in seconds."""
_HIGHEST = 12
"""Lines that the table takes at most, and no more than a third of the terminal."""
_LOWEST = 4
_LONGEST_VALUE = 80
"""In the line that says that a job has completed."""
_WHOLE = "\x1b7\x1b[r\x1b8"
"""All of the terminal scrolls again; the cursor stays."""
_FRAMES_MISSED = 3
_RULE = 1
"""The line that sets it apart."""


class Progress:
    """What a person sees of a sweep."""

    def __init__(self, kind: str) -> None:
        """Show nothing yet.

        Args:
            kind: as the setting `hydra.launcher.progress`: `auto`, `plain` or `none`.
        """
        self._is_told = kind != "none"
        self._has_table = kind == "auto" and _is_terminal()
        self._sweep = SweepState("", started=time.time())
        self._footer: _Footer | None = None
        self._drawn_at = 0.0

    def take_in(self, event: dict[str, Any]) -> None:
        """Show what has happened to a job."""
        if self._is_told:
            with self._no_harm():
                self._sweep.take_in(event)
                if event["event"] == "completed" and "ran_as" not in event:
                    self._tell(event["job"])

    @contextmanager
    def _no_harm(self) -> Iterator[None]:
        """Show nothing more after a mistake of ours: what is shown is not worth a sweep."""
        try:
            yield
        except Exception:
            log.exception("Progress is not shown any more; the sweep goes on")
            self._is_told = False
            self._close()

    def _tell(self, number: int) -> None:
        sweep, job = self._sweep, self._sweep.jobs[number]
        value = one_line(telling.outcome(job))
        if len(value) > _LONGEST_VALUE:
            value = value[: _LONGEST_VALUE - 1] + "…"
        left = sweep.left_s(time.time())
        with between_lines(1):
            log.info(
                "\t#%d : completed in %s%s (%d of %d%s)",
                number,
                telling.duration(job.seconds),
                f", value {value}" if value else "",
                sum(each.ended is not None for each in sweep.jobs.values()),
                len(sweep.jobs),
                f"; about {telling.duration(left)} left" if left is not None else "",
            )

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the table meanwhile, if it is wanted and the terminal has room for it."""
        self._footer = _Footer() if self._has_table and self._is_told else None
        try:
            yield
        finally:
            self._close()

    def _close(self) -> None:
        footer, self._footer = self._footer, None
        if footer is not None:
            footer.close()

    def beat(self) -> None:
        """Draw the table anew if it is time for it."""
        if self._footer is not None and not self.beats_in_s:
            with self._no_harm():
                from hydra_torchrun_launcher import tables

                self._drawn_at = time.monotonic()
                self._footer.draw(
                    len(self._sweep.jobs) + tables.LEAST,
                    lambda columns, lines: tables.table(self._sweep, time.time(), columns, lines),
                )

    @property
    def beats_in_s(self) -> float | None:
        """Seconds until then; None: there is no table."""
        if self._footer is None:
            return None
        return max(0.0, self._drawn_at + _FRAME_S - time.monotonic())


def _is_terminal() -> bool:
    try:
        return os.isatty(1) and os.environ.get("TERM", "dumb") != "dumb"
    except OSError:
        return False


def _has_terminal() -> bool:
    """Tell whether this process is in the terminal's foreground.

    Raises:
        OSError: there is no such terminal.
    """
    return os.tcgetpgrp(1) == os.getpgrp()


class _Footer:
    """The last lines of the terminal, kept apart from the others by its scrolling region.

    Ranks and their keepers write to the terminal too, at any time. So nothing here relies on where
    the cursor is: it is put back where it was, by one write, which the kernel does not mix with
    others.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, int, int] | None = None
        self._height = 0
        self._drawn_at = time.monotonic()

    def draw(self, wanted: int, picture: Callable[[int, int], ConsoleRenderable]) -> None:
        """Draw what `picture` returns for a size, unless the terminal takes nothing.

        Args:
            wanted: lines that it would take.
            picture: returns what takes so many columns and lines at most.
        """
        sys.stdout.flush()
        try:
            if not _has_terminal() or not select.select((), (1,), (), 0)[1]:
                return  # it is another's now, or stopped by Ctrl-S
            is_late = time.monotonic() - self._drawn_at > _FRAMES_MISSED * _FRAME_S
            if is_late:  # Ctrl-Z: others have written here, the cursor may be in the table
                self._shape = None
            self._drawn_at = time.monotonic()
            size = os.get_terminal_size(1)
            height = min(wanted + _RULE, _HIGHEST, size.lines // 3)
            shape = size.columns, size.lines, height if height >= _LOWEST else 0
            text = self._opening(*shape) if shape != self._shape else ""
            if self._height:
                text += self._drawn(
                    picture(size.columns, self._height - _RULE), size.columns, size.lines
                )
            os.write(1, text.encode(errors="replace"))
        except OSError:  # it has gone
            return

    def _opening(self, columns: int, lines: int, height: int) -> str:
        closing = self._closing()
        self._shape, self._height = (columns, lines, height), height
        if not height:
            return closing
        # Room below the cursor, by index (ESC D), which keeps its column.
        room = "\x1bD" * height + f"\x1b[{height}A"
        return closing + room + f"\x1b7\x1b[1;{lines - height}r\x1b8"

    def _drawn(self, picture: ConsoleRenderable, columns: int, lines: int) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=columns, force_terminal=True, highlight=False)
        with console.capture() as captured:
            console.rule(style="dim")
            console.print(picture)
        rows = captured.get().splitlines()[: self._height]
        # The region again: a program that had the terminal meanwhile may have taken it away.
        text = f"\x1b7\x1b[?7l\x1b[1;{lines - self._height}r"
        for number in range(self._height):
            text += f"\x1b[{lines - self._height + number + 1};1H\x1b[2K"
            if number < len(rows):
                text += rows[number]
        return text + "\x1b[?7h\x1b8"

    def _closing(self) -> str:
        return f"{_WHOLE}\x1b[J" if self._height else ""

    def close(self) -> None:
        """Give the lines back."""
        try:
            if self._height:
                # Where a shell has it again, nothing of the shell's is wiped out.
                text = self._closing() if _has_terminal() else _WHOLE
                os.write(1, text.encode())
        except OSError:
            return
        finally:
            self._height = 0
