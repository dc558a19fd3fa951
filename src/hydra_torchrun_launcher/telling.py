"""What is said of a job in a line: state, place, value and time (used by all that show a sweep)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hydra_torchrun_launcher.job_state import JobState
from hydra_torchrun_launcher.sweep_state import SweepState

_DEEPEST = 5
_LARGEST = 1e308
_SHORT_S = 9.95
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86_400


def varying(jobs: Iterable[JobState]) -> Callable[[JobState], list[str]]:
    """Return what tells a job's overrides, without those that all jobs have."""
    sets = [set(job.overrides) for job in jobs]
    common = set.intersection(*sets) if len(sets) > 1 else set()

    def told(job: JobState) -> list[str]:
        return [each for each in job.overrides if each not in common]

    return told


def state_of(job: JobState, sweep: SweepState) -> str:
    """Return a job's state in words, with its tries."""
    again = [f"retry {job.retry}"] * bool(job.retry) + [f"restart {job.restarts}"] * bool(
        job.restarts
    )
    before = ["before"] * (job.ran_as is not None)
    notes = ", ".join([*again, *before])
    return f"{word(job.state, sweep)} ({notes})" if notes else word(job.state, sweep)


def word(state: str, sweep: SweepState) -> str:
    """Return a job's state in a word."""
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


def value_text(value: Any, depth: int = _DEEPEST) -> str:
    """Return a value as it stands in an event, in short: tags of `tagged` are left out.

    Args:
        value: the value.
        depth: how deep to go into it.
    """
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, dict | list):
        return str(value)
    if not depth:
        return "…"
    if isinstance(value, list):
        return f"[{', '.join(value_text(each, depth - 1) for each in value)}]"
    if list(value) == ["!"] and isinstance(value["!"], list) and value["!"]:
        return value_text(value["!"][-1], depth - 1)
    parts = (_part(name, each, depth - 1) for name, each in value.items())
    return ", ".join(parts)


def _part(name: str, value: Any, depth: int) -> str:
    """Return an item of a mapping; one that is a mapping itself is `name.key=value`."""
    if isinstance(value, dict) and list(value) != ["!"] and value and depth:
        return ", ".join(_part(f"{name}.{key}", each, depth - 1) for key, each in value.items())
    return f"{name}={value_text(value, depth)}"


def numbers_of(value: Any, name: str = "", depth: int = _DEEPEST) -> dict[str, float]:
    """Return the numbers in a value as it stands in an event: its own, or those of a mapping.

    Args:
        value: the value.
        name: what it is called; empty: it is the whole one.
        depth: how deep to go into it.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {name or "value": value} if abs(value) <= _LARGEST else {}
    found: dict[str, float] = {}
    if isinstance(value, dict) and "!" not in value and depth:
        for key, each in value.items():
            found.update(numbers_of(each, f"{name}.{key}" if name else key, depth - 1))
    return found


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
