"""What has become of a job of a sweep, as its events tell it (used by whoever looks).

Events may have been edited, or written by another version: what is not as it should be is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

STATES = ("running", "queued", "completed", "failed", "stopped", "lost")
"""Of jobs. Lost: its launching process was killed while it ran."""
_ENDS = ("completed", "failed", "stopped")
_LARGEST = 1 << 31
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
        attempts: folders of its ranks' files, ranks in order, for each attempt of each try of its
            last run, or of the run that is taken over; None: a rank has none.
        hosts: of its ranks, ranks in order, where the job ran on several nodes.
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
    attempts: list[tuple[str | None, ...]] = field(default_factory=list)
    hosts: tuple[str, ...] = ()
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
        fresh = JobState(self.number, texts(event.get("overrides")), queued=when, spans=self.spans)
        self.__dict__.update(fresh.__dict__)

    def _start(self, event: dict[str, Any], when: float) -> None:
        self.state, self.started = "running", when
        self._have_place(event)
        self.output_dir = text(event.get("output_dir"))
        self._have_processes(event, when)

    def _restart(self, event: dict[str, Any], when: float) -> None:
        self._close(when, "restarted")
        self.restarts += 1
        self._have_processes(event, when)

    def _have_place(self, event: dict[str, Any]) -> None:
        self.devices, self.cores = (_lent(event.get(name)) for name in ("devices", "cores"))

    def _have_folders(self, event: dict[str, Any]) -> None:
        folders = _items(event.get("folders"))
        self.attempts.append(tuple(text(each) or None for each in folders))

    def _have_processes(self, event: dict[str, Any], when: float) -> None:
        cores = tuple(f"core {core}" for core in self.cores or ())
        self.spans.append(Span(self.devices or cores, when))
        self.pids = tuple(pid for pid in _items(event.get("pids")) if type(pid) is int)
        self.hosts = texts(event.get("hosts"))
        self._have_folders(event)
        keeper, start = _whole(event.get("keeper")), seconds_of(event.get("keeper_start"))
        self.keeper = None if keeper is None or start is None else (keeper, start)

    def _fail_try(self, event: dict[str, Any], when: float) -> None:
        self._close(when, "failed_try")  # the next try begins at once: the job still runs
        self.state, self.retry = "running", (_whole(event.get("retry")) or 0) + 1

    def _end(self, event: dict[str, Any], when: float) -> None:
        self.state, self.ended = event["event"], when
        self._close(when, self.state)
        self.seconds = seconds_of(event.get("seconds"))
        self.retry = _whole(event.get("retry")) or 0
        self.value, self.value_type = event.get("value"), text(event.get("type"))
        self.ran_as = _whole(event.get("ran_as"))
        if self.ran_as is not None:
            self._have_place(event)
            self._have_folders(event)
        self.overrides = texts(event.get("overrides")) or self.overrides
        self.output_dir = text(event.get("output_dir")) or self.output_dir
        self.error, self.message, self.what, self.log = (
            text(event.get(name)) for name in ("error", "message", "what", "log")
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


def texts(value: Any) -> tuple[str, ...]:
    """Return a list of texts, as texts; anything else has none."""
    return tuple(map(str, _items(value)))


def _lent(value: Any) -> tuple[str, ...] | None:
    return tuple(map(str, value)) if isinstance(value, list | tuple) else None


def text(value: Any) -> str:
    """Return a text; anything else is an empty one."""
    return value if isinstance(value, str) else ""


def _whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= _LARGEST else None


def seconds_of(value: Any) -> float | None:
    """Return a number of seconds, or None."""
    is_number = isinstance(value, int | float) and 0 <= value <= _MOST_S
    return float(value) if is_number else None
