"""How a rank ended: written down by the rank, noticed by its keeper.

Whatever the task function left behind (exceptions whose methods raise, closed streams, changed
variables) must not hide it: no object of the user's is touched here without a net.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hydra_torchrun_launcher.errors import UnsendableValueError, printable, related
from hydra_torchrun_launcher.wire import Fd, write_document

_NOTE = struct.Struct("<iii")
_COMPLETED, _FAILED = 1, 2
_CLOSED = (
    "The task function closed descriptors that it did not open (os.closerange?), the launcher's "
    "among them: its outcome cannot be recorded.\n"
)


@dataclass(frozen=True)
class Note:
    """A rank's word that its outcome is recorded: smaller than PIPE_BUF, so written whole."""

    pid: int
    status: str
    exit_code: int


def read_notes(pipe: Fd) -> Iterator[Note]:
    """Return the notes that lie in the pipe, in the order of writing."""
    os.set_blocking(pipe.fileno(), False)
    while True:
        try:
            data = os.read(pipe.fileno(), _NOTE.size)
        except BlockingIOError:
            return
        if len(data) < _NOTE.size:
            return
        pid, status, code = _NOTE.unpack(data)
        yield Note(pid, "completed" if status == _COMPLETED else "failed", code)


@dataclass
class Ending:
    """How the task function ended.

    Attributes:
        value: what it returned.
        error: what it raised, or why it was not called.
        exit_code: the status with which the rank leaves.
    """

    value: Any = None
    error: BaseException | None = None
    exit_code: int = 0


class Recorder:
    """Writes a rank's outcome into its anonymous file and says so to the keeper."""

    def __init__(self, outcome: Fd, notes: Fd, *, stderr_is_a_file: bool) -> None:
        """Note what the rank is and was given, before the user's code can change it.

        Args:
            outcome: where the outcome goes.
            notes: the pipe to the keeper.
            stderr_is_a_file: whether a traceback is to be written there; on the console the
                launching process shows it.
        """
        self._outcome = outcome
        self._notes = notes
        self._stderr_is_a_file = stderr_is_a_file
        self._pid = os.getpid()
        self._is_first = os.environ["RANK"] == "0"
        self._error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._files = self._what_is_open()

    def record(self, ending: Ending) -> int:
        """Record the ending; return the status with which to leave."""
        if os.getpid() != self._pid:
            return ending.exit_code  # a child that the task forked may come back from it too
        if self._what_is_open() != self._files:
            # Their numbers may stand for files of the user's by now: write to none of them.
            say(_CLOSED if ending.error is None else _traceback(ending.error) + _CLOSED)
            return 1
        body = b""
        if ending.error is None and self._is_first:
            try:
                body = _pickle_value(ending.value)
            except BaseException as error:  # noqa: BLE001 - any type may raise anything here
                ending = Ending(error=_unsendable(ending.value, error), exit_code=1)
        if ending.error is None:
            write_document(self._outcome.fileno(), {"status": "completed"}, body)
            self._note(_COMPLETED, ending.exit_code)
        else:
            self._record_error(ending.error)
            self._note(_FAILED, ending.exit_code)
        return ending.exit_code

    def _record_error(self, error: BaseException) -> None:
        """Write what is text first: pickling runs the user's code, which may end the process."""
        header = describe(error)
        fd = self._outcome.fileno()
        write_document(fd, {**header, "unsendable": "its process ended when it was pickled"})
        write_error_file(header, self._error_file)
        if self._stderr_is_a_file:
            say(header["traceback"])
        try:
            write_document(fd, header, _pickle_error(error))
        except BaseException as problem:  # noqa: BLE001
            write_document(fd, {**header, "unsendable": _in_a_line(problem)})

    def _note(self, status: int, exit_code: int) -> None:
        os.write(self._notes.fileno(), _NOTE.pack(self._pid, status, exit_code))

    def _what_is_open(self) -> list[tuple[int, int] | None]:
        return [_file(fd.fileno()) for fd in (self._outcome, self._notes)]


def _file(number: int) -> tuple[int, int] | None:
    """Tell which file a descriptor is open on, or None."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def say(text: str) -> None:
    """Write to standard error, whatever has become of sys.stderr."""
    with contextlib.suppress(BaseException):
        sys.stderr.flush()
    data = text.encode("utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(2, data) :]


def _guarded(make: Callable[[], str], what: str) -> str:
    try:
        return printable(make())
    except BaseException as problem:  # noqa: BLE001 - a user's method may raise anything
        return f"<{what} cannot be shown: {type(problem).__name__}>"


def _in_a_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {_guarded(lambda: str(error), 'its text')}"


def _traceback(error: BaseException) -> str:
    def text() -> str:
        return "".join(traceback.format_exception(type(error), error, error.__traceback__))

    # The script's own classes are shown as they are called where it is the main module.
    return _guarded(text, "its traceback").replace("__mp_main__.", "").rstrip("\n") + "\n"


def describe(error: BaseException) -> dict[str, Any]:
    """Return what can be said of an exception, as plain data."""
    drop_own_frames(error)
    return {
        "status": "exit" if isinstance(error, SystemExit) else "raised",
        "type": type(error).__qualname__,
        "message": _guarded(lambda: str(error), "its text"),
        "traceback": _traceback(error),
        "unsendable": None,
    }


def drop_own_frames(error: BaseException) -> None:
    """Let an exception's traceback begin in the user's code."""
    ours = os.path.dirname(__file__) + os.sep
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    if trace is not None:
        BaseException.with_traceback(error, trace)  # a class may forbid to set attributes


def _unsendable(value: Any, error: BaseException) -> UnsendableValueError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsendableValueError(
        f"The task function's return value, of type {kind}, cannot be pickled "
        f"({_in_a_line(error)}). Return plain data, such as a number or a dict."
    )


def _pickle_value(value: Any) -> bytes:
    from hydra_torchrun_launcher import pickling

    return pickling.dumps(_on_cpu(value))


def _on_cpu(value: Any) -> Any:
    """Take a tensor off its accelerator, which the launching process must not touch."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return value.detach().cpu()
    return value


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an exception with its traceback, causes and notes; check that it can be rebuilt."""
    from tblib import pickling_support

    from hydra_torchrun_launcher import pickling

    pickling_support.install(error)  # this process does nothing else any more
    try:
        body = pickling.dumps(error)
    except (RecursionError, pickle.PicklingError):
        for each in related(error):  # pickled frame by frame: some hundred are too many
            BaseException.with_traceback(each, None)
        body = pickling.dumps(error)
    rebuilt = pickle.loads(body)  # noqa: S301 - our own
    if type(rebuilt) is not type(error):
        problem = f"it comes back as {type(rebuilt).__qualname__}"
        raise TypeError(problem)
    return body


def write_error_file(header: dict[str, Any], name: str) -> None:
    """Write torchrun's error file, for people and for tools that read it."""
    if not name:
        return
    info = {"py_callstack": header["traceback"], "timestamp": str(int(time.time()))}
    message = {"message": f"{header['type']}: {header['message']}", "extraInfo": info}
    try:
        with open(name + ".tmp", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"message": message}, file)
        os.replace(name + ".tmp", name)
    except Exception as error:  # noqa: BLE001 - a full disk, or a task that replaced open
        say(f"{name}: {_in_a_line(error)}\n")
