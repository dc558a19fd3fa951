"""A sweep's jobs as a table for a terminal (used by the live view and the command line)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from hydra_torchrun_launcher.sweep_state import JobState, SweepState

STYLES = {
    "running": "cyan",
    "queued": "dim",
    "completed": "green",
    "failed": "red",
    "stopped": "yellow",
    "lost": "magenta",
}
_URGENCY = {"running": 0, "failed": 1, "lost": 1, "queued": 2, "stopped": 3, "completed": 3}
_SHORT_S = 9.95
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400
_FRAME = 3
"""Lines around the jobs: the table's head, the totals, and what is not shown."""


def table(sweep: SweepState, now: float, height: int | None = None) -> Group:
    """Return a sweep's jobs, a line each, and their totals.

    Args:
        sweep: the sweep.
        now: seconds since 1970.
        height: how many lines it may take; None: as many as it needs. With fewer than there are
            jobs, those that run are shown first, then failures, the next ones and the last.
    """
    jobs = sorted(sweep.jobs.values(), key=lambda job: job.number)
    shown = jobs if height is None else _most_telling(jobs, max(1, height - _FRAME))
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


def varying(jobs: Iterable[JobState]) -> Callable[[JobState], list[str]]:
    """Return what tells a job's overrides, without those that all jobs have."""
    sets = [set(job.overrides) for job in jobs]
    common = set.intersection(*sets) if len(sets) > 1 else set()

    def told(job: JobState) -> list[str]:
        return [each for each in job.overrides if each not in common]

    return told


def totals(sweep: SweepState, now: float) -> Text:
    """Return how many jobs there are in each state, and how long it goes on."""
    text = Text()
    counts = sweep.counts()
    ended = sum(counts[state] for state in ("completed", "failed", "stopped"))
    text.append(f"{ended} of {len(sweep.jobs)} jobs have ended", "bold")
    for state, count in counts.items():
        if count:
            text.append(f"  {count} ")
            text.append(_word(state, sweep), STYLES[state])
    if sweep.started is not None:
        last = now if sweep.state == "running" else sweep.ended
        text.append(f"  after {duration(last - sweep.started)}" if last is not None else "")
    left = sweep.left_s(now)
    if left is not None:
        text.append(f"  about {duration(left)} left")
    if sweep.state == "killed":
        text.append("  the launching process was killed", "magenta")
    return text


def state_of(job: JobState, sweep: SweepState) -> str:
    """Return a job's state in words, with its tries."""
    again = [f"retry {job.retry}"] * bool(job.retry) + [f"restart {job.restarts}"] * bool(
        job.restarts
    )
    before = ["before"] * (job.ran_as is not None)
    notes = ", ".join([*again, *before])
    return f"{_word(job.state, sweep)} ({notes})" if notes else _word(job.state, sweep)


def _word(state: str, sweep: SweepState) -> str:
    return "not started" if state == "queued" and sweep.state != "running" else state


def place(job: JobState) -> str:
    """Return what part of the machine a job has."""
    if job.devices:
        return ",".join(job.devices)
    if job.cores:
        return "cores " + ",".join(job.cores)
    return ""


def outcome(job: JobState) -> str:
    """Return a job's value, or why there is none."""
    if job.state in {"failed", "stopped"}:
        what = f"rank {job.rank} {job.what}" if job.what and job.rank is not None else ""
        return what or ": ".join(filter(None, (job.error, job.message)))
    if job.value_type:
        return f"<{job.value_type}>"
    if job.state != "completed" or job.value is None:
        return ""
    return value_text(job.value)


def value_text(value: Any) -> str:
    """Return a value as it stands in an event, in short: tags of `tagged` are left out."""
    if isinstance(value, bool) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, dict):
        if list(value) == ["!"] and isinstance(value["!"], list) and value["!"]:
            return value_text(value["!"][-1])
        return ", ".join(f"{name}={value_text(each)}" for name, each in value.items())
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return str(value)


def numbers_of(value: Any, name: str = "value") -> dict[str, float]:
    """Return the numbers in a value as it stands in an event: its own, or those of a mapping."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {name: value} if math.isfinite(value) else {}
    if isinstance(value, dict) and "!" not in value:
        found = {}
        for key, each in value.items():
            found.update(numbers_of(each, key if name == "value" else f"{name}.{key}"))
        return found
    return {}


def one_line(text: str) -> str:
    """Return a text that cannot disturb a terminal."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


def duration(seconds: float | None) -> str:
    """Return a time as people say it: 7.2 s, 12 s, 3:05 min, 2:40 h, 3 d 4 h."""
    if seconds is None:
        return ""
    whole = max(0, round(seconds))
    if seconds < _SHORT_S:
        return f"{max(0.0, seconds):.1f} s"
    if whole < _MINUTE_S:
        return f"{whole} s"
    if whole < _HOUR_S:
        return f"{whole // _MINUTE_S}:{whole % _MINUTE_S:02} min"
    if whole < _DAY_S:
        return f"{whole // _HOUR_S}:{whole % _HOUR_S // _MINUTE_S:02} h"
    return f"{whole // _DAY_S} d {whole % _DAY_S // _HOUR_S} h"
