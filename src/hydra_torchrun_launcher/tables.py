"""A sweep's jobs as a table for a terminal (used by the live view and the command line)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hydra_torchrun_launcher.errors import one_line
from hydra_torchrun_launcher.job_state import JobState
from hydra_torchrun_launcher.sweep_state import SweepState
from hydra_torchrun_launcher.telling import (
    duration,
    outcome,
    place,
    state_of,
    varying,
    word,
)

STYLES = {
    "running": "cyan",
    "queued": "dim",
    "completed": "green",
    "failed": "red",
    "stopped": "yellow",
    "lost": "magenta",
}
_URGENCY = {"running": 0, "failed": 1, "lost": 1, "queued": 2, "stopped": 3, "completed": 3}
_COLUMNS = ("job", "state", "overrides", "on", "time", "value")
_OVERRIDES, _VALUE = 2, 5
LEAST = 2
"""Lines around the jobs: the table's head and the totals."""


def table(
    sweep: SweepState, now: float, width: int | None = None, height: int | None = None
) -> Group:
    """Return a sweep's jobs, a line each, and their totals.

    Args:
        sweep: the sweep.
        now: seconds since 1970.
        width: how many columns it may take; None: as many as it needs. Overrides and values are cut
            to it, nothing else is.
        height: how many lines it may take; None: as many as it needs. With fewer than there are
            jobs, those that run are shown first, then failures, the next ones and the last.
    """
    jobs = sorted(sweep.jobs.values(), key=lambda job: job.number)
    has_room = height is None or height >= len(jobs) + LEAST
    told = varying(jobs)
    shown = jobs if has_room else _most_telling(jobs, max(1, (height or 0) - LEAST - 1))
    rows = [_row(job, sweep, now, told) for job in shown]
    rooms = _rooms(rows, width)
    drawn = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    for name, room in zip(_COLUMNS, rooms, strict=True):
        justify: Literal["left", "right"] = "right" if name in {"job", "time"} else "left"
        drawn.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", width=room)
    for job, row in zip(shown, rows, strict=True):
        styles = ["", STYLES[job.state], *[""] * 4]
        drawn.add_row(*map(Text, row, styles))
    left_out = len(jobs) - len(shown)
    more = [Text(f"… and {left_out} more jobs", "dim")] if left_out else []
    return Group(drawn, *more, totals(sweep, now))


def _row(
    job: JobState, sweep: SweepState, now: float, told: Callable[[JobState], list[str]]
) -> list[str]:
    texts = (
        str(job.number),
        state_of(job, sweep),
        " ".join(told(job)),
        place(job),
        duration(job.elapsed_s(now)),
        outcome(job),
    )
    return [one_line(each) for each in texts]


def _rooms(rows: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """Return the columns' widths, where what they hold may be cut to fit."""
    wanted = [max(map(cell_len, cells)) for cells in zip(_COLUMNS, *rows, strict=True)]
    cut = wanted[_OVERRIDES] + wanted[_VALUE]
    room = cut if width is None else width - (sum(wanted) - cut) - len(wanted)
    if cut > room:
        value = max(len(_COLUMNS[_VALUE]), room // 2, room - wanted[_OVERRIDES])
        wanted[_VALUE] = min(wanted[_VALUE], value)
        wanted[_OVERRIDES] = max(1, room - wanted[_VALUE])
    return wanted


def _most_telling(jobs: Sequence[JobState], count: int) -> list[JobState]:
    """Return the jobs to show where there is no room for all."""

    def urgency(job: JobState) -> tuple[int, float]:
        is_next = job.state in {"running", "queued"}
        return _URGENCY[job.state], job.number if is_next else -(job.ended or 0.0)

    chosen = sorted(jobs, key=urgency)[:count]
    return sorted(chosen, key=lambda job: job.number)


def totals(sweep: SweepState, now: float) -> Text:
    """Return how many jobs there are in each state, and how long it goes on."""
    text = Text(no_wrap=True, overflow="ellipsis")
    counts = sweep.counts()
    ended = sum(counts[state] for state in ("completed", "failed", "stopped"))
    text.append(f"{ended} of {len(sweep.jobs)} jobs have ended", "bold")
    last = now if sweep.state == "running" else sweep.ended
    if sweep.started is not None and last is not None:
        text.append(f" after {duration(last - sweep.started)}")
    left = sweep.left_s(now)
    if left is not None:
        text.append(f", about {duration(left)} left")
    for state, count in counts.items():
        if count:
            text.append(f"  {count} ")
            text.append(word(state, sweep), STYLES[state])
    if sweep.state == "killed":
        text.append("  the launching process was killed", "magenta")
    return text
