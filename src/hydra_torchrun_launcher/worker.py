"""The rank: turns a fresh process into the user's program, runs the task function, records how it
ended, and leaves.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import pickle
import struct
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from hydra_torchrun_launcher import freshness
from hydra_torchrun_launcher.errors import StartError, UnsendableValueError, printable, refused
from hydra_torchrun_launcher.processes import flush_standard_streams, python_command
from hydra_torchrun_launcher.wire import Fd, read_document, write_document

_NOTE = struct.Struct("<iii")
_COMPLETED, _FAILED = 1, 2


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


@dataclass(frozen=True)
class RankStart:
    """What a rank's process is given beyond its plan and its environment."""

    outcome: Fd
    notes: Fd
    stderr_is_a_file: bool


def exec_rank(
    start: RankStart, document: Fd, environ: Mapping[str, str], path: list[str]
) -> NoReturn:
    """Replace this process by a new interpreter that becomes the rank (start method spawn)."""
    fds = (start.outcome.fileno(), start.notes.fileno(), document.fileno())
    for fd in fds:
        os.set_inheritable(fd, True)
    arguments = (*fds, start.stderr_is_a_file)
    command = python_command(path, "hydra_torchrun_launcher.worker", "main", *arguments)
    os.execve(command[0], command, dict(environ))  # noqa: S606 - our own interpreter


def main(outcome: int, notes: int, document: int, stderr_is_a_file: bool) -> NoReturn:  # noqa: FBT001
    """Be a rank that is an interpreter of its own."""
    for fd in (outcome, notes):
        os.set_inheritable(fd, False)
    plan, body = read_document(document)
    os.close(document)
    run(RankStart(Fd(outcome), Fd(notes), stderr_is_a_file), plan["program"], body)


def run(
    start: RankStart, program: dict[str, Any], body: bytes, problem: Exception | None = None
) -> NoReturn:
    """Become the rank: environment, descriptors and directory are set, all else is done here.

    Args:
        start: where its outcome goes.
        program: the user's program, as plain data.
        body: the pickled work.
        problem: why environment, descriptors or directory could not be set.
    """
    freshness.restore()
    faulthandler.enable()
    me = _Identity.of(start)
    code = 1
    try:
        ending = _run(program, body) if problem is None else _refused(problem)
        # A child that the task forked may come back from it too: only the rank has an outcome.
        code = _record(start, me, ending) if os.getpid() == me.pid else ending.exit_code
    except BaseException:  # noqa: BLE001 - the outcome could not be recorded
        traceback.print_exc()
    _leave(code)


@dataclass(frozen=True)
class _Identity:
    """What the rank is and was given, noted before the user's code can change it."""

    pid: int
    global_rank: str
    error_file: str
    files: tuple[tuple[int, int] | None, ...]

    @classmethod
    def of(cls, start: RankStart) -> _Identity:
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        return cls(os.getpid(), os.environ["RANK"], error_file, _files(start))


def _files(start: RankStart) -> tuple[tuple[int, int] | None, ...]:
    return tuple(_file(fd.fileno()) for fd in (start.outcome, start.notes))


def _file(number: int) -> tuple[int, int] | None:
    """Tell which file a descriptor is open on, or None."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@dataclass
class _Ending:
    value: Any = None
    error: BaseException | None = None
    exit_code: int = 0


def _refused(problem: Exception) -> _Ending:
    error = StartError(refused(problem)) if isinstance(problem, OSError) else problem
    return _Ending(error=error, exit_code=1)


def _run(program: dict[str, Any], body: bytes) -> _Ending:
    from hydra_torchrun_launcher import payload, rank_logging

    try:
        inherited = freshness.inherited
        if inherited is None:
            payload.Program(**program).enter()
        work: payload.Work = inherited.work if inherited else pickle.loads(body)  # noqa: S301
        payload.restore(work)
        rank_logging.configure(work, int(os.environ["RANK"]))
        with rank_logging.execution_whitelist(work.execution_whitelist):
            return _Ending(value=work.task(work.config))
    except SystemExit as leaving:
        if leaving.code is None or leaving.code == 0:
            return _Ending()
        if not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)  # noqa: T201 - as the interpreter does
        code = leaving.code & 0xFF if isinstance(leaving.code, int) else 1  # as the kernel does
        return _Ending(error=leaving, exit_code=code)
    except BaseException as error:  # noqa: BLE001 - recorded
        return _Ending(error=error, exit_code=1)


def _record(start: RankStart, me: _Identity, ending: _Ending) -> int:
    """Write the outcome for the launching process, then say that it is there."""
    if _files(start) != me.files:
        # Their numbers may stand for files of the user's by now: write to none of them.
        if ending.error is not None:
            traceback.print_exception(ending.error)
        print(  # noqa: T201 - there is no other way left to say it
            "The task function closed descriptors that it did not open (os.closerange?), the "
            "launcher's among them: its outcome cannot be recorded.",
            file=sys.stderr,
        )
        return 1
    body = b""
    if ending.error is None and me.global_rank == "0":
        try:
            body = _pickle_value(ending.value)
        except Exception as error:  # noqa: BLE001 - any type may raise anything here
            ending = _Ending(error=_unsendable(ending.value, error), exit_code=1)
    header: dict[str, Any] = {"status": "completed"}
    if ending.error is not None:
        header, body = _describe(ending)
        _write_error_file(header, me.error_file)
        if start.stderr_is_a_file:  # on the console the launching process says it
            sys.stderr.write(header["traceback"])
    write_document(start.outcome.fileno(), header, body)
    status = _COMPLETED if ending.error is None else _FAILED
    os.write(start.notes.fileno(), _NOTE.pack(os.getpid(), status, ending.exit_code))
    return ending.exit_code


def _unsendable(value: Any, error: Exception) -> UnsendableValueError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return UnsendableValueError(
        f"The task function's return value, of type {kind}, cannot be pickled "
        f"({type(error).__name__}: {error}). Return plain data, such as a number or a dict."
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


def _describe(ending: _Ending) -> tuple[dict[str, Any], bytes]:
    error = ending.error
    assert error is not None  # noqa: S101 - the caller's condition
    _drop_own_frames(error)
    # The script's own classes are shown as they are called where it is the main module.
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    text = printable(text).replace("__mp_main__.", "")
    header = {
        "status": "exit" if isinstance(error, SystemExit) else "raised",
        "type": type(error).__qualname__,
        "message": _text(error),
        "traceback": text,
        "unsendable": None,
    }
    try:
        body = _pickle_error(error)
    except Exception as problem:  # noqa: BLE001
        header["unsendable"] = f"{type(problem).__name__}: {problem}"
        return header, b""
    return header, body


def _text(error: BaseException) -> str:
    try:
        return printable(str(error))
    except Exception as problem:  # noqa: BLE001 - a user's __str__ may raise
        return f"<its text cannot be shown: {type(problem).__name__}>"


def _drop_own_frames(error: BaseException) -> None:
    ours = os.path.dirname(__file__) + os.sep
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    if trace is not None:
        error.__traceback__ = trace


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an exception with its traceback, causes and notes; check that it can be rebuilt."""
    from tblib import pickling_support

    from hydra_torchrun_launcher import pickling

    pickling_support.install(error)  # this process does nothing else any more
    try:
        body = pickling.dumps(error)
    except (RecursionError, pickle.PicklingError):
        _drop_tracebacks(error)  # pickled frame by frame: some hundred are too many
        body = pickling.dumps(error)
    rebuilt = pickle.loads(body)  # noqa: S301 - our own
    if type(rebuilt) is not type(error):
        problem = f"it comes back as {type(rebuilt).__qualname__}"
        raise TypeError(problem)
    return body


def _drop_tracebacks(error: BaseException) -> None:
    """Keep an exception and its causes without their frames, which stand in its text."""
    seen: list[BaseException] = []
    while error not in seen:
        seen.append(error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__ or error


def _write_error_file(header: dict[str, Any], name: str) -> None:
    """Write torchrun's error file, for people and for tools that read it."""
    if not name:
        return
    info = {"py_callstack": header["traceback"], "timestamp": str(int(time.time()))}
    message = {"message": f"{header['type']}: {header['message']}", "extraInfo": info}
    try:
        with open(name + ".tmp", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"message": message}, file)
        os.replace(name + ".tmp", name)
    except OSError as error:
        sys.stderr.write(f"{name}: {error}\n")


def _leave(code: int) -> NoReturn:
    """Do what the interpreter does at its end, up to the destruction of objects.

    That last part is where a rank that raised hangs while its process group is torn down.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined] # noqa: SLF001 - joins non-daemon threads
        atexit._run_exitfuncs()  # noqa: SLF001 - no public way to run them and then leave hard
        flush_standard_streams()
    finally:
        os._exit(code)
