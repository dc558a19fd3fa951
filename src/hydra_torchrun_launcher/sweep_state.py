"""What has become of a sweep, as its directory tells it (used by whoever looks: the live view, the
command line, the report).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from hydra_torchrun_launcher import claims, events
from hydra_torchrun_launcher.errors import LookError
from hydra_torchrun_launcher.job_files import STDERR, STDOUT
from hydra_torchrun_launcher.job_state import STATES, JobState, seconds_of, text, texts
from hydra_torchrun_launcher.processes import start_time


@dataclass
class SweepState:
    """A sweep's directory, as far as it has come.

    Attributes:
        directory: hydra.sweep.dir.
        state: of the last sweep there: `running`, `ended`, `killed`, or `unknown`, where it was run
            by a version that did not say.
        app: the app's name.
        command: its command line, as words.
        started: when it began, in seconds since 1970, or None.
        ended: when it ended, or None.
        jobs: its jobs, by number.
        earlier: jobs of earlier sweeps there that the last one did not have.
        unread: how many files hold no event that this version knows: of jobs that had just been
            queued, or written by a later version.
    """

    directory: str
    state: str = "running"
    app: str = ""
    command: tuple[str, ...] = ()
    started: float | None = None
    ended: float | None = None
    jobs: dict[int, JobState] = field(default_factory=dict)
    earlier: dict[int, JobState] = field(default_factory=dict)
    unread: int = 0

    def take_in(self, event: dict[str, Any]) -> None:
        """Go on by an event of one of its jobs."""
        job = self.jobs.setdefault(event["job"], JobState(event["job"]))
        job.take_in(event)

    def counts(self) -> dict[str, int]:
        """Return how many jobs are in each state, in the order of `STATES`; none is left out."""
        found = Counter(job.state for job in self.jobs.values())
        return {state: found[state] for state in STATES}

    def left_s(self, now: float) -> float | None:
        """Estimate how long the sweep goes on, in seconds; None if nothing is known of that.

        Jobs take as long as those that have completed, and as many run at once as when the last
        began. What takes longer than that is not known.
        """
        began = {job: job.started for job in self.jobs.values() if job.started is not None}
        took = [job.seconds for job in began if job.state == "completed" and job.seconds]
        left = [job for job in self.jobs.values() if job.state in {"running", "queued"}]
        if self.state != "running" or not left or not took:
            return None
        usual, last = sum(took) / len(took), max(began.values())
        at_once = sum(job.ended is None or job.ended > last for job in began)
        work = sum(max(0.0, usual - (job.elapsed_s(now) or 0.0)) for job in left)
        return work / max(1, at_once) or None


class Reader:
    """Reads a sweep's directory, again and again if need be."""

    def __init__(self, directory: str) -> None:
        """Find the directory.

        Raises:
            LookError: no sweep has left a record there.
        """
        self._directory = Path(directory)
        self._folder = self._directory / events.FOLDER
        self._seen: dict[Path, tuple[tuple[int, int], list[dict[str, Any]]]] = {}
        if not self._folder.is_dir():
            raise LookError(_nothing_there(self._directory))

    def read(self) -> SweepState:
        """Return what is there now."""
        claim = claims.read(self._folder)
        sweep = SweepState(
            str(self._directory.absolute()),
            app=text(claim.get("app")),
            command=texts(claim.get("command")),
            started=seconds_of(claim.get("started")),
            ended=seconds_of(claim.get("ended")),
        )
        found: dict[int, JobState] = {}
        last_sign = self._last_beat()
        for path in self._files():
            job = JobState(int(path.stem))
            known = [event for event in self._events(path) if event["job"] == job.number]
            for event in known:
                job.take_in(event)
                last_sign = max(last_sign, float(event["time"]))
            if known:
                found[job.number] = job
            else:
                sweep.unread += 1
        own = [job for job in found.values() if job.queued >= (sweep.started or 0.0)]
        shown = own if sweep.started is not None else found.values()
        sweep.jobs = {job.number: job for job in shown}
        sweep.earlier = {n: job for n, job in found.items() if n not in sweep.jobs}
        sweep.state = self._state(claim, sweep)
        gone = sweep.earlier if sweep.state == "running" else found
        for job in gone.values():
            job.lose(_last_sign(job, last_sign) if job.number in sweep.jobs else None)
        return sweep

    def _last_beat(self) -> float:
        """Return when the last launching process showed that it lived."""
        number = claims.last_number(self._folder)
        return 0.0 if number is None else _touched(claims.path_of(self._folder, number))

    def _files(self) -> Iterable[Path]:
        found = [path for path in self._folder.glob("*.jsonl") if path.stem.isdecimal()]
        return sorted(found, key=lambda path: int(path.stem))

    def _events(self, path: Path) -> list[dict[str, Any]]:
        """Return a file's events, read again if it has changed."""
        try:
            status = path.stat()
            key = status.st_mtime_ns, status.st_size
            if self._seen.get(path, (None,))[0] != key:
                self._seen[path] = key, events.read_all(path)
        except OSError:  # it has just gone
            return []
        return self._seen[path][1]

    def _state(self, claim: dict[str, Any], sweep: SweepState) -> str:
        number = claims.last_number(self._folder)
        if number is not None:  # its file may be empty still
            is_alive = claims.is_alive(claim, claims.path_of(self._folder, number))
            return "ended" if sweep.ended is not None else "running" if is_alive else "killed"
        running = [job for job in sweep.jobs.values() if job.state == "running"]
        if any(job.keeper and start_time(job.keeper[0]) == job.keeper[1] for job in running):
            return "running"
        return "killed" if running else "unknown"


def _last_sign(job: JobState, launching: float) -> float:
    """Return when a job was heard of last: by its ranks' output, or its launching process."""
    folders = [Path(folder) for folder in chain(*job.attempts[-1:]) if folder is not None]
    files = (folder / name for folder in folders for name in (STDOUT, STDERR))
    return max([launching, *map(_touched, files)])


def _touched(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except (OSError, ValueError):  # an edited record may hold what is no path
        return 0.0


def _nothing_there(directory: Path) -> str:
    """Say that there is no record of a sweep, and where to look."""
    problem = f"{directory} holds no record of a sweep (no folder {events.FOLDER})"
    if not directory.is_dir():
        return f"{directory} is no directory; expected the directory of a sweep (hydra.sweep.dir)"
    if (directory.parent / events.FOLDER).is_dir():
        return f"{problem}; its parent does: {directory.parent}"
    found = [
        path for pattern in ("*", "*/*") for path in directory.glob(f"{pattern}/{events.FOLDER}")
    ]
    found.sort(key=os.path.getmtime, reverse=True)
    listed = "".join(f"\n  {path.parent}" for path in found[:5])
    return f"{problem}. The last sweeps below it were in{listed}" if found else problem
