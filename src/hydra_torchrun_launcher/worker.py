"""The rank: turns a fresh process into the user's program, runs the task function, records how it
ended, and leaves.
"""

from __future__ import annotations

import atexit
import faulthandler
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from hydra_torchrun_launcher import freshness, stacks
from hydra_torchrun_launcher.errors import StartError, refused
from hydra_torchrun_launcher.processes import flush_standard_streams, python_command
from hydra_torchrun_launcher.recording import Ending, Recorder, say
from hydra_torchrun_launcher.wire import Fd, read_document


@dataclass(frozen=True)
class RankStart:
    """What a rank's process is given beyond its plan and its environment."""

    outcome: Fd
    notes: Fd
    stacks: Fd
    stderr_is_a_file: bool


def exec_rank(
    start: RankStart, document: Fd, environ: Mapping[str, str], path: list[str]
) -> NoReturn:
    """Replace this process by a new interpreter that becomes the rank (start method spawn)."""
    fds = (*(fd.fileno() for fd in (start.outcome, start.notes, start.stacks)), document.fileno())
    for fd in fds:
        os.set_inheritable(fd, True)
    arguments = (*fds, start.stderr_is_a_file)
    command = python_command(path, "hydra_torchrun_launcher.worker", "main", *arguments)
    os.execve(command[0], command, dict(environ))  # noqa: S606 - our own interpreter


def main(
    outcome: int,
    notes: int,
    stacks: int,
    document: int,
    stderr_is_a_file: bool,  # noqa: FBT001
) -> NoReturn:
    """Be a rank that is an interpreter of its own."""
    for fd in (outcome, notes, stacks):
        os.set_inheritable(fd, False)
    plan, body = read_document(document)
    os.close(document)
    start = RankStart(Fd(outcome), Fd(notes), Fd(stacks), stderr_is_a_file)
    run(start, plan["program"], body)


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
    code = 1
    try:
        freshness.restore()
        faulthandler.enable()
        stacks.dump_to(start.stacks)
        recorder = Recorder(start.outcome, start.notes, stderr_is_a_file=start.stderr_is_a_file)
        ending = _run(program, body) if problem is None else _refused(problem)
        code = recorder.record(ending)
    except BaseException:  # noqa: BLE001 - the outcome could not be recorded
        say(traceback.format_exc())
    _leave(code)


def _refused(problem: Exception) -> Ending:
    error = StartError(refused(problem)) if isinstance(problem, OSError) else problem
    return Ending(error=error, exit_code=1)


def _run(program: dict[str, Any], body: bytes) -> Ending:
    from hydra_torchrun_launcher import payload, rank_logging

    try:
        inherited = freshness.inherited
        if inherited is None:
            _import_script(payload.Program(**program))
        work: payload.Work = inherited.work if inherited else pickle.loads(body)  # noqa: S301
        payload.restore(work)
        rank = (int(os.environ["RANK"]), work.label)
        rank_logging.configure(work.hydra_config, rank, work.execution_whitelist)
        with rank_logging.execution_whitelist(work.execution_whitelist):
            return Ending(value=work.task(work.config))
    except SystemExit as leaving:
        return _left(leaving)
    except BaseException as error:  # noqa: BLE001 - recorded
        return Ending(error=error, exit_code=1)


def _import_script(program: Any) -> None:
    try:
        program.enter()
    except SystemExit as leaving:
        problem = (
            f"the script called sys.exit({leaving.code!r}) when the rank imported it, before the "
            "task function could run; put what is only for the start under "
            "if __name__ == '__main__'"
        )
        raise StartError(problem) from None


def _left(leaving: SystemExit) -> Ending:
    """Take sys.exit as the interpreter takes it."""
    code = leaving.code
    if code is None or (isinstance(code, int) and code == 0):
        return Ending()
    if isinstance(code, int):
        return Ending(error=leaving, exit_code=code & 0xFF)  # as the kernel does
    with suppress(Exception):
        print(code, file=sys.stderr)  # noqa: T201 - as the interpreter does
    return Ending(error=leaving, exit_code=1)


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
