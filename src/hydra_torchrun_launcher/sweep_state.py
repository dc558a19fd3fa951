"""What has become of a sweep and its jobs, as events tell it (used by whoever looks: the live view,
the command line, the report).

Events may have been edited, or written by another version: what is not as it should be is left out.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra_torchrun_launcher import claims, events
from hydra_torchrun_launcher.errors import LookError
from hydra_torchrun_launcher.processes import start_time

STATES = ("running", "queued", "completed", "failed", "stopped", "lost")
"""Of jobs. Lost: its launching process was killed while it ran."""
_ENDS = ("completed", "failed", "stopped")
_MOST_S = 1e12
"""More than any number of seconds here that is one."""


@dataclass
class Span:
    """A stretch of time in which processes of a job ran.

    Attributes:
        where: the devices or cores that were lent; empty: all.
        start: seconds since 1970.
        end: the same; None: not known, or it goes on.
        state: how it ended: as a job's state, or `failed_try`, or `restarted`.
    """

    where: tuple[str, ...]
    start: float
    end: float | None = None
    state: str = "running"


@dataclass(eq=False)
class JobState:
    """A job, as far as it has come.

    Attributes:
        number: hydra.job.num.
        state: one of `STATES`.
        queued: when it was handed to the launcher, in seconds since 1970.
        started: when the ranks of its last try were there; None if they never were.
        ended: when it ended, or None.
        seconds: how long it took, all tries together; None while it has not ended.
        value: what rank 0 returned, as JSON has it; None where that is no plain data.
        value_type: the type of such a value; else empty.
        ran_as: the number of the job whose result was taken over from an earlier run, or None.
        retry: the number of its last try.
        restarts: how often torch elastic has started its ranks anew.
        folders: of its ranks' files in the last attempt, ranks in order; None: it has none.
        what: in a sentence what the rank did that failed first; empty if none did.
        log: the file to open.
        spans: when and where its processes ran, in every run of the directory.
    """

    number: int
    overrides: tuple[str, ...] = ()
    state: str = "queued"
    queued: float = 0.0
    started: float | None = None
    ended: float | None = None
    seconds: float | None = None
    devices: tuple[str, ...] | None = None
    cores: tuple[str, ...] | None = None
    value: Any = None
    value_type: str = ""
    ran_as: int | None = None
    retry: int = 0
    restarts: int = 0
    output_dir: str = ""
    folders: tuple[str | None, ...] = ()
    pids: tuple[int, ...] = ()
    keeper: tuple[int, float] | None = None
    error: str = ""
    message: str = ""
    rank: int | None = None
    what: str = ""
    log: str = ""
    spans: list[Span] = field(default_factory=list)

    def take_in(self, event: dict[str, Any]) -> None:
        """Go on by one event."""
        name, when = event["event"], float(event["time"])
        act: Callable[[dict[str, Any], float], None] | None = {
            "queued": self._queue,
            "started": self._start,
            "restarted": self._restart,
            "failed_try": self._fail_try,
            **dict.fromkeys(_ENDS, self._end),
        }.get(name)
        if act is not None:
            act(event, when)

    def _queue(self, event: dict[str, Any], when: float) -> None:
        self.lose(None)  # of a run that was killed
        fresh = JobState(self.number, _texts(event.get("overrides")), queued=when, spans=self.spans)
        self.__dict__.update(fresh.__dict__)

    def _start(self, event: dict[str, Any], when: float) -> None:
        self.state, self.started = "running", when
        self.devices, self.cores = (_lent(event.get(name)) for name in ("devices", "cores"))
        self.output_dir = _text(event.get("output_dir"))
        self._have_processes(event, when)

    def _restart(self, event: dict[str, Any], when: float) -> None:
        self._close(when, "restarted")
        self.restarts += 1
        self._have_processes(event, when)

    def _have_processes(self, event: dict[str, Any], when: float) -> None:
        cores = tuple(f"core {core}" for core in self.cores or ())
        self.spans.append(Span(self.devices or cores, when))
        pids, folders = event.get("pids"), event.get("folders")
        self.pids = tuple(pid for pid in _items(pids) if type(pid) is int)
        self.folders = tuple(each if isinstance(each, str) else None for each in _items(folders))
        keeper, start = _whole(event.get("keeper")), _seconds(event.get("keeper_start"))
        self.keeper = None if keeper is None or start is None else (keeper, start)

    def _fail_try(self, event: dict[str, Any], when: float) -> None:
        self._close(when, "failed_try")
        self.state, self.retry = "queued", _whole(event.get("retry")) or 0
        self.retry += 1

    def _end(self, event: dict[str, Any], when: float) -> None:
        self.state, self.ended = event["event"], when
        self._close(when, self.state)
        self.seconds = _seconds(event.get("seconds"))
        self.retry = _whole(event.get("retry")) or 0
        self.value, self.value_type = event.get("value"), _text(event.get("type"))
        self.ran_as = _whole(event.get("ran_as"))
        self.overrides = _texts(event.get("overrides")) or self.overrides
        self.output_dir = _text(event.get("output_dir")) or self.output_dir
        self.error, self.message, self.what, self.log = (
            _text(event.get(name)) for name in ("error", "message", "what", "log")
        )
        self.rank = _whole(event.get("rank"))

    def _close(self, when: float, state: str) -> None:
        """Note the end of what runs."""
        for span in self.spans:
            if span.state == "running":
                span.end, span.state = when, state

    def lose(self, when: float | None) -> None:
        """Note that its launching process was killed, if it ran.

        Args:
            when: about when that was, if it is known.
        """
        if self.state == "running":
            self.state = "lost"
        for span in self.spans:
            if span.state == "running":
                span.state = "lost"
                span.end = when if when is not None and when > span.start else None

    def elapsed_s(self, now: float) -> float | None:
        """Return how long it took, or has taken."""
        if self.state == "running" and self.started is not None:
            return max(0.0, now - self.started)
        return self.seconds


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(str, _items(value)))


def _lent(value: Any) -> tuple[str, ...] | None:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else None


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int else None


def _seconds(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and 0 <= value <= _MOST_S
    return float(value) if is_number else None


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
    """

    directory: str
    state: str = "running"
    app: str = ""
    command: tuple[str, ...] = ()
    started: float | None = None
    ended: float | None = None
    jobs: dict[int, JobState] = field(default_factory=dict)
    earlier: dict[int, JobState] = field(default_factory=dict)

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

        Jobs take as long as those that have ended, and as many run at once as when the last began.
        """
        began = {job: job.started for job in self.jobs.values() if job.started is not None}
        took = [job.seconds for job in began if job.seconds]
        left = [job for job in self.jobs.values() if job.state in {"running", "queued"}]
        if self.state != "running" or not left or not took:
            return None
        usual, last = sum(took) / len(took), max(began.values())
        at_once = sum(job.ended is None or job.ended > last for job in began)
        work = sum(max(0.0, usual - (job.elapsed_s(now) or 0.0)) for job in left)
        return work / at_once


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
            app=_text(claim.get("app")),
            command=_texts(claim.get("command")),
            started=_seconds(claim.get("started")),
            ended=_seconds(claim.get("ended")),
        )
        found: dict[int, JobState] = {}
        for path in self._files():
            job = JobState(int(path.stem))
            for event in self._events(path):
                job.take_in(event)
            found[job.number] = job
        own = [job for job in found.values() if job.queued >= (sweep.started or 0.0)]
        sweep.jobs = {job.number: job for job in own or found.values()}
        sweep.earlier = {n: job for n, job in found.items() if n not in sweep.jobs}
        sweep.state = self._state(claim, sweep)
        gone = sweep.earlier if sweep.state == "running" else found
        for job in gone.values():
            job.lose(self._last_sign() if job.number in sweep.jobs else None)
        return sweep

    def _last_sign(self) -> float | None:
        """Return when the last launching process was heard of."""
        number = claims.last_number(self._folder)
        try:
            return None if number is None else claims.path_of(self._folder, number).stat().st_mtime
        except OSError:
            return None

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
        if claim:
            number = claims.last_number(self._folder) or 0
            is_alive = claims.is_alive(claim, claims.path_of(self._folder, number))
            return "ended" if sweep.ended is not None else "running" if is_alive else "killed"
        running = [job for job in sweep.jobs.values() if job.state == "running"]
        if any(job.keeper and start_time(job.keeper[0]) == job.keeper[1] for job in running):
            return "running"
        return "killed" if running else "unknown"


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
