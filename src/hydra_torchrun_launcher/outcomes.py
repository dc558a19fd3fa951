"""What ranks recorded, read in the launching process: values, failures, their causes."""

from __future__ import annotations

import pickle
import socket
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hydra_torchrun_launcher.errors import (
    RankFailedError,
    RankPlace,
    UnsendableValueError,
    describe_exit,
    printable,
    related,
    signal_name,
)
from hydra_torchrun_launcher.job_files import ERROR, NO_LOG, STDERR, STDOUT
from hydra_torchrun_launcher.wire import Fd, read_document


def load_value(outcome: Fd) -> tuple[Any, UnsendableValueError | None]:
    """Return rank 0's value and None, or None and why it cannot be had here."""
    _, body = read_document(outcome.fileno())
    if not body:
        return None, None  # rank 0 left by sys.exit(0)
    try:
        return pickle.loads(body), None  # noqa: S301 - from our own rank, by an anonymous file
    except BaseException as error:  # noqa: BLE001 - a class may raise anything while it is rebuilt
        problem = (
            "The task function's return value cannot be rebuilt in the launching process: "
            f"{type(error).__name__}: {error}"
        )
        return None, UnsendableValueError(problem)


def _has_content(file: Path) -> bool:
    return file.exists() and file.stat().st_size > 0


def _recorded(outcome: Fd) -> tuple[dict[str, Any] | None, bytes]:
    """Return what a failed rank recorded; one that died at it may have left a part."""
    try:
        recorded, body = read_document(outcome.fileno())
    except ValueError:
        return None, b""
    return (None, b"") if recorded["status"] == "completed" else (recorded, body)


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        value: what the task function returned in rank 0.
        error: why the job failed, or None.
        restarts: what failed before and made its ranks start again.
        place: which rank failed first, as facts for an event; empty where none did.
    """

    value: Any = None
    error: BaseException | None = None
    restarts: Sequence[str] = ()
    place: Mapping[str, Any] = field(default_factory=dict)

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass(frozen=True)
class Failure:
    """How one rank failed."""

    place: RankPlace
    attempt: int
    recorded: dict[str, Any] | None
    body: bytes
    exit_code: int
    returned: bool

    @classmethod
    def read(cls, message: dict[str, Any], outcome: Fd) -> Failure:
        """Put together what the keeper saw and what the rank recorded."""
        attempt, local_rank = message["attempt"], message["local_rank"]
        folder = Path(message["folder"]) if message["folder"] else None
        files = [folder / name for name in (STDERR, STDOUT, ERROR)] if folder is not None else []
        place = RankPlace(
            global_rank=message["global_rank"],
            local_rank=local_rank,
            node=socket.gethostname(),
            attempt=attempt,
            log=str(next(filter(_has_content, files), folder or NO_LOG)),
        )
        recorded, body = _recorded(outcome)
        returned = message["recorded"] == "crashed"
        return cls(place, attempt, recorded, body, message["exit"], returned)

    def as_data(self) -> dict[str, Any]:
        """Return it as plain data for another node: without the exception itself."""
        plain = {"attempt": self.attempt, "exit_code": self.exit_code, "returned": self.returned}
        return {**plain, "place": asdict(self.place), "recorded": self.recorded}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Failure:
        """Return what `as_data` was called on, on another node."""
        return cls(**{**data, "place": RankPlace(**data["place"])}, body=b"")

    def facts(self) -> dict[str, Any]:
        """Return where it was, for an event."""
        return {
            "rank": self.place.global_rank,
            "local_rank": self.place.local_rank,
            "node": self.place.node,
            "attempt": self.place.attempt,
            "log": self.place.log,
            "what": printable(self._what()),
        }

    def report(self) -> str:
        """Describe the failure with its traceback."""
        if self.recorded is not None and self.recorded["status"] == "raised":
            return self.place.tell(f"raised\n{self.recorded['traceback'].rstrip()}")
        return self.line()

    def line(self) -> str:
        """Describe the failure in a line."""
        return self.place.tell(self._what())

    def _what(self) -> str:
        if self.recorded is not None and self.recorded["status"] == "raised":
            first = str(self.recorded["message"]).split("\n", 1)[0]
            return f"raised {self.recorded['type']}: {first}"
        if self.recorded is not None:
            return f"called sys.exit({self.recorded['message']})"
        before = "finished the task function and then " if self.returned else ""
        return before + describe_exit(self.exit_code)

    def error(self, others: Sequence[Failure]) -> BaseException:
        """Return the exception for the JobReturn: the rank's own wherever it can be rebuilt."""
        error: BaseException | None = self._own_error()
        if error is None:  # its truth is the user's to define
            error = RankFailedError(self.place, self._what_in_full())
        notes = [
            f"in {self.place}; log: {self.place.log}",
            *(f"also failed: {other.line()}" for other in others),
        ]
        for note in notes if not isinstance(error, RankFailedError) else notes[1:]:
            with suppress(Exception):  # Python < 3.11 has no notes; a class may refuse them
                BaseException.add_note(error, note)  # type: ignore[attr-defined,unused-ignore]
        return error

    def _own_error(self) -> BaseException | None:
        if self.recorded is None or self.recorded["status"] != "raised" or not self.body:
            return None
        try:
            error = pickle.loads(self.body)  # noqa: S301 - from our own rank, by an anonymous file
        except BaseException:  # noqa: BLE001 - its text is there all the same
            return None
        # What is not an Exception (KeyboardInterrupt) would tear through the sweeper.
        return _without_carets(error) if isinstance(error, Exception) else None

    def _what_in_full(self) -> str:
        if self.recorded is None or self.recorded["status"] != "raised":
            return self._what()
        why = self.recorded["unsendable"]
        reason = f" (the exception itself cannot be sent: {why})" if why else ""
        return f"{self._what()}{reason}\n{self.recorded['traceback'].rstrip()}"


def _without_carets(error: Exception) -> Exception:
    """Forget where in its lines a rebuilt traceback stands: that does not travel, and a printed
    traceback would point at the wrong words.
    """
    for each in related(error):
        BaseException.with_traceback(each, _lines_only(each.__traceback__))
    return error


def _lines_only(trace: types.TracebackType | None) -> types.TracebackType | None:
    steps = []
    while trace is not None:
        steps.append(trace)
        trace = trace.tb_next
    for step in reversed(steps):  # an instruction before the first has no place in its line
        trace = types.TracebackType(trace, step.tb_frame, -1, step.tb_lineno)
    return trace


def describe(state: str, done: dict[str, Any], ended: dict[str, Any] | None) -> str:
    """Say what became of a job that ended without a verdict."""
    if state == "keeper lost":
        how = describe_exit(ended["exit"]) if ended else "was lost"
        return f"the job's keeper process {how}; what it ran has been ended"
    if state == "stopped":
        return f"the job's agent process was stopped by {signal_name(done['signal'])}"
    if state == "stuck":
        pids = ", ".join(map(str, done["pids"]))
        return (
            f"the kernel does not end process {pids}, which waits for a device or a file server "
            "(state D in ps); it is left behind"
        )
    if state == "lost" and done.get("silent_s"):
        return f"the job's agent process did not answer within {done['silent_s']} s and was killed"
    if state == "lost":
        return f"the job's agent process {describe_exit(done['exit'])}"
    return "its ranks did not all finish"
