"""Single runs by `hydra_torchrun_launcher.main`: a job of ranks in Hydra's RUN mode."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import APPS, Sweep, send
from running import read_records
from test_faults import FAILING, QUICK

Run = Callable[..., Sweep]
pytestmark = pytest.mark.hydra_versions
METHODS = ("forkserver", "spawn", "fork")


@pytest.mark.parametrize("method", METHODS)
def test_ranks_of_a_single_run(sweep: Run, method: str) -> None:
    """Ranks are those of a sweep's job, in `hydra.run.dir`, and the run's own files lie there."""
    run = sweep(
        "fresh.py", "+size=size", f"hydra.launcher.start_method={method}",
        "hydra.job.env_set.OF_THE_JOB=0", single=True, environ={"FROM_OUTSIDE": "here"},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    first, second = run.lines("0/rank*.json")
    assert [rank["env"]["RANK"] for rank in (first, second)] == ["0", "1"]
    assert first["pid"] != second["pid"]
    for name in ("moment", "once", "output_dir"):
        assert first[name] == second[name], name
    assert first["output_dir"] == str(run.directory / "0")
    assert first["env"]["SET_BY_JOB"] == "yes"
    assert first["size_is_ours"]
    assert first["argv"][0] == str(APPS / "fresh.py")
    names = {path.name for path in (run.directory / "0").iterdir()}
    assert {"fresh.log", "fresh.rank1.log", "ranks", ".hydra"} <= names
    assert run.output.count("printed by rank 0") == 1
    assert "by rank 1" not in run.output
    assert "told by rank 0" in (run.directory / "0/fresh.log").read_text()
    assert f"moment: {first['moment']}" not in (run.directory / "0/.hydra/config.yaml").read_text()


@pytest.mark.parametrize(
    "fault", ["raise", "unpicklable_error", "raise_in_collective", "sys_exit_3", "SIGKILL"]
)
def test_failing_single_run(sweep: Run, fault: str) -> None:
    """A failed run exits with 1; console, job's log and callbacks have the cause and its place."""
    run = sweep("faults.py", f"fault={fault}", "at_job=0", QUICK, single=True).wait()
    assert run.status == 1, run.output
    kind, named = FAILING[fault]
    (job,) = run.jobs()
    assert (job["status"], job["type"]) == ("FAILED", kind), run.output
    assert named in str(job["text"])
    assert run.output.count("Job failed: rank 1 (local rank 1 on ") == 1
    if sys.version_info >= (3, 11) or kind == "RankFailedError":
        assert "log: /" in str(job["text"]) + str(job["notes"])
    job_log = (run.directory / "0/faults.log").read_text()
    assert job_log.count("Job failed") == 1
    assert named in job_log
    if sys.version_info >= (3, 11):
        assert "hydra_torchrun_launcher/" not in run.output


def test_value_reaches_the_callbacks(sweep: Run) -> None:
    """Rank 0's value is the run's."""
    run = sweep("faults.py", single=True).wait()
    (job,) = run.jobs()
    assert (job["status"], job["text"], run.status) == ("COMPLETED", "42", 0), run.output


def test_restarts_of_a_single_run(sweep: Run, tmp_path: Path) -> None:
    """A run whose rank failed starts again in the same directory; a second run there counts on."""
    records = tmp_path / "records"
    records.mkdir()
    arguments = ("restarting.py", "hydra.launcher.max_restarts=2", "+last_attempt=2")
    run = sweep(*arguments, single=True, environ={"RANK_RECORDS": str(records)}).wait()
    assert run.status == 0, run.output
    attempts = sorted((each["attempt"], each["rank"]) for each in read_records(records))
    assert attempts == [(attempt, rank) for attempt in range(3) for rank in range(2)]
    assert "Job: attempt 0 failed, its ranks start again (restart 1 of 2)" in run.output
    directory = f"hydra.run.dir={run.directory / '0'}"
    again = sweep(*arguments, directory, single=True, environ={"RANK_RECORDS": str(records)})
    assert again.wait().status == 0, again.output
    names = {path.name for path in (run.directory / "0/ranks").iterdir()}
    assert names == {f"attempt_{number}" for number in range(6)}


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_a_single_run(sweep: Run, signum: int) -> None:
    """The run is a failed job for callbacks, and the process dies by the signal."""
    run = sweep("faults.py", "fault=wait", "at_job=0", single=True)
    run.await_file("0/started.*", 2)
    send(run.popen, signum)
    assert run.wait().status == -signum, run.output
    (job,) = run.jobs()
    assert (job["status"], job["type"]) == ("FAILED", "JobStoppedError"), run.output


@pytest.mark.parametrize("kind", ["agent", "keeper"])
def test_killed_process_of_a_single_run(sweep: Run, kind: str) -> None:
    """A killed agent or keeper fails the run and is named."""
    run = sweep("faults.py", "fault=wait", "at_job=0", QUICK, single=True)
    run.await_file("0/started.*", 2)
    send(run.processes(kind)[0])
    assert run.wait().status == 1
    (job,) = run.jobs()
    assert job["status"] == "FAILED", run.output
    assert f"{kind} process" in str(job["text"])


def test_killed_launching_process_of_a_single_run(sweep: Run) -> None:
    """What a run started ends with it."""
    run = sweep("faults.py", "fault=wait", "at_job=0", QUICK, single=True)
    run.await_file("0/started.*", 2)
    send(run.popen)
    run.wait()


def test_bad_setting_of_a_single_run(sweep: Run) -> None:
    """A setting that cannot work is refused in a sentence, before a directory is made."""
    run = sweep("faults.py", "hydra.launcher.tee=9", single=True, nproc=0).wait()
    assert run.status == 1
    assert run.output.splitlines()[-1].startswith("hydra.launcher.tee='9': expected"), run.output
    assert "Traceback" not in run.output
    assert not (run.directory / "0").exists()


def test_directory_that_cannot_be_made(sweep: Run) -> None:
    """A run directory that cannot be made is refused in a sentence."""
    run = sweep("faults.py", "hydra.run.dir=console.txt/x", single=True).wait()
    assert run.status == 1
    assert "hydra.run.dir=console.txt/x: " in run.output
    assert "console.txt is no directory that can be written to" in run.output
    assert "Traceback" not in run.output


def test_script_without_a_guard(sweep: Run, tmp_path: Path) -> None:
    """A script that calls its main function at its top level runs as many tasks as it has ranks."""
    environ = {"RANK_RECORDS": str(tmp_path)}
    run = sweep("unguarded.py", single=True, environ=environ).wait()
    assert run.status == 0, run.output
    assert [record["rank"] for record in read_records(tmp_path)] == [0, 1]


def test_interrupt_while_the_server_starts(sweep: Run) -> None:
    """Ctrl-C works while torch is imported."""
    run = sweep("faults.py", "hydra.launcher.preload=[never_loaded]", single=True)
    run.await_file("loading")
    run.await_file("0/.hydra/overrides.yaml")
    send(run.popen, signal.SIGINT)
    assert run.wait().status == -signal.SIGINT, run.output


def test_other_launchers_and_plain_runs(sweep: Run) -> None:
    """Without our launcher the decorator is Hydra's: one process, its help, its config."""
    alone = {"APP_MAIN": "ours"}
    run = sweep("guarded.py", launcher=None, nproc=0, flags=[], environ=alone).wait()
    assert (run.status, "ran in rank None" in run.output) == (0, True), run.output
    for flags, said in ((["--help"], "Powered by Hydra"), (["--cfg", "hydra"], "launcher:"),
                        (["--info", "plugins"], "TorchrunLauncher"),
                        (["-m"], "ran in rank None")):  # fmt: skip
        run = sweep(
            "guarded.py", launcher=None, nproc=0, flags=flags, environ=alone,
            sweep_dir=None if flags != ["-m"] else "",
        ).wait()  # fmt: skip
        assert (run.status, said in run.output) == (0, True), run.output


def test_sweep_by_our_decorator(sweep: Run) -> None:
    """With -m all is as with Hydra's own decorator."""
    run = sweep("faults.py", "point=0,1", environ={"APP_MAIN": "ours"}).wait()
    assert [job["text"] for job in run.jobs()] == ["42", "42"], run.output
    assert run.status == 0


def test_task_that_is_an_object(sweep: Run) -> None:
    """Its config directory is found beside its script, in one process and in ranks."""
    run = sweep("called.py", launcher=None, nproc=0, flags=[], sweep_dir=None).wait()
    assert (run.status, run.output.count("called with 3")) == (0, 1), run.output
    run = sweep("called.py", single=True).wait()
    assert (run.status, run.output.count("called with 3")) == (0, 1), run.output


def test_app_without_a_launcher(sweep: Run) -> None:
    """A config may have no launcher at all."""
    run = sweep(
        "called.py", "~hydra/launcher", launcher=None, nproc=0, flags=[], sweep_dir=None
    ).wait()
    assert (run.status, run.output.count("called with 3")) == (0, 1), run.output


@pytest.mark.skipif(sys.version_info < (3, 11), reason="frames cannot be taken away before")
def test_plain_run_shows_no_frame_of_ours(sweep: Run) -> None:
    """What a task raises in one process looks as with Hydra's own decorator."""
    run = sweep("called.py", "fails=true", launcher=None, nproc=0, flags=[], sweep_dir=None).wait()
    assert run.status == 1
    assert "ValueError: asked to fail" in run.output
    assert "hydra_torchrun_launcher/" not in run.output
