"""A sweep's jobs as a table for a terminal (used by the live view and the command line)."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hydra_torchrun_launcher.job_state import JobState
from hydra_torchrun_launcher.sweep_state import SweepState
from hydra_torchrun_launcher.telling import (
    duration,
    one_line,
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
LEAST = 2
"""Lines around the jobs: the table's head and the totals."""


def table(sweep: SweepState, now: float, height: int | None = None) -> Group:
    """Return a sweep's jobs, a line each, and their totals.

    Args:
        sweep: the sweep.
        now: seconds since 1970.
        height: how many lines it may take; None: as many as it needs. With fewer than there are
            jobs, those that run are shown first, then failures, the next ones and the last.
    """
    jobs = sorted(sweep.jobs.values(), key=lambda job: job.number)
    has_room = height is None or height >= len(jobs) + LEAST
    shown = jobs if has_room else _most_telling(jobs, max(1, (height or 0) - LEAST - 1))
    drawn = Table(box=None, padding=(0, 1, 0, 0), show_edge=False, header_style="bold")
    drawn.add_column("job", justify="right", no_wrap=True)
    drawn.add_column("state", no_wrap=True)
    drawn.add_column("overrides", no_wrap=True, overflow="ellipsis", ratio=2)
    drawn.add_column("on", no_wrap=True, overflow="ellipsis")
    drawn.add_column("time", justify="right", no_wrap=True)
    drawn.add_column("value", no_wrap=True, overflow="ellipsis", ratio=1)
    told = varying(jobs)
    for job in shown:
        drawn.add_row(
            str(job.number),
            Text(state_of(job, sweep), STYLES[job.state]),
            Text(one_line(" ".join(told(job)))),
            Text(one_line(place(job))),
            duration(job.elapsed_s(now)),
            Text(one_line(outcome(job))),
        )
    left_out = len(jobs) - len(shown)
    more = [Text(f"… and {left_out} more jobs", "dim")] if left_out else []
    return Group(drawn, *more, totals(sweep, now))


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
