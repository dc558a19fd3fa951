"""The fault matrix: however a process of a job ends, the job ends in bounded time, its cause is
named, the other jobs keep their results, and nothing is left.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from conftest import APPS, HANG_S, Sweep, send

Run = Callable[..., Sweep]
THREE_JOBS = "point=0,1,2"
QUICK = "hydra.launcher.shutdown_timeout=3"

FAILING = {
    "raise": ("ScriptError", "raised on purpose"),
    "surrogate": ("ScriptError", "lone \udc80"),
    "chained": ("ScriptError", "the second"),
    "raise_in_collective": ("ScriptError", "raised while the others wait"),
    "raise_and_hang_at_exit": ("ScriptError", "raised before it hangs"),
    "stubborn_child": ("ScriptError", "leaves a stubborn child"),
    "ignores_sigterm": ("ScriptError", "the other rank ignores SIGTERM"),
    "unpicklable_error": ("RankFailedError", "raised Unpicklable: holds a lock"),
    "unbuildable_error": ("RankFailedError", "raised Unbuildable: one and two"),
    "changing_error": ("RankFailedError", "raised Changeling: the original"),
    "raises_on_sigterm": ("ScriptError", "the first"),
    "keyboard_interrupt": ("RankFailedError", "KeyboardInterrupt"),
    "deep": ("ScriptError", "far down"),
    "sys_exit_large": ("RankFailedError", "sys.exit(1099511627781)"),
    "sys_exit_3": ("RankFailedError", "sys.exit(3)"),
    "sys_exit_text": ("RankFailedError", "a farewell"),
    "os_exit_0": ("RankFailedError", "left with status 0 without finishing"),
    "os_exit_7": ("RankFailedError", "left with status 7"),
    "abort": ("RankFailedError", "SIGABRT"),
    "SIGKILL": ("RankFailedError", "SIGKILL (often"),
    "SIGSEGV": ("RankFailedError", "SIGSEGV"),
    "crash_at_exit": (
        "RankFailedError",
        "finished the task function and then was killed by SIGSEGV",
    ),
}
FINE = ("none", "sys_exit_0", "hang_at_exit", "child")


@pytest.fixture(scope="module")
def matrix(start_sweep: Run) -> Sweep:
    """Run every fault of rank 1, a job each, in one sweep; jobs without a fault lie between."""
    faults = [fault for failing in FAILING for fault in (failing, "none")]
    points = ",".join([*faults, *FINE[1:]])
    return start_sweep("faults.py", f"fault={points}", "at_rank=1", "at_job=all", QUICK).wait()


def result(run: Sweep, fault: str) -> dict[str, object]:
    faults = [each for failing in FAILING for each in (failing, "none")] + list(FINE[1:])
    jobs = run.jobs()
    assert [job["number"] for job in jobs] == list(range(len(faults))), run.output
    return jobs[faults.index(fault)]


@pytest.mark.hydra_versions
@pytest.mark.parametrize("fault", FAILING)
def test_failing_rank(matrix: Sweep, fault: str) -> None:
    """A rank that fails fails its job, and its own cause and place are said."""
    job = result(matrix, fault)
    kind, named = FAILING[fault]
    assert (job["status"], job["type"]) == ("FAILED", kind), matrix.output
    assert named in str(job["text"])
    place = str(job["text"]) + str(job["notes"])
    failed_rank = 0 if fault == "ignores_sigterm" else 1
    if sys.version_info >= (3, 11) or kind == "RankFailedError":
        assert f"rank {failed_rank} (local rank {failed_rank} on" in place
        assert "attempt 0)" in place
        assert "log: /" in place
    console = [
        line for line in matrix.output.splitlines() if f"Job #{job['number']} failed: rank" in line
    ]
    assert len(console) == 1


@pytest.mark.hydra_versions
def test_other_jobs_keep_their_results(matrix: Sweep) -> None:
    """Jobs after a failed one run, and all results stand in their place."""
    jobs = matrix.jobs()
    assert len(jobs) == 2 * len(FAILING) + 3, matrix.output
    assert [job["text"] for job in jobs[1 : 2 * len(FAILING) : 2]] == ["42"] * len(FAILING)
    assert matrix.status == 1


@pytest.mark.hydra_versions
@pytest.mark.parametrize("fault", FINE)
def test_rank_that_is_no_failure(matrix: Sweep, fault: str) -> None:
    """`sys.exit(0)` in a rank, a hang in its exit and a child left behind fail nothing."""
    job = result(matrix, fault)
    assert (job["status"], job["text"]) == ("COMPLETED", "42")


def test_rank_that_hangs_at_exit_is_named(matrix: Sweep) -> None:
    """A rank that returned and then hangs is ended, with a warning that names it."""
    number = result(matrix, "hang_at_exit")["number"]
    assert f"Job #{number}: rank 1 returned but did not leave in time" in matrix.output


@pytest.mark.hydra_versions
def test_exception_keeps_its_traceback(matrix: Sweep) -> None:
    """An exception comes back with the rank's own frames; the job's log has it and its cause."""
    job = result(matrix, "chained")
    assert any(frame.startswith("fail:") for frame in job["frames"])
    job_log = (matrix.directory / str(job["number"]) / "faults.log").read_text()
    assert "KeyError: 'the first'" in job_log
    assert "ScriptError: the second" in job_log


@pytest.mark.hydra_versions
def test_log_with_what_cannot_be_encoded(matrix: Sweep) -> None:
    """A message that no stream can encode is escaped, on the console and in the job's log."""
    job = result(matrix, "surrogate")
    job_log = (matrix.directory / str(job["number"]) / "faults.log").read_text()
    assert f"Job #{job['number']} failed" in job_log
    assert "ScriptError: lone \\udc80" in job_log
    assert "ScriptError: lone \\udc80" in matrix.output
    assert "Logging error" not in matrix.output


def test_rank_that_fails_because_it_was_stopped_is_no_failure(matrix: Sweep) -> None:
    """How a rank answers the end of its job is not told as a failure of its own."""
    job = result(matrix, "raises_on_sigterm")
    assert "also failed" not in str(job["notes"])
    assert "raised when it was told to leave" not in matrix.output


@pytest.mark.hydra_versions
def test_final_traceback_points_at_no_wrong_word(matrix: Sweep) -> None:
    """The traceback that Hydra prints at the end has lines and no marks under them; the one of the
    rank itself, printed when it failed, has Python's own.
    """
    final = matrix.output[matrix.output.rindex("Error executing job") :]
    lines = final.splitlines()
    number = lines.index('    raise ScriptError("raised on purpose")')
    assert "^^^" not in lines[number + 1]


def assert_only_job_1_failed(run: Sweep) -> dict[str, object]:
    jobs = run.jobs()
    assert [job["status"] for job in jobs] == ["COMPLETED", "FAILED", "COMPLETED"], run.output
    assert [job["text"] for job in jobs[::2]] == ["42", "42"]
    assert run.status == 1, run.output
    return jobs[1]


@pytest.mark.hydra_versions
def test_values_of_rank_0(sweep: Run) -> None:
    """Rank 0's value comes back as it is, or its job says which type cannot be sent; the rank that
    raised is the cause, not the one that lost its connection by it.
    """
    faults = "sys_exit_0,tensor,not_a_number,large,unpicklable_value,raise_in_collective"
    run = sweep("faults.py", f"fault={faults}", "at_rank=0", "at_job=all", QUICK).wait()
    nothing, tensor, number, large, lock, collective = run.jobs()
    assert (nothing["type"], nothing["status"]) == ("NoneType", "COMPLETED"), run.output
    assert (tensor["type"], tensor["text"]) == ("Tensor", "tensor([0, 1, 2])")
    assert (number["type"], number["text"]) == ("float", "nan")
    assert large["size"] == 200_000_000
    assert (lock["status"], lock["type"]) == ("FAILED", "UnsendableValueError")
    assert "of type _thread.lock" in str(lock["text"])
    assert "raised while the others wait" in str(collective["text"])


def test_ranks_that_disturb_the_launcher(sweep: Run) -> None:
    """Files of the user's are never written to, a forked child's value is not the rank's, and
    changed variables or a signal without a name lose no result.
    """
    faults = "closes_descriptors,none,forked_child,clears_environment,real_time_signal,none"
    run = sweep("faults.py", f"fault={faults}", "at_rank=0", "at_job=all", QUICK).wait()
    states = [(job["status"], job["text"]) for job in run.jobs()]
    assert states[0][0] == "FAILED", run.output
    assert "closed descriptors that it did not open" in run.output
    files = list(run.directory.glob("precious*"))
    assert {file.read_text() for file in files} == {"the user's"}
    assert len(files) == 20
    assert states[1:4] == [("COMPLETED", "42")] * 3
    assert states[4][0] == "FAILED"
    assert "was killed by signal 40" in states[4][1]
    assert states[5] == ("COMPLETED", "42")


def test_app_started_with_signals_blocked(sweep: Run) -> None:
    """Signals that were blocked when the app was started hide no end of a process."""
    blocked = {signal.SIGCHLD, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        run = sweep("faults.py", "fault=raise", THREE_JOBS, QUICK)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert_only_job_1_failed(run.wait())


@pytest.mark.hydra_versions
@pytest.mark.parametrize("kind", ["agent", "keeper"])
def test_killed_process_of_a_job(sweep: Run, kind: str) -> None:
    """When the agent or the keeper of a job is killed, that job fails and names it."""
    run = sweep("faults.py", "fault=wait", THREE_JOBS, QUICK)
    run.await_file("1/started.*", 2)
    send(run.processes(kind)[0])
    job = assert_only_job_1_failed(run.wait())
    assert f"{kind} process" in str(job["text"])
    assert "SIGKILL" in str(job["text"])


def test_killed_server(sweep: Run) -> None:
    """When the server is killed, its running job goes on, and the next one gets another server."""
    run = sweep("faults.py", "fault=ignores_sigterm", THREE_JOBS, QUICK, "at_job=0", "at_rank=0")
    run.await_file("0/ignoring.*", 1)
    send(run.processes("server")[0])
    run.wait()
    jobs = run.jobs()
    assert [job["status"] for job in jobs] == ["FAILED", "COMPLETED", "COMPLETED"], run.output
    assert jobs[0]["type"] == "ScriptError"


def test_killed_launching_process(sweep: Run) -> None:
    """When the launching process is killed, everything it started ends by itself."""
    run = sweep("faults.py", "fault=wait", THREE_JOBS, QUICK)
    run.await_file("1/started.*", 2)
    send(run.popen)
    assert run.wait().status == -signal.SIGKILL
    assert len(run.jobs()) == 1


@pytest.mark.hydra_versions
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_job_and_sweep(sweep: Run, signum: int) -> None:
    """A signal in job 2 of 5 ends it as failed, callbacks included, and the rest of the sweep; the
    process dies by that signal.
    """
    patient = "hydra.launcher.shutdown_timeout=1000"  # ranks that obey need none of it
    run = sweep("faults.py", "fault=wait", "point=0,1,2,3,4", patient)
    run.await_file("1/started.*", 2)
    send(run.popen, signum)
    assert run.wait().status == -signum, run.output
    jobs = run.jobs()
    assert [job["status"] for job in jobs] == ["COMPLETED", "FAILED"], run.output
    assert signal.Signals(signum).name in jobs[1]["text"]
    assert "Job #1 failed" not in run.output
    assert "death signal" not in run.output
    assert not (run.directory / "2").exists()


def test_second_signal_kills(sweep: Run) -> None:
    """A second Ctrl-C does not wait for ranks that ignore the first."""
    run = sweep(
        "faults.py", "fault=ignores_all", THREE_JOBS, "hydra.launcher.shutdown_timeout=1000"
    )
    run.await_file("1/ignoring.*", 2)
    send(run.popen, signal.SIGINT)
    run.await_text("stopping on SIGINT")
    send(run.popen, signal.SIGINT)
    assert run.wait().status == -signal.SIGINT, run.output
    assert "its keeper does not answer" not in run.output


def test_stubborn_ranks_are_killed(sweep: Run) -> None:
    """Ranks that ignore the signal are killed after `shutdown_timeout`."""
    run = sweep("faults.py", "fault=ignores_all", THREE_JOBS, QUICK)
    run.await_file("1/ignoring.*", 2)
    send(run.popen, signal.SIGTERM)
    assert run.wait().status == -signal.SIGTERM, run.output


def test_ignored_hangup_stays_ignored(sweep: Run) -> None:
    """Under nohup a hang-up stops nothing."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = sweep("faults.py", "fault=ignores_sigterm", THREE_JOBS, QUICK)
    finally:
        signal.signal(signal.SIGHUP, before)
    run.await_file("0/started.*", 2)
    send(run.popen, signal.SIGHUP)
    assert len(run.wait().jobs()) == 3, run.output


def test_orphans_of_keeper_without_server(sweep: Run) -> None:
    """With server and keeper killed, the kernel ends agent and ranks."""
    run = sweep("faults.py", "fault=wait", THREE_JOBS, QUICK)
    run.await_file("1/started.*", 2)
    keeper = run.processes("keeper")[0]
    send(run.processes("server")[0])
    send(keeper)
    assert_only_job_1_failed(run.wait())


def test_killed_keeper_leaves_no_grandchild(sweep: Run) -> None:
    """What ranks had started is ended with them when their keeper is killed."""
    run = sweep("faults.py", "fault=wait_with_child", THREE_JOBS, QUICK)
    run.await_file("1/started.*", 2)
    run.await_file("1/child.*", 2)
    send(run.processes("keeper")[0])
    assert_only_job_1_failed(run.wait())


def test_launching_process_killed_early(sweep: Run) -> None:
    """A server that is still importing ends with the launching process."""
    run = sweep("faults.py", "hydra.launcher.preload=[never_loaded]")
    run.await_file("loading")
    send(run.popen)
    run.wait()


@pytest.mark.parametrize("nproc", ["2", "auto"])
def test_interrupt_while_the_server_starts(sweep: Run, nproc: str) -> None:
    """Ctrl-C works while torch is imported, also where the ranks wait to be counted."""
    run = sweep(
        "faults.py",
        "hydra.launcher.preload=[never_loaded]",
        f"hydra.launcher.nproc_per_node={nproc}",
        nproc=0,
    )
    run.await_text("#0 : ")
    run.await_file("loading")
    run.await_file("0/.hydra/overrides.yaml")
    send(run.popen, signal.SIGINT)
    assert run.wait().status == -signal.SIGINT, run.output


def test_terminal_interrupt_reaches_one_process(sweep: Run) -> None:
    """A terminal's Ctrl-C, which goes to the whole process group, is answered once, by us."""
    run = sweep("faults.py", "fault=wait", THREE_JOBS, QUICK)
    run.await_file("1/started.*", 2)
    os.killpg(run.popen.pid, signal.SIGINT)
    assert run.wait().status == -signal.SIGINT, run.output
    assert "server.py" not in run.output
    assert "JobStoppedError" in [job["type"] for job in run.jobs()]


def test_store_is_on_loopback_only(sweep: Run) -> None:
    """The only port that a job opens cannot be reached from another machine."""
    run = sweep("faults.py", "fault=wait", "at_job=0", QUICK)
    run.await_file("0/started.*", 2)
    agent = run.processes("agent")[0]
    ports = [c.laddr.ip for c in agent.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    send(run.popen, signal.SIGTERM)
    run.wait()
    assert ports == ["127.0.0.1"]


@pytest.mark.hydra_versions
def test_last_attempt_is_the_cause(sweep: Run) -> None:
    """A job that fails for good names its last attempt; earlier ones are said as restarts."""
    run = sweep(
        "faults.py", "fault=raise", "at_job=0", QUICK, "hydra.launcher.max_restarts=1"
    ).wait()
    (job,) = run.jobs()
    assert "attempt 0 failed, its ranks start again (restart 1 of 1)" in run.output
    assert run.output.count("Job #0 failed: ") == 1
    failed = next(line for line in run.output.splitlines() if "Job #0 failed: " in line)
    assert "attempt 1) raised" in failed
    assert "ranks/attempt_1/1/stderr.log" in run.output
    job_log = (run.directory / "0/faults.log").read_text()
    assert "Job #0: attempt 0 failed, its ranks start again (restart 1 of 1)" in job_log
    assert "Job #0 failed" in job_log
    assert job["status"] == "FAILED"


@pytest.mark.parametrize("kind", ["keeper", "server"])
def test_stopped_process_is_no_obstacle(sweep: Run, kind: str) -> None:
    """A keeper or server that is stopped (SIGSTOP) cannot keep Ctrl-C from ending everything."""
    run = sweep("faults.py", "fault=wait", THREE_JOBS, QUICK)
    run.await_file("1/started.*", 2)
    send(run.processes(kind)[0], signal.SIGSTOP)
    send(run.popen, signal.SIGINT)
    run.await_text("stopping on SIGINT")
    send(run.popen, signal.SIGINT)
    assert run.wait().status == -signal.SIGINT, run.output
    assert [job["status"] for job in run.jobs()] == ["COMPLETED", "FAILED"]


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_closed_standard_streams(tmp_path: Path, closed: str, method: str) -> None:
    """An app whose standard streams are closed runs as one whose streams are the null device."""
    app = f"{sys.executable} {APPS / 'faults.py'} -m hydra/launcher=torchrun"
    settings = f"hydra.launcher.nproc_per_node=2 hydra.launcher.start_method={method}"
    command = f"{app} {settings} hydra.sweep.dir={tmp_path} {closed}"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, timeout=HANG_S, capture_output=True, check=False
    )
    assert done.returncode == 0, done
    (record,) = (tmp_path / "job_end.jsonl").read_text().splitlines()
    assert json.loads(record)["text"] == "42"
    assert b"Traceback" not in done.stdout + done.stderr
