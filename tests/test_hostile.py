"""No trouble that a script makes hides what happened, or harms another job."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Sweep, processes_with, send

from hydra_torchrun_launcher.job_files import claim_attempt

Run = Callable[..., Sweep]
QUICK = "hydra.launcher.shutdown_timeout=3"

FAILING = {
    "frozen": ("RankFailedError", "raised Frozen: cannot be changed"),
    "chained": ("Holding", "tensor"),
    "noted": ("ValueError", "with notes"),
    "unequal": ("Unequal", "odd"),
    "exit_tensor": ("RankFailedError", "called sys.exit(tensor([1., 1., 1.]))"),
    "no_stderr": ("ValueError", "said nowhere"),
    "closed_stderr": ("ValueError", "said nowhere"),
    "no_open": ("ValueError", "without open"),
    "fatal_reduce": ("RankFailedError", "Fatal: ends its process"),
    "exiting_value": (
        "UnsendableValueError",
        "cannot be rebuilt in the launching process: SystemExit: 9",
    ),
    "interrupting_value": (
        "UnsendableValueError",
        "cannot be rebuilt in the launching process: Keyboard",
    ),
}


@pytest.fixture(scope="module")
def matrix(start_sweep: Run) -> Sweep:
    """Run every trouble, a job each, in one sweep with an ordinary job at its end."""
    return start_sweep("hostile.py", f"fault={','.join([*FAILING, 'none'])}", QUICK).wait()


@pytest.mark.parametrize("fault", FAILING)
def test_cause_is_known(matrix: Sweep, fault: str) -> None:
    """The exception that the task raised is the job's, whatever its methods or the streams do."""
    jobs = matrix.jobs()
    assert len(jobs) == len(FAILING) + 1, matrix.output
    job = jobs[list(FAILING).index(fault)]
    kind, text = FAILING[fault]
    assert (job["status"], job["type"]) == ("FAILED", kind), matrix.output
    assert text in job["text"]


def test_no_trace_of_ours(matrix: Sweep) -> None:
    """The launcher's own code is in no traceback, and the job after all of them completes; the
    script means in a rank what it means where it was started.
    """
    live = matrix.output[: matrix.output.rindex("Error executing job")]
    assert "hydra_torchrun_launcher/" not in live
    assert "in the launching process\n" not in live
    assert matrix.jobs()[-1]["text"] == "found"


@pytest.mark.parametrize("method", ["forkserver", "fork"])
@pytest.mark.parametrize("trouble", ["path", "tee"])
def test_odd_interpreter(sweep: Run, trouble: str, method: str) -> None:
    """Paths that Python ignores, and streams that are less than streams, are no obstacle."""
    setting = f"hydra.launcher.start_method={method}"
    run = sweep("hostile.py", setting, environ={"TROUBLE": trouble}).wait()
    assert [job["status"] for job in run.jobs()] == ["COMPLETED"], run.output
    assert "Traceback" not in run.output


def test_exit_at_import(sweep: Run) -> None:
    """A script that leaves while a rank imports it has not run its task: that is a failure."""
    run = sweep("hostile.py", environ={"TROUBLE": "exit at import"}).wait()
    assert run.status == 1
    assert "the script called sys.exit(7) when the rank imported it" in run.output


def test_killed_rank_is_the_cause(sweep: Run) -> None:
    """A rank that was killed is the cause, and not one of the many that lost it by that."""
    run = sweep("hostile.py", "fault=collective", "who=0,1,2,3", QUICK, nproc=12).wait()
    jobs = run.jobs()
    assert len(jobs) == 4
    for job in jobs:
        assert "rank 1 (local rank 1" in job["text"], run.output
        assert "was killed by SIGKILL" in job["text"]


def test_killed_idle_server(sweep: Run) -> None:
    """A server that died between two jobs is replaced before the next, which then completes."""
    killing = "+hydra.callbacks.killing={_target_: __main__.KillServer}"
    run = sweep("hostile.py", "who=0,1,2", killing).wait()
    assert [job["status"] for job in run.jobs()] == ["COMPLETED"] * 3, run.output


def test_stopped_agent(sweep: Run) -> None:
    """An agent that does not answer when its ranks are done is killed, and its job says so."""
    run = sweep(
        "hostile.py", "fault=await,none", "hydra.launcher.start_method=fork", QUICK,
        environ={"TROUBLE": "impatient"},
    )  # fmt: skip
    run.await_file("0/waiting.*", 2)
    send(run.processes("agent")[0], signal.SIGSTOP)
    (run.directory / "0/go").touch()
    run.wait()
    assert [job["status"] for job in run.jobs()] == ["FAILED", "COMPLETED"], run.output
    assert "agent process did not answer within 2 s and was killed" in run.jobs()[0]["text"]


@pytest.mark.parametrize("how", ["keeper is killed", "second Ctrl-C"])
def test_shared_memory(sweep: Run, how: str) -> None:
    """Shared memory of ranks goes with them, however they end."""
    run = sweep("hostile.py", "fault=shared_memory", "hydra.launcher.shutdown_timeout=1000")
    run.await_file("0/holding.*", 2)
    if how == "keeper is killed":
        send(run.processes("keeper")[0])
    else:
        send(run.popen, signal.SIGINT)
        run.await_text("stopping on SIGINT")
        send(run.popen, signal.SIGINT)
    run.wait()
    assert run.status != 0


def test_nothing_outlives_the_command(sweep: Run) -> None:
    """A signal that the launcher does not handle ends the app, which waits for its ranks."""
    run = sweep(
        "faults.py", "fault=ignores_all", "at_job=0", "hydra.launcher.signals_to_handle=SIGTERM",
        "hydra.launcher.shutdown_timeout=12",
    )  # fmt: skip
    run.await_file("0/ignoring.*", 2)
    send(run.popen, signal.SIGINT)
    run.wait()
    assert run.status != 0
    assert not processes_with(run.marker)


def test_time_limit_without_measure(sweep: Run) -> None:
    """A time limit of a month is one."""
    run = sweep("hostile.py", "hydra.launcher.shutdown_timeout=3000000").wait()
    assert run.status == 0, run.output


def test_directory_that_the_task_removed(sweep: Run) -> None:
    """A task that removes the directory in which the app was started keeps its result."""
    run = sweep("hostile.py", "fault=removes_cwd", "hydra.launcher.redirects='3'", cwd="removed")
    run.wait()
    assert run.status == 0, run.output
    assert [job["status"] for job in run.jobs()] == ["COMPLETED"]


def test_two_sweeps_with_one_folder_for_logs(sweep: Run, tmp_path: Path) -> None:
    """Two sweeps at once mix no files of ranks, though both write to one folder."""
    logs = tmp_path / "logs"
    settings = ("fault=speaks", "hydra.launcher.redirects='1'", f"hydra.launcher.log_dir={logs}")
    first, second = (sweep("hostile.py", f"who={who}", *settings) for who in (1, 2))
    assert (first.wait().status, second.wait().status) == (0, 0), first.output + second.output
    attempts = sorted((logs / "0").iterdir())
    assert [attempt.name for attempt in attempts] == ["attempt_0", "attempt_1"]
    said = [
        [(attempt / f"{rank}/stdout.log").read_text() for rank in (0, 1)] for attempt in attempts
    ]
    assert sorted(said) == [["I am 1 0\n", "I am 1 1\n"], ["I am 2 0\n", "I am 2 1\n"]]


def test_folder_that_another_run_takes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a look at the folders and making one, another run may have made it."""
    (tmp_path / "attempt_0").mkdir()
    monkeypatch.setattr(os, "listdir", lambda _: [])
    assert claim_attempt(tmp_path).name == "attempt_1"


def test_console_that_knows_ascii_only(sweep: Run) -> None:
    """What the console cannot show is escaped."""
    run = sweep("hostile.py", "fault=umlaut", environ={"PYTHONIOENCODING": "ascii"}).wait()
    assert "ValueError: gr\\xf6\\xdfe \\xfc" in run.output
    assert "Logging error" not in run.output


def test_interrupt_while_ranks_are_counted(sweep: Run) -> None:
    """A person's Ctrl-C is told as no error of the job."""
    run = sweep("faults.py", "hydra.launcher.preload=[never_loaded]", nproc=0)
    run.await_file("loading")
    run.await_file("0/.hydra/overrides.yaml")
    send(run.popen, signal.SIGINT)
    assert run.wait().status == -signal.SIGINT
    assert "Job #0 failed" not in run.output
