"""What earlier runs of a sweep have completed in its directory, for those that go on there (runs in
the launching process).

A job is known by its overrides and its config, not by its number: numbers move.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

from hydra_torchrun_launcher import claims, events, tagged
from hydra_torchrun_launcher.errors import StartError, TransportError
from hydra_torchrun_launcher.job_state import seconds_of
from hydra_torchrun_launcher.processes import start_time

_WITHOUT = {
    "queued": "it had not started",
    "started": "it was cut short",
    "restarted": "it was cut short",
    "failed_try": "it was cut short",
    "failed": "it failed",
    "stopped": "it was stopped",
}
"""Why a job has no result, by what happened to it last."""
_RAN = ("folders", "devices", "cores")


@dataclass(frozen=True)
class Completed:
    """A job that has completed, as its event says.

    Attributes:
        number: its number in the run that wrote it down.
        ran_as: its number in the run in which it ran.
        config: the mark of its config.
        output_dir: where its files are.
        seconds: how long it took.
        value: what its rank 0 returned.
        problem: why that value cannot be had again; empty if it can.
        ran: where it ran: what its events say of `_RAN`.
    """

    number: int
    ran_as: int
    config: str
    output_dir: str
    seconds: float
    value: Any
    problem: str
    ran: dict[str, Any]


class Records:
    """The jobs that have completed in a sweep's directory."""

    def __init__(self, folder: Path) -> None:
        """Read them.

        Args:
            folder: where the events are; it may not be there.
        """
        self._completed: dict[tuple[str, ...], list[Completed]] = {}
        self._last: dict[tuple[str, ...], str] = {}
        """What happened last to a job with these overrides."""
        self._of: dict[int, tuple[str, ...]] = {}
        self._ran: dict[int, dict[str, Any]] = {}
        """Where the last ranks of a job ran."""
        found = [event for path in folder.glob("*.jsonl") for event in events.read_all(path)]
        for event in sorted(found, key=lambda event: float(event["time"])):
            self._take_in(event)

    def _take_in(self, event: dict[str, Any]) -> None:
        overrides, name, number = event.get("overrides"), event["event"], event["job"]
        if isinstance(overrides, list):
            self._of[number] = tuple(map(str, overrides))
        key = self._of.get(number)
        if key is not None:
            self._last[key] = name
        if name in {"queued", "started", "restarted"} or "ran_as" in event:
            before = self._ran.get(number, {}) if name == "restarted" else {}
            self._ran[number] = {**before, **{k: event[k] for k in _RAN if k in event}}
        if name == "started":
            self._forget(event.get("output_dir"), number)
        elif name == "completed" and isinstance(overrides, list) and key is not None:
            completed = _completed(event, self._ran.get(number, {}))
            self._completed.setdefault(key, []).append(completed)

    def _forget(self, output_dir: Any, number: Any) -> None:
        """Leave out what has completed where a job of its number has run since."""
        for key, completed in self._completed.items():
            self._completed[key] = [
                each for each in completed if (each.output_dir, each.ran_as) != (output_dir, number)
            ]

    def __bool__(self) -> bool:
        return bool(self._last)

    def of(self, overrides: Sequence[str]) -> Sequence[Completed]:
        """Return what has completed with these overrides, the last first."""
        return self._completed.get(tuple(overrides), [])[::-1]

    def find(
        self, number: int, overrides: Sequence[str], config: Any
    ) -> tuple[Completed | None, str]:
        """Return what a job takes over, or None and why it has to run.

        Args:
            number: the job's: of several that are alike, it takes its own.
            overrides: the job's.
            config: its composed config; None where nothing has completed with its overrides.
        """
        found = self.of(overrides)
        if not found:
            last = self._last.get(tuple(overrides))
            return None, _WITHOUT.get(last, "no result of it is there") if last else "it is new"
        alike = [each for each in found if each.config == mark(config)]
        alike.sort(key=lambda each: each.number != number)
        fit = next((each for each in alike if not each.problem), None)
        if fit is not None:
            return fit, ""
        why = alike[0].problem if alike else "its config has changed since it completed"
        return None, why


def _completed(event: dict[str, Any], ran: dict[str, Any]) -> Completed:
    value, problem = None, ""
    if event.get("seal") != events.seal(event):
        problem = "its record has been changed"
    elif "type" in event:
        problem = f"its value, of type {event['type']}, is not in its record"
    else:
        try:
            value = tagged.loads(json.dumps(event["value"]))
        except TransportError as error:  # of an enum that is no more
            problem = f"its value cannot be read: {error}"
    number = event["job"]
    return Completed(
        number=number,
        ran_as=event.get("ran_as", number),
        config=str(event.get("config")),
        output_dir=str(event.get("output_dir")),
        seconds=seconds_of(event.get("seconds")) or 0.0,
        value=value,
        problem=problem,
        ran=ran,
    )


def mark(config: Any) -> str:
    """Return what a task's config is known by: a hash of it as it is written, unresolved.

    Args:
        config: a composed config; its `hydra` node does not count.
    """
    own = {key: value for key, value in _raw(config).items() if key != "hydra"}
    return hashlib.sha256(
        OmegaConf.to_yaml(OmegaConf.create(own), sort_keys=True).encode()
    ).hexdigest()[:16]


def _raw(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=False)


def remains(folder: Path) -> list[psutil.Process]:
    """Return the keepers of jobs whose launching process was killed: they end their ranks still."""
    found = []
    for path in folder.glob("*.jsonl"):
        last = (events.read(path) or [{}])[-1]
        pid, start = last.get("keeper"), last.get("keeper_start")
        if type(pid) is int and start and start_time(pid) == start:
            with suppress(psutil.Error):  # it has just gone
                found.append(psutil.Process(pid))
    return found


def records_to_resume(folder: Path | None, hydra: Any) -> Records:
    """Return what a sweep goes on from.

    Args:
        folder: where its records are; None if it keeps none.
        hydra: the sweep's `hydra` node.

    Raises:
        StartError: there is nothing, or it is another app's.
    """
    records, earlier = Records(folder or Path(os.devnull)), claims.read(folder)
    if not records and not earlier:  # a sweep that was killed at once has no jobs yet
        raise StartError(_nothing_to_resume(hydra))
    name, app = str(hydra.job.name), earlier.get("app")
    if app not in (name, None):
        problem = (
            f"hydra.launcher.resume=true: {folder} has the records of another app, {app}; this "
            f"one is {name}"
        )
        raise StartError(problem)
    return records


def _nothing_to_resume(hydra: Any) -> str:
    """Say that there is nothing in a sweep's directory to go on from, and where there is.

    Args:
        hydra: the sweep's `hydra` node.
    """
    problem = f"hydra.launcher.resume=true: {hydra.sweep.dir} holds no record of a sweep"
    written = str(OmegaConf.to_container(hydra.sweep, resolve=False)["dir"])  # type: ignore[index,call-overload]
    pattern = re.sub(r"\$\{[^{}]*\}", "*", written)
    others = list(
        islice(recent(Path(pattern if "*" in pattern else Path(pattern).parent / "*")), 5)
    )
    if not others:
        return problem
    listed = "".join(f"\n  {directory}" for directory in others)
    words = [word for word in sys.orig_argv if not word.startswith("hydra.sweep.dir=")]
    command = shlex.join([*words, f"hydra.sweep.dir={others[0]}"])
    return f"{problem}. The last sweeps were in{listed}\nTo go on with the last one:\n  {command}"


def recent(pattern: Path) -> Iterator[Path]:
    """Yield directories in which sweeps have been, the last first.

    Args:
        pattern: a path with stars.
    """
    root = Path(pattern.anchor or ".")
    found = root.glob(str(pattern.relative_to(pattern.anchor) if pattern.anchor else pattern))
    there = [path for path in found if (path / events.FOLDER).is_dir()]
    yield from sorted(there, key=lambda path: (path / events.FOLDER).stat().st_mtime, reverse=True)
