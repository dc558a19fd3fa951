"""What the operating system refuses, does not end or shares with strangers harms only its job."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import psutil
import pytest
from conftest import Sweep, leftovers, send

Run = Callable[..., Sweep]
FORKING = "+hydra.callbacks.forking={_target_: forking.Forking}"
FORK = "hydra.launcher.start_method=fork"


def ended(run: Sweep, pid: int) -> None:
    """End the child that the app's callback forked, as its owner would."""
    child = psutil.Process(pid)
    child.terminate()
    child.wait(10)
    assert not leftovers(run.marker)


def forked(run: Sweep) -> int:
    return int(run.await_file("forked.*")[0].suffix[1:])


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_child_of_a_callback_outlives_a_sweep(sweep: Run, method: str) -> None:
    """A process that a callback forks keeps no process of ours alive, and obeys its own signals."""
    run = sweep("faults.py", "point=0,1", FORKING, f"hydra.launcher.start_method={method}")
    run.await_text("#1 : ")
    child = forked(run)
    run.wait()
    assert run.status == 0, run.output
    assert len(leftovers(run.marker)) == 1
    ended(run, child)


def test_child_of_a_callback_hides_no_death(sweep: Run) -> None:
    """When the launching process is killed, all but the callback's child ends, a job included that
    ran when the callback forked.
    """
    run = sweep("faults.py", "fault=wait", "at_job=all", "point=0,1", FORKING[:-1] + ", at: 1}",
                "hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1,2,3]")  # fmt: skip
    run.await_file("[01]/started.*", 4)
    child = forked(run)
    send(run.popen)
    run.wait()
    assert [line.split()[0] for line in leftovers(run.marker)] == [str(child)]
    ended(run, child)


def test_child_of_a_callback_obeys_a_signal(sweep: Run) -> None:
    """While a job runs, a signal to a process that a callback forked is that process's own."""
    run = sweep("faults.py", "fault=wait", "at_job=0", FORKING)
    run.await_file("0/started.*", 2)
    child = psutil.Process(forked(run))
    child.terminate()
    deadline = time.monotonic() + 10
    while child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)  # its parent, the app, does not wait for it
    state = child.status()
    send(run.popen, signal.SIGTERM)
    run.wait()
    assert state == psutil.STATUS_ZOMBIE
    assert run.status == -signal.SIGTERM


@pytest.mark.parametrize("refusing", ["servers", "server", "keeper", "rank"])
def test_refused_process(sweep: Run, refusing: str) -> None:
    """Where no process can be started, the job says what was refused and what may help."""
    run = sweep("machine.py", "point=0,1", FORK, environ={"BROKEN": refusing}).wait()
    assert [job["status"] for job in run.jobs()] == ["FAILED", "FAILED"], run.output
    message = "refused to go on: Resource temporarily unavailable: raise the limit of processes"
    assert all(message in job["text"] for job in run.jobs()), run.output
    assert "Traceback" not in run.output


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_soft_limit_of_files(sweep: Run, method: str) -> None:
    """A soft limit below the number of ranks is no obstacle, and is the ranks' own all the same."""
    environ = {"BROKEN": "files", "FILES": "40 4096"}
    setting = f"hydra.launcher.start_method={method}"
    run = sweep("machine.py", setting, environ=environ, nproc=48 if method != "spawn" else 4).wait()
    assert run.status == 0, run.output
    assert [job["text"] for job in run.jobs()] == ["40"], run.output


def test_hard_limit_of_files(sweep: Run) -> None:
    """More ranks than descriptors are allowed: the job says so, and which limit to raise."""
    environ = {"BROKEN": "files", "FILES": "40 40"}
    run = sweep("machine.py", environ=environ, nproc=48).wait()
    assert run.status == 1
    assert "Too many open files: raise the limit of open files (ulimit -n)" in run.output
    assert "Traceback" not in run.output


def test_process_that_the_kernel_does_not_end(sweep: Run) -> None:
    """A rank stuck in the kernel is left behind, by name; its job fails for its own cause and the
    next job runs. With its keeper's death it ends as soon as the kernel can.
    """
    environ = {"BROKEN": "unkillable"}
    run = sweep(
        "machine.py", "fault=unkillable,none", FORK, "hydra.launcher.shutdown_timeout=1",
        environ=environ,
    )  # fmt: skip
    (file,) = run.await_file("0/unkillable.*")
    run.wait()
    pid = int(file.suffix[1:])
    assert [(job["status"], job["type"]) for job in run.jobs()] == [
        ("FAILED", "ValueError"),
        ("COMPLETED", "int"),
    ], run.output
    assert f"the kernel does not end process {pid}" in run.output


def test_stopped_agent_is_named(sweep: Run) -> None:
    """SIGTERM to an agent alone fails its job and says so; the sweep goes on."""
    run = sweep("faults.py", "fault=wait", "point=0,1,2", "hydra.launcher.shutdown_timeout=3")
    run.await_file("1/started.*", 2)
    send(run.processes("agent")[0], signal.SIGTERM)
    run.wait()
    assert [job["status"] for job in run.jobs()] == ["COMPLETED", "FAILED", "COMPLETED"]
    assert "Job #1 failed: the job's agent process was stopped by SIGTERM" in run.output


def test_folder_that_cannot_be_made(sweep: Run) -> None:
    """A folder for ranks' files that cannot be made is named."""
    run = sweep("faults.py", "hydra.launcher.log_dir=/proc/nowhere").wait()
    assert run.status == 1
    assert "refused to go on: No such file or directory (/proc/nowhere" in run.output
    assert "(hydra.launcher.log_dir)" in run.output
    assert "Traceback" not in run.output


def test_working_directory_that_is_gone(sweep: Run) -> None:
    """Where the job's directory has disappeared, its ranks say so."""
    removing = "+hydra.callbacks.removing={_target_: removing.Removing}"
    run = sweep("faults.py", "hydra.job.chdir=true", "hydra.launcher.log_dir=logs", removing).wait()
    (job,) = run.jobs()
    assert job["type"] == "StartError", run.output
    assert f"refused to go on: No such file or directory ({run.directory / '0'})" in job["text"]
