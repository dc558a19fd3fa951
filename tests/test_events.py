"""What a sweep writes about its jobs while it runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Sweep, send
from running import read_records

from hydra_torchrun_launcher.errors import FailFastError, StartError
from hydra_torchrun_launcher.events import EventFile, read
from hydra_torchrun_launcher.outcomes import Ended

Start = Callable[..., Sweep]


@pytest.fixture
def start(sweep: Start, tmp_path: Path) -> Start:
    """Start the app whose ranks write down what they have."""
    records = tmp_path / "records"
    records.mkdir()

    def run(*overrides: str, nproc: int = 2, **more: Any) -> Sweep:
        return sweep(
            "pooled.py", *overrides, nproc=nproc, environ={"RANK_RECORDS": str(records)}, **more
        )

    return run


def events(run: Sweep, job: int) -> list[dict[str, Any]]:
    return read(run.directory / f".torchrun/{job}.jsonl")


def names(run: Sweep, job: int) -> list[str]:
    return [event["event"] for event in events(run, job)]


@pytest.mark.hydra_versions
def test_events_of_a_sweep(start: Start, tmp_path: Path) -> None:
    """They tell what the ranks recorded: devices, processes, values, causes."""
    run = start(
        "n=3,1,5", "+fail={1:true}", "hydra.launcher.retries=1", "hydra.launcher.n_jobs=2",
        "hydra.launcher.devices=[0,1,2,3]",
    ).wait()  # fmt: skip
    assert run.status == 1
    assert names(run, 0) == names(run, 2) == ["queued", "started", "completed"]
    assert names(run, 1) == ["queued", "started", "failed_try", "started", "failed"]
    for number, n in ((0, 3), (2, 5)):
        queued, started, completed = events(run, number)
        assert queued["overrides"] == [f"n={n}", "+fail={1:True}"]
        ranks = [r for r in read_records(tmp_path / "records") if r["job"] == number]
        by_rank = sorted(ranks, key=lambda rank: rank["rank"])
        assert started["pids"] == [rank["pid"] for rank in by_rank]
        assert started["devices"] == by_rank[0]["seen"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert started["output_dir"] == str(run.directory / str(number))
        assert (started["retry"], started["attempt"], started["cores"]) == (0, 0, None)
        assert completed["value"] == n
        assert queued["time"] < started["time"] < completed["time"]
        assert {event["v"] for event in events(run, number)} == {1}
    *_, failed_try, started, failed = events(run, 1)
    assert started["retry"] == 1
    assert (failed["error"], failed["message"]) == ("ValueError", "job 1 was asked to fail")
    assert failed["log"] == str(run.directory / f"1/ranks/attempt_1/{failed['rank']}/stderr.log")
    assert failed_try["log"].endswith(f"attempt_0/{failed_try['rank']}/stderr.log")


def test_restarts_are_events(start: Start) -> None:
    """A restart within a job says what failed."""
    run = start("fails=true", "fail_until=1", "hydra.launcher.max_restarts=3", nproc=1).wait()
    assert run.status == 0, run.output
    assert names(run, 0) == ["queued", "started", "restarted", "completed"]
    restarted = events(run, 0)[2]
    assert restarted["attempt"] == 1
    assert restarted["cause"]["what"] == "raised ValueError: job 0 was asked to fail"


def test_stopped_jobs(start: Start) -> None:
    """A signal's job has been stopped; those that never started are queued still."""
    run = start("n=0,1", "hold=60")
    run.await_file("../records/try.0.0")
    send(run.popen, 15)
    run.wait()
    assert names(run, 0) == ["queued", "started", "stopped"]
    assert events(run, 0)[-1]["message"] == "the job was stopped by SIGTERM"
    assert names(run, 1) == ["queued"]


def test_no_events_where_no_files_are_wanted(start: Start) -> None:
    """A project's directory gets none with hydra.output_subdir=null."""
    run = start("hydra.output_subdir=null", "hydra.sweep.dir=.", "hydra.sweep.subdir=.",
                sweep_dir=None, nproc=1).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert not (run.directory / ".torchrun").exists()


def test_second_run_in_a_directory(tmp_path: Path) -> None:
    """Readers see the events of the last run; half a line of a killed one spoils nothing."""
    first = EventFile(tmp_path / ".torchrun", 3)
    first.add("queued", overrides=["a=1"])
    first.ended(Ended(value=3), 1.0)
    path = tmp_path / ".torchrun/3.jsonl"
    with path.open("ab") as file:
        file.write(b'{"v": 1, "event": "star')
    second = EventFile(tmp_path / ".torchrun", 3)
    second.add("queued", overrides=["a=2"])
    second.ended(Ended(error=FailFastError("not started", "job #2", "ValueError: x")), 0)
    found = read(path)
    assert [event["event"] for event in found] == ["queued", "stopped"]
    assert found[0]["overrides"] == ["a=2"]


def test_file_cut_anywhere(tmp_path: Path) -> None:
    """A reader takes whole lines only."""
    file = EventFile(tmp_path / ".torchrun", 0)
    file.add("queued", overrides=["ä=1"])
    file.add("started", retry=0)
    file.ended(Ended(value={"x": [1.5, None]}), 2.0)
    path = tmp_path / ".torchrun/0.jsonl"
    whole = path.read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        assert read(path) == lines[: whole[:length].count(b"\n")]
    assert read(tmp_path / "none.jsonl") == []


def test_values_that_are_no_data(tmp_path: Path) -> None:
    """Their type is named."""
    file = EventFile(tmp_path / ".torchrun", 0)
    file.add("queued")
    file.ended(Ended(value=object()), 0)
    file.ended(Ended(value=float("nan")), 0)
    file.ended(Ended(error=StartError("x" * 10_000)), 0)
    _, no_data, nan, failed = read(tmp_path / ".torchrun/0.jsonl")
    assert (no_data["value"], no_data["type"]) == (None, "builtins.object")
    assert nan["value"] == {"!": ["float", "nan"]}
    assert len(failed["message"]) == 4000


def test_directory_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and nothing fails."""
    (tmp_path / ".torchrun").write_text("in the way")
    file = EventFile(tmp_path / ".torchrun", 0)
    file.add("queued")
    file.add("started")
    assert len(caplog.records) == 1
    assert os.path.isfile(tmp_path / ".torchrun")
