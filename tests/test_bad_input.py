"""What cannot work ends in a sentence: what, why, what to do; and it harms nothing else."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import hydra
import pytest
from conftest import Sweep

from hydra_plugins.hydra_torchrun_launcher import TorchrunLauncher
from hydra_torchrun_launcher.errors import PlatformError

Run = Callable[..., Sweep]
pytestmark = pytest.mark.hydra_versions


def test_launcher_inside_a_rank(sweep: Run) -> None:
    """An app that torchrun started is told to start without it."""
    environ = {"RANK": "1", "TORCHELASTIC_RUN_ID": "outer"}
    run = sweep("faults.py", environ=environ).wait()
    assert run.status == 1
    assert "was started inside a rank of a distributed job (RANK=1" in run.output
    assert "Traceback" not in run.output
    assert not (run.directory / "0").exists()


def test_script_that_a_rank_cannot_import(sweep: Run) -> None:
    """The script's own traceback is shown, once, without a frame of ours."""
    run = sweep("breaks_in_rank.py", environ={"BREAK": "import"}).wait()
    assert run.status == 1
    live = run.output[: run.output.index("Error executing job")]
    assert live.count("Traceback") == 1
    assert live.count("raise ImportError") == 1
    assert "hydra_torchrun_launcher" not in live
    assert "ImportError: this script cannot be imported in a rank" in live


@pytest.mark.parametrize("value", ["max_restarts=many", "start_method=thread", "preload=3"])
def test_wrong_type(sweep: Run, value: str) -> None:
    """A value of another type is refused with its name and value before anything starts."""
    run = sweep("faults.py", f"hydra.launcher.{value}").wait()
    assert run.status == 1
    name, _, text = value.partition("=")
    assert f"hydra.launcher.{name}" in run.output
    assert text in run.output
    assert "Launching" not in run.output


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_task_that_cannot_be_sent(sweep: Run, method: str) -> None:
    """A task function that holds what belongs to one process: what, why, and what to do."""
    setting = f"hydra.launcher.start_method={method}"
    run = sweep("breaks_in_rank.py", setting, environ={"BREAK": "task"}).wait()
    assert run.status == 1
    assert "The task function cannot be sent to the ranks" in run.output
    assert "lock" in run.output
    assert "start_method=fork" in run.output
    assert "Traceback" not in run.output


def test_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Windows the launcher says in a sentence that it does not run there."""
    launcher = TorchrunLauncher()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(PlatformError, match="does not run on win32: it needs Linux"):
        launcher.setup(hydra_context=None, task_function=None, config=None)  # type: ignore[arg-type]


def test_fork_sends_nothing(sweep: Run) -> None:
    """Under fork the same task function works: its ranks have it already."""
    run = sweep(
        "breaks_in_rank.py", "hydra.launcher.start_method=fork", environ={"BREAK": "task"}
    ).wait()
    assert run.status == 0, run.output
    assert "locked" in run.output


@pytest.mark.parametrize(
    ("place", "problem"),
    [
        ("/etc/hostname/sweep", "/etc/hostname is no directory that can be written to"),
        ("/proc/sweep", "in /proc (" if os.geteuid() == 0 else "/proc is no directory"),
        ("a/" + "n" * 256, "is too long"),
    ],
)
def test_sweep_directory_that_cannot_be_made(sweep: Run, place: str, problem: str) -> None:
    """A sweep directory that cannot be made is named before any work, without a stack trace."""
    run = sweep("faults.py", f"hydra.sweep.dir={place}").wait()
    assert run.status == 1
    assert f"hydra.sweep.dir={place}" in run.output
    assert problem in run.output
    assert "Traceback" not in run.output
    assert "Launching" not in run.output


@pytest.mark.parametrize("place", ["hydra.sweep.subdir", "hydra.job.name"])
def test_path_that_is_too_long(sweep: Run, place: str) -> None:
    """A job whose path is too long fails by name; the other jobs run."""
    long = "n" * 300
    where = "${point}" if place == "hydra.sweep.subdir" else "app"
    if place == "hydra.job.name":
        run = sweep("faults.py", f"hydra.job.name={long}").wait()
        assert run.status == 1
    else:
        run = sweep("faults.py", f"{place}={where}", f"point=a,{long},b").wait()
        assert [job["text"] for job in run.jobs()] == ["42", "42"]
        assert "Job #1 failed: " in run.output
    assert "File name too long" in run.output
    assert run.status == 1


def test_several_jobs_in_one_directory(sweep: Run) -> None:
    """Jobs that share a directory lose nothing of ours, and one warning says that they share it."""
    run = sweep("fresh.py", "+size=size", "+x=1,2,3", "hydra.sweep.subdir=all").wait()
    assert run.status == 0, run.output
    assert run.output.count("hydra.sweep.subdir sets jobs apart") == 1
    folder = run.directory / "all"
    for name in ("attempt_0", "job1/attempt_0", "job2/attempt_0"):
        assert "printed by rank 1" in (folder / f"ranks/{name}/1/stdout.log").read_text()
    logs = {path.name for path in folder.glob("*.log")}
    assert logs == {
        "fresh.log", "fresh.rank1.log", "fresh.job1.rank1.log", "fresh.job2.rank1.log",
    }  # fmt: skip
    assert (folder / "fresh.log").read_text().count("told by rank 0") == 3


def test_jobs_with_directories_of_their_own_get_no_warning(sweep: Run) -> None:
    """The warning is for jobs that share a directory."""
    run = sweep("faults.py", "point=0,1").wait()
    assert "sets jobs apart" not in run.output


def test_no_litter(sweep: Run) -> None:
    """Who wants no output in the project's directory finds none of ours there."""
    quiet = ["hydra.output_subdir=null", "hydra.sweep.dir=.", "hydra.sweep.subdir=."]
    quiet += ["hydra/job_logging=stdout", "hydra/hydra_logging=default"]
    run = sweep("faults.py", "fault=none,raise", "at_job=all", *quiet).wait()
    left = {path.name for path in run.directory.iterdir()}
    assert left - {"console.txt", "job_end.jsonl", "multirun.yaml"} == {
        path.name for path in run.directory.glob("started.*")
    }
    assert "ScriptError: raised on purpose" in run.output
    assert "log: none, by hydra.output_subdir=null" in run.output


def test_settings_of_one_job(sweep: Run) -> None:
    """A job whose own config brings a bad setting fails by name, and the other jobs run; hydra-core
    1.4 itself refuses jobs whose launcher settings differ.
    """
    run = sweep("faults.py", "+experiment=a,bad", nproc=0).wait()
    assert run.status == 1, run.output
    if hydra.__version__ >= "1.4":
        assert "'hydra.launcher' must be configured before the sweep starts" in run.output
        return
    assert [job["status"] for job in run.jobs()] == ["COMPLETED", "FAILED"], run.output
    assert "Job #1 failed: hydra.launcher.max_restarts=-1: expected a number from 0" in run.output
