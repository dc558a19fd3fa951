"""What happens to a sweep's jobs, for those who look: a file of JSON lines for each job (written in
the launching process). The schema is in docs/events.md.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra_torchrun_launcher import tagged
from hydra_torchrun_launcher.errors import (
    JobTimeoutError,
    TransportError,
    refused,
    text_of,
)
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.tries import STOPPED

log = logging.getLogger(__name__)

FOLDER = ".torchrun"
"""In the sweep's directory."""
VERSION = 1
"""Of the schema: raised when an event or a field changes its meaning, not when one is added."""
_LONGEST_TEXT = 4000
_LATEST = 1e11
"""Some thousand years from now, in seconds since 1970."""
_UNKNOWN: Mapping[str, Any] = {}


class EventFile:
    """A job's events; nobody else writes to the file while the sweep runs."""

    def __init__(
        self,
        folder: Path | None,
        number: int,
        show: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        """Name the file.

        Args:
            folder: where it is; None: nothing is written.
            number: the job's number.
            show: is told each event, too.
        """
        self._path = None if folder is None else folder / f"{number}.jsonl"
        self._number = number
        self._show = show
        self._is_said = False

    def add(self, event: str, **facts: Any) -> None:
        """Write an event, whole, at the end; what cannot be written is said and costs nothing."""
        head = {"v": VERSION, "event": event, "time": time.time(), "job": self._number}
        if self._path is not None:
            self._write(self._path, json.dumps({**head, **facts}).encode() + b"\n")
        self._show({**head, **facts})

    def _write(self, path: Path, line: bytes) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            fd = os.open(path, flags, 0o666)
            try:
                os.write(fd, _line_end(fd) + line)
            finally:
                os.close(fd)
        except OSError as problem:
            if not self._is_said:
                log.warning("%s: %s; the job goes on", path, refused(problem))
            self._is_said = True

    def ended(
        self, ended: Ended, seconds: float, about: Mapping[str, Any] = _UNKNOWN, retry: int = 0
    ) -> None:
        """Write how the job ended.

        Args:
            ended: how its last try did.
            seconds: how long it ran, with all its tries.
            about: what it is known by if it has completed, as `about` has it.
            retry: the number of the last try.
        """
        took = {"retry": retry, "seconds": round(seconds, 3)}
        if ended.error is None:
            facts = {**_value(ended.value), **about}
            sealed = seal({"job": self._number, **facts})
            self.add("completed", **facts, seal=sealed, **took)
        else:
            event = "stopped" if isinstance(ended.error, STOPPED) else "failed"
            self.add(event, **cause(ended), **took)


def about(overrides: Sequence[str], config: str, output_dir: str) -> dict[str, Any]:
    """Return what a job that has completed is known by.

    Args:
        overrides: its overrides.
        config: the mark of its config.
        output_dir: where its files are.
    """
    return {"overrides": list(overrides), "config": config, "output_dir": output_dir}


_SEALED = ("job", "ran_as", "overrides", "config", "output_dir", "value", "type")


def seal(event: dict[str, Any]) -> str:
    """Return what tells whether a completed job's event is as it was written: a hash of it."""
    facts = [event.get(name) for name in _SEALED]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _line_end(fd: int) -> bytes:
    """Return what ends a line that somebody who was killed has left without its end."""
    size = os.fstat(fd).st_size
    return b"\n" if size and os.pread(fd, 1, size - 1) != b"\n" else b""


def cause(ended: Ended) -> dict[str, Any]:
    """Return why a job failed, as an event has it."""
    error = ended.error
    text = text_of(error)[:_LONGEST_TEXT]
    facts: dict[str, Any] = {"error": type(error).__name__, "message": text, **ended.place}
    if isinstance(error, JobTimeoutError):
        facts["timeout_s"] = error.timeout_s
    return facts


def _value(value: Any) -> dict[str, Any]:
    try:
        return {"value": json.loads(tagged.dumps(value))}
    except (TransportError, TypeError, ValueError, RecursionError):  # no data
        kind = type(value)
        return {"value": None, "type": f"{kind.__module__}.{kind.__qualname__}"}


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file's last run, as `read_all` does those of all."""
    events: list[dict[str, Any]] = []
    for event in read_all(path):
        events = [event] if event["event"] == "queued" else [*events, event]
    return events


def _is_whole(event: dict[str, Any]) -> bool:
    """Tell whether an event has what each has: somebody may have edited it."""
    when = event.get("time")
    is_moment = isinstance(when, float | int) and 0 <= when <= _LATEST
    return is_moment and type(event.get("job")) is int and isinstance(event.get("event"), str)


def _finite(text: str) -> float:
    """Read a number; no line of ours has one that is not finite.

    Raises:
        ValueError: it is not.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def read_all(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file; lines that are not whole are left out.

    Args:
        path: the file; one that is not there has no events.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    found: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError, RecursionError):
            event = json.loads(line, parse_float=_finite, parse_constant=_finite)
            if isinstance(event, dict) and event.get("v") == VERSION and _is_whole(event):
                found.append(event)
    return found
