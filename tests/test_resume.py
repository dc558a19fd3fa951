"""A sweep that was cut short goes on where it was; two sweeps never share a directory."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import APPS, HANG_S, Sweep, leftovers, send
from omegaconf import OmegaConf
from running import read_records
from test_sweepers import OPTUNA

from hydra_torchrun_launcher import claims, events
from hydra_torchrun_launcher.claims import Claim
from hydra_torchrun_launcher.errors import StartError
from hydra_torchrun_launcher.events import EventFile
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.resume import Records, mark

Start = Callable[..., Sweep]
RESUME = "hydra.launcher.resume=true"


@pytest.fixture
def start(sweep: Start, tmp_path: Path) -> Start:
    """Start the app in one sweep directory, whatever run it is."""
    (records := tmp_path / "records").mkdir()

    def run(*overrides: str, **more: Any) -> Sweep:
        return sweep(
            "pooled.py", *overrides, f"hydra.sweep.dir={tmp_path / 'sweep'}", nproc=1,
            sweep_dir=None, environ={"RANK_RECORDS": str(records)}, **more,
        )  # fmt: skip

    return run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return where the records are."""
    return tmp_path / "sweep/.torchrun"


def ran(tmp_path: Path) -> list[int]:
    """Return the numbers of the jobs that have run to their end, each as often as it did."""
    return sorted(rank["job"] for rank in read_records(tmp_path / "records"))


@pytest.mark.hydra_versions
def test_what_completed_is_taken_over(start: Start, tmp_path: Path) -> None:
    """Completed jobs are not run again; those that failed, and new ones, are."""
    some = ("+fail={8:true}", "fail_until=1")
    assert start("n=7,8,9", *some).wait().status == 1
    run = start("n=7,8,9,10", *some, RESUME).wait()
    assert run.status == 0, run.output
    assert ran(tmp_path) == [0, 1, 2, 3]
    assert "#0 : n=7 +fail={8:True} fail_until=1 (completed before, as job #0)" in run.output
    assert "Job #1 (n=8 +fail={8:True} fail_until=1) runs: it failed" in run.output
    assert "fail_until=1) runs: it is new" in run.output


def test_values_reach_the_sweeper(sweep: Start, tmp_path: Path) -> None:
    """A sweeper gets from the record what it got from the jobs."""
    pytest.importorskip("optuna", reason="hydra-optuna-sweeper is not installed")
    (log := tmp_path / "log").mkdir()
    command = ("optimum.py", f"hydra.sweep.dir={tmp_path / 'sweep'}", f"log={log}", *OPTUNA)

    def best(*more: str) -> str:
        run = sweep(*command, *more, nproc=1, sweep_dir=None).wait()
        assert run.status == 0, run.output
        return (tmp_path / "sweep/optimization_results.yaml").read_text()

    expected = best()
    before = {path: path.stat().st_mtime_ns for path in log.iterdir()}
    assert best(RESUME) == expected
    assert {path: path.stat().st_mtime_ns for path in log.iterdir()} == before


def test_changed_config(start: Start, tmp_path: Path) -> None:
    """A job whose config is another now runs, though its overrides are the same."""
    (own := tmp_path / "own").mkdir()
    text = (APPS / "pooled.yaml").read_text()
    for length in (1, 2):
        (own / "pooled.yaml").write_text(text.replace("length: 1", f"length: {length}"))
        run = start("n=1", *([RESUME] if length == 2 else []), flags=("-cp", str(own), "-m"))
        assert run.wait().status == 0, run.output
    assert "runs: its config has changed since it completed" in run.output
    assert ran(tmp_path) == [0, 0]


def test_edited_record(start: Start, tmp_path: Path, folder: Path) -> None:
    """A value that somebody has written is no result."""
    assert start("n=1,2").wait().status == 0
    file = folder / "0.jsonl"
    file.write_text(file.read_text().replace('"value": 1', '"value": 5'))
    run = start("n=1,2", RESUME).wait()
    assert run.status == 0
    assert "Job #0 (n=1) runs: its record has been changed" in run.output
    assert ran(tmp_path) == [0, 0, 1]


def test_value_that_no_record_holds(start: Start, tmp_path: Path) -> None:
    """A job whose value is no plain data runs again: its record has no value."""
    assert start("n=1", "strange=true").wait().status == 0
    run = start("n=1", "strange=true", RESUME).wait()
    assert run.status == 0
    assert "its value, of type builtins.complex, is not in its record" in run.output
    assert ran(tmp_path) == [0, 0]


def test_files_written_over(start: Start, tmp_path: Path) -> None:
    """A result whose directory another job has used since is gone."""
    for n in (1, 2):
        assert start(f"n={n}").wait().status == 0
    run = start("n=1", RESUME).wait()
    assert run.status == 0
    assert "Job #0 (n=1) runs: no result of it is there" in run.output
    assert ran(tmp_path) == [0, 0, 0]


def test_jobs_in_another_order(start: Start, tmp_path: Path, folder: Path) -> None:
    """Results follow their overrides; a job that would write over one is refused beforehand."""
    assert start("n=1,2,3").wait().status == 0
    run = start("n=3,1", RESUME).wait()
    assert run.status == 0, run.output
    assert "#0 : n=3 (completed before, as job #2)" in run.output
    assert events.read(folder / "0.jsonl")[-1]["value"] == 3
    run = start("n=4,1", RESUME).wait()
    assert run.status == 1
    assert "job #0 (n=4) would write to " in run.output
    assert "where the result of job #1 (n=1) is" in run.output
    run = start("n=4,1", RESUME, "hydra.sweep.subdir=${hydra.job.override_dirname}").wait()
    assert run.status == 0, run.output
    assert ran(tmp_path) == [0, 0, 1, 2]


def test_alike_jobs_take_their_own(tmp_path: Path) -> None:
    """Of jobs with the same overrides and config, each takes over its own result."""
    config = OmegaConf.create({"a": 1})
    for number in range(3):
        known = events.about(["a=1"], mark(config), f"there/{number}")
        EventFile(tmp_path, number).ended(Ended(value=number), 1, known)
    records = Records(tmp_path)
    found = [records.find(number, ["a=1"], config)[0] for number in range(4)]
    assert [each.value for each in found if each is not None] == [0, 1, 2, 2]


def test_records_of_another_app(start: Start, sweep: Start, tmp_path: Path, folder: Path) -> None:
    """They are refused, with its name."""
    assert start("n=1").wait().status == 0
    directory = f"hydra.sweep.dir={tmp_path / 'sweep'}"
    run = sweep("faults.py", directory, RESUME, sweep_dir=None).wait()
    assert run.status == 1
    assert f"{folder} has the records of another app, pooled; this one is faults" in run.output


def test_nothing_to_resume(sweep: Start, tmp_path: Path) -> None:
    """What there is, is listed; the command that is shown works."""
    (records := tmp_path / "records").mkdir()
    environ = {"RANK_RECORDS": str(records)}
    pattern = "hydra.sweep.dir='sweeps/${now:%H-%M-%S-%f}'"
    first = sweep("pooled.py", "n=1", pattern, nproc=1, sweep_dir=None, environ=environ).wait()
    assert first.status == 0, first.output
    (there,) = (first.directory / "sweeps").iterdir()
    command = [sys.executable, str(APPS / "pooled.py"), "-m", "hydra/launcher=torchrun", "n=1",
               "hydra.launcher.nproc_per_node=1", pattern, RESUME]  # fmt: skip

    def run(command: Any, **more: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=first.directory, env={**os.environ, **environ}, timeout=HANG_S,
            capture_output=True, text=True, check=False, **more,
        )  # fmt: skip

    refused = run(command)
    assert refused.returncode == 1
    assert f"holds no record of a sweep. The last sweeps were in\n  sweeps/{there.name}\n" in (
        refused.stderr
    )
    shown = next(line for line in refused.stderr.splitlines() if line.startswith("  /"))
    done = run(shown, shell=True)
    assert done.returncode == 0, done.stderr
    assert "completed before" in done.stdout
    assert ran(tmp_path) == [0]


def test_record_cut_anywhere(tmp_path: Path) -> None:
    """It is read as the whole one or as none."""
    config = OmegaConf.create({"a": 1})
    file = EventFile(tmp_path, 0)
    file.add("queued", overrides=["a=1"])
    known = events.about(["a=1"], mark(config), "there")
    file.ended(Ended(value={"loss": 0.5}), 1.0, known)
    path = tmp_path / "0.jsonl"
    whole = path.read_bytes()
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        found, _ = Records(tmp_path).find(0, ["a=1"], config)
        assert (found is not None) == (end == len(whole))
        assert found is None or found.value == {"loss": 0.5}


@pytest.mark.parametrize(
    "edit", [{"ran_as": "x"}, {"value": [1]}, {"overrides": ["a=1"], "job": 1}]
)
def test_completed_event_that_was_edited(tmp_path: Path, edit: dict[str, Any]) -> None:
    """Whatever stands in it, it is no result, and no crash."""
    config = OmegaConf.create({"a": 1})
    file = EventFile(tmp_path, 0)
    known = events.about(["a=1"], mark(config), "there")
    file.ended(Ended(value=0.5), 1.0, known)
    path = tmp_path / "0.jsonl"
    path.write_text(json.dumps({**json.loads(path.read_text()), **edit}) + "\n")
    assert Records(tmp_path).find(0, ["a=1"], config) == (None, "its record has been changed")


def test_second_sweep_in_a_directory(start: Start, tmp_path: Path) -> None:
    """It is refused while the first lives, however that was started, and not afterwards."""
    first = start("n=1", "hold=60")
    first.await_file("../records/try.0.0")
    second = start("n=1").wait()
    assert second.status == 1
    assert f"process {first.popen.pid} on " in second.output
    assert "runs a sweep there" in second.output
    send(first.popen)
    first.wait()
    assert start("n=1").wait().status == 0


def test_killed_launching_process_that_nobody_waits_for(start: Start, tmp_path: Path) -> None:
    """A process that is dead and still has its number (a zombie) has no directory."""
    first = start("n=1", "hold=60")
    first.await_file("../records/try.0.0")
    os.kill(first.popen.pid, signal.SIGKILL)
    os.waitid(os.P_PID, first.popen.pid, os.WEXITED | os.WNOWAIT)
    assert start("n=1").wait().status == 0
    first.wait()


def test_ranks_that_outlive_their_launching_process(start: Start, tmp_path: Path) -> None:
    """The next sweep in the directory waits for them."""
    settings = ("n=1", "hydra.launcher.shutdown_timeout=6", "hydra.launcher.nproc_per_node=2")
    first = start(*settings, "stubborn=60", "hold=60")
    first.await_file("../records/stubborn.0")
    (keeper,) = first.processes("keeper")
    send(first.popen)
    second = start(*settings)
    second.await_text("Waiting for what is left of the run before (1 jobs)")
    second.await_text("#0 :")
    assert not keeper.is_running()
    assert second.wait().status == 0, second.output
    first.wait()


def test_claim_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is none."""

    def refuse(fd: int, _: str) -> None:
        os.close(fd)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "fdopen", refuse)
        with pytest.raises(OSError, match="No space"):
            Claim.take(tmp_path, "there", {})
    Claim.take(tmp_path, "there", {})


def test_two_sweeps_at_once(start: Start, tmp_path: Path) -> None:
    """One of them gets the directory."""
    runs = [start("n=1", "hold=3") for _ in range(3)]
    assert sorted(run.wait().status for run in runs) == [0, 1, 1]
    assert ran(tmp_path) == [0]


def test_refused_sweep_leaves_no_claim(start: Start, folder: Path) -> None:
    """Who looks at the directory sees the sweep before it."""
    assert start("n=1,2").wait().status == 0
    run = start("n=3,1", RESUME).wait()
    assert run.status == 1
    assert "would write to" in run.output
    assert [path.name for path in folder.glob("sweep.*")] == ["sweep.0.json"]


def test_claims_at_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who claims what another has just taken is refused, and leaves its file as it is."""
    looked = []
    first = {"v": claims.VERSION, "pid": 1, "start": claims.start_time(1)}
    rival = json.dumps({**claims.identity(), **first})

    def last_number(folder: Path) -> int | None:
        if not looked:  # the rival comes when we have seen that there is nobody
            looked.append(folder)
            (folder / "sweep.0.json").write_text(rival)
            return None
        return real(folder)

    real = claims.last_number
    monkeypatch.setattr(claims, "last_number", last_number)
    with pytest.raises(StartError, match=r"process 1 on \S+ runs a sweep there"):
        Claim.take(tmp_path, "there", {})
    assert (tmp_path / "sweep.0.json").read_text() == rival


@pytest.mark.parametrize(("silent_s", "is_refused"), [(60, True), (3600, False)])
def test_sweep_of_another_machine(tmp_path: Path, silent_s: float, is_refused: bool) -> None:
    """A process that cannot be seen from here lives as long as it touches its file."""
    Claim.take(tmp_path, "there", {})
    path = tmp_path / "sweep.0.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "boot": "x", "host": "node7"}))
    at = time.time() - silent_s
    os.utime(path, (at, at))
    if is_refused:
        with pytest.raises(StartError, match=r"process \d+ on node7 runs a sweep there"):
            Claim.take(tmp_path, "there", {})
    else:
        Claim.take(tmp_path, "there", {})
        assert claims.read(tmp_path)["host"] != "node7"


def test_directory_that_cannot_be_written_by_who_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent process of another machine is dead there, too: by this machine's clock."""
    (path := tmp_path / "sweep.0.json").write_text("{}")

    def refuse(**_: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
    facts = {**claims.identity(), "boot": "x"}
    assert claims.is_alive(facts, path)
    at = time.time() - 3600
    os.utime(path, (at, at))
    assert not claims.is_alive(facts, path)


@pytest.mark.parametrize(
    ("kills", "count"), [(20, 30), pytest.param(100, 150, marks=pytest.mark.soak)]
)
def test_killed_and_resumed(
    start: Start, tmp_path: Path, folder: Path, kills: int, count: int
) -> None:
    """However often the launching process is killed, every job completes once in the record."""
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)
    jobs = (
        f"n=range({count})",
        "hold=0.1",
        "hydra.launcher.n_jobs=2",
        "hydra.launcher.devices=[0,1]",
    )
    for kill in range(kills):
        run = start(*jobs, *([RESUME] if list(folder.glob("*")) else []))
        if kill % 4:
            run.await_text("Launching")
        with contextlib.suppress(subprocess.TimeoutExpired):
            run.popen.wait(moments.uniform(0, 2.5))
        if run.popen.poll() is None:
            send(run.popen)
        assert run.wait().status in (0, -signal.SIGKILL), (seed, kill, run.output)
        assert leftovers(run.marker) == [], (seed, kill)
    run = start(*jobs, RESUME).wait()
    assert run.status == 0, (seed, run.output)
    completed = Counter(
        event["job"]
        for path in folder.glob("*.jsonl")
        for event in events.read_all(path)
        if event["event"] == "completed" and "ran_as" not in event
    )
    assert completed == dict.fromkeys(range(count), 1), seed
    assert set(ran(tmp_path)) == set(range(count))
    values = {path.name: events.read(path)[-1]["value"] for path in folder.glob("*.jsonl")}
    assert values == {f"{n}.jsonl": n for n in range(count)}, seed
