"""A sweep as one page for the browser, which needs nothing else (used by the command line)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable
from importlib import metadata, resources
from itertools import count
from typing import Any

from hydra_torchrun_launcher import telling
from hydra_torchrun_launcher.job_files import ERROR
from hydra_torchrun_launcher.job_state import JobState, Span, text
from hydra_torchrun_launcher.sweep_state import SweepState

_LONGEST_FILE = 1_000_000
_LONGEST_TRACEBACK = 10_000
_PLACE = '{"placeholder": true}'
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def page(sweep: SweepState, now: float) -> str:
    """Return the page's text.

    Args:
        sweep: what it is about.
        now: when it is written, in seconds since 1970.
    """
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    data = json.dumps(facts(sweep, now), allow_nan=False)
    for char in "<>&":  # so that no text of a job's ends the element that holds the data
        data = data.replace(char, f"\\u{ord(char):04x}")
    return template.replace(_PLACE, data)


def facts(sweep: SweepState, now: float) -> dict[str, Any]:
    """Return what the page shows, as JSON."""
    jobs = sorted(sweep.jobs.values(), key=lambda job: job.number)
    everyone = [*jobs, *sweep.earlier.values()]
    return {
        "title": sweep.app or "sweep",
        "directory": sweep.directory,
        "command": " ".join(sweep.command),
        "state": sweep.state,
        "started": sweep.started,
        "ended": sweep.ended,
        "written": now,
        "version": metadata.version("hydra-torchrun-launcher"),
        "jobs": [_job(job, now) for job in jobs],
        "spans": _spans(everyone, now),
    }


def _job(job: JobState, now: float) -> dict[str, Any]:
    return {
        "job": job.number,
        "overrides": list(job.overrides),
        "params": dict(map(_param, job.overrides)),
        "state": job.state,
        "value": telling.outcome(job) if job.state == "completed" else "",
        "numbers": telling.numbers_of(job.value),
        "seconds": job.elapsed_s(now),
        "started": job.started,
        "ended": job.ended,
        "devices": telling.place(job),
        "retry": job.retry,
        "restarts": job.restarts,
        "output_dir": job.output_dir,
        "error": job.error,
        "message": job.message,
        "what": f"rank {job.rank} {job.what}" if job.what and job.rank is not None else "",
        "log": job.log,
        "ran_as": job.ran_as,
        "traceback": _traceback(job),
    }


def _traceback(job: JobState) -> str:
    """Return the traceback of the rank that failed first, if it is still there."""
    folders = job.attempts[-1] if job.attempts else ()
    if job.state != "failed" or job.rank is None or job.rank >= len(folders):
        return ""
    try:
        with open(os.path.join(folders[job.rank] or "", ERROR), encoding="utf-8") as file:
            known = json.loads(file.read(_LONGEST_FILE))
        return text(known["message"]["extraInfo"]["py_callstack"])[-_LONGEST_TRACEBACK:]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return ""


def _param(override: str) -> tuple[str, Any]:
    """Return an override's key and its value, which is a number if it reads as one."""
    key, _, value = override.partition("=")
    number = float(value) if _NUMBER.fullmatch(value) else None
    return key.lstrip("+~"), value if number in (None, float("inf"), float("-inf")) else number


def _spans(jobs: Iterable[JobState], now: float) -> list[dict[str, Any]]:
    """Return who ran where and when; where nothing was lent, jobs that ran at once lie below each
    other.
    """
    pairs = [(job, span) for job in jobs for span in job.spans]
    free_from: dict[str, float] = {}
    found = []
    for job, span in sorted(pairs, key=lambda pair: pair[1].start):
        end = span.end if span.end is not None else None if span.state == "running" else span.start
        for lane in span.where or (_free_lane(span, free_from),):
            free_from[lane] = now if end is None else end
            found.append(
                {"job": job.number, "lane": lane, "start": span.start, "end": end}
                | {"state": span.state}
            )
    return found


def _free_lane(span: Span, free_from: dict[str, float]) -> str:
    lanes = (f"all {number}" if number else "all" for number in count())
    return next(lane for lane in lanes if free_from.get(lane, 0.0) <= span.start)
