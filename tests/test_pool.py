"""Several jobs of a sweep at once: devices, cores, output, and what happens when one fails."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from conftest import APPS, HANG_S, Sweep, processes_with, send
from omegaconf import OmegaConf
from running import read_records

from hydra_torchrun_launcher.batches import Batch, Waiting
from hydra_torchrun_launcher.errors import SettingsError
from hydra_torchrun_launcher.events import EventFile, read
from hydra_torchrun_launcher.lending import Lender
from hydra_torchrun_launcher.machine import cpu_cores
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.plans import Begun
from hydra_torchrun_launcher.settings import Sharing
from hydra_torchrun_launcher.slots import Accelerators, Share

Start = Callable[..., Sweep]


@pytest.fixture
def start(sweep: Start, tmp_path: Path) -> Start:
    """Start the app whose ranks write down what they have."""
    records = tmp_path / "records"
    records.mkdir()

    def run(*overrides: str, nproc: int = 1, environ: dict[str, str] | None = None) -> Sweep:
        own = {"RANK_RECORDS": str(records), **(environ or {})}
        return sweep("pooled.py", *overrides, nproc=nproc, environ=own)

    return run


@pytest.fixture
def ranks(tmp_path: Path) -> Callable[[], list[dict[str, Any]]]:
    """Return what the ranks have written down."""
    return lambda: read_records(tmp_path / "records")


def together(ranks: list[dict[str, Any]]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the pairs of ranks of different jobs that ran at the same time."""
    for one, other in itertools.combinations(ranks, 2):
        overlap = one["started"] < other["ended"] and other["started"] < one["ended"]
        if overlap and one["job"] != other["job"]:
            yield one, other


def devices(rank: dict[str, Any]) -> set[str]:
    return set(rank["seen"]["CUDA_VISIBLE_DEVICES"].split(","))


def most_at_once(ranks: list[dict[str, Any]]) -> int:
    jobs = {rank["job"]: rank for rank in ranks}.values()
    return max(sum(j["started"] <= k["started"] < j["ended"] for j in jobs) for k in jobs)


def test_jobs_share_devices(start: Start, ranks: Any) -> None:
    """As many jobs as there are devices for run at once, no two on one device, names as given."""
    names = "[GPU-a,1,MIG-b,GPU-c/2/0]"
    run = start("hydra.launcher.n_jobs=auto", f"hydra.launcher.devices={names}", "hold=2",
                "n=0,1,2,3,4", nproc=2).wait()  # fmt: skip
    assert run.status == 0, run.output
    found = ranks()
    assert len(found) == 10
    for one, other in together(found):
        assert not devices(one) & devices(other)
    for rank in found:
        assert len(devices(rank)) == 2
        assert devices(rank) < {"GPU-a", "1", "MIG-b", "GPU-c/2/0"}
        assert list(rank["seen"]) == ["CUDA_VISIBLE_DEVICES"]
    assert most_at_once(found) == 2


def test_jobs_on_one_device(start: Start, ranks: Any) -> None:
    """A device may be shared by as many jobs as the user says."""
    run = start("hydra.launcher.n_jobs=auto", "hydra.launcher.devices=[0]",
                "hydra.launcher.jobs_per_device=3", "hold=2", "n=0,1,2,3").wait()  # fmt: skip
    assert run.status == 0, run.output
    assert most_at_once(ranks()) == 3
    assert all(devices(rank) == {"0"} for rank in ranks())


def test_number_of_jobs_is_a_limit(start: Start, ranks: Any) -> None:
    """Fewer run at once than would fit, if the user wants fewer; values keep their order."""
    run = start("hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1,2,3]", "n=0,1,2,3,4",
                "hold=2").wait()  # fmt: skip
    assert run.status == 0, run.output
    assert most_at_once(ranks()) == 2


def test_devices_without_jobs_at_once(start: Start, ranks: Any) -> None:
    """One job after another sees as many of the named devices as it has ranks."""
    run = start("hydra.launcher.devices='3,5,7'", "n=0,1", nproc=2).wait()
    assert run.status == 0, run.output
    assert [rank["seen"]["CUDA_VISIBLE_DEVICES"] for rank in ranks()] == ["3,5"] * 4
    assert most_at_once(ranks()) == 1


@pytest.mark.hydra_versions
def test_jobs_of_different_sizes(start: Start, ranks: Any) -> None:
    """The largest go first, smaller ones fill what is left, and no device idles meanwhile."""
    run = start("hydra.launcher.n_jobs=auto", "hydra.launcher.devices=[0,1,2,3]",
                "hydra.launcher.nproc_per_node=${n}", "n=1,2,1,4,1,2,3", "hold=1.5",
                nproc=0).wait()  # fmt: skip
    assert run.status == 0, run.output
    found = ranks()
    for one, other in together(found):
        assert not devices(one) & devices(other)
    launched = re.findall(r"\t#(\d) : (?!completed)", run.output)
    assert launched[:3] == ["3", "6", "0"]
    sizes = {0: 1, 1: 2, 2: 1, 3: 4, 4: 1, 5: 2, 6: 3}
    for rank in found:
        assert len(devices(rank)) == sizes[rank["job"]]
    assert any(len(devices(one) | devices(other)) == 4 for one, other in together(found))


@pytest.mark.hydra_versions
def test_job_that_never_fits(start: Start, ranks: Any) -> None:
    """It is refused before the sweep starts, with the arithmetic."""
    run = start("hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1]",
                "hydra.launcher.nproc_per_node=${n}", "n=1,3", nproc=0).wait()  # fmt: skip
    assert run.status == 1
    said = "job #1: it needs 3 accelerators, one for each rank (hydra.launcher.nproc_per_node=3)"
    assert f"{said}, and the sweep has 2: 0, 1" in run.output
    assert "Traceback" not in run.output
    assert ranks() == []
    assert not (run.directory / "0").exists()


@pytest.mark.hydra_versions
def test_settings_of_the_sweep_that_differ(start: Start, ranks: Any) -> None:
    """What is one for the whole sweep cannot be another for a job."""
    run = start("hydra.launcher.n_jobs=${n}", "n=2,3").wait()
    assert run.status == 1
    assert "are one for the whole sweep" in run.output, run.output
    assert ranks() == []


@pytest.mark.skipif(cpu_cores() < 2, reason="there is one core")
def test_jobs_share_cores(start: Start, ranks: Any) -> None:
    """Without accelerators, jobs get cores of their own and as many threads."""
    run = start("hydra.launcher.n_jobs=auto", "n=0,1,2,3", "hold=2").wait()
    assert run.status == 0, run.output
    found = ranks()
    assert most_at_once(found) == min(4, cpu_cores())
    for one, other in together(found):
        assert not set(one["cores"]) & set(other["cores"])
    assert all(len(rank["cores"]) == 1 and rank["threads"] == 1 for rank in found)
    assert all(rank["seen"] == {} for rank in found)


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_threads_match_the_cores(start: Start, ranks: Any, method: str) -> None:
    """A job's ranks use all its cores, whatever the start method."""
    cores = cpu_cores()
    run = start("hydra.launcher.n_jobs=auto", f"hydra.launcher.start_method={method}", "n=0",
                nproc=cores)  # fmt: skip
    assert run.wait().status == 0, run.output
    assert all(len(rank["cores"]) == cores for rank in ranks())
    assert all(rank["threads"] == 1 for rank in ranks())


def test_more_jobs_than_cores(start: Start, ranks: Any) -> None:
    """An explicit number beyond the cores shares them, and says so."""
    cores = cpu_cores()
    run = start(f"hydra.launcher.n_jobs={2 * cores}", f"n=range({2 * cores})", "hold=3").wait()
    assert run.status == 0, run.output
    assert f"this process may use {cores} CPU cores, so up to 2 jobs share one" in run.output
    assert most_at_once(ranks()) == 2 * cores


def test_output_of_jobs_at_once(start: Start) -> None:
    """Lines are whole, however long, and each says whose it is."""
    run = start("hydra.launcher.n_jobs=4", "n=0,1,2,3", "lines=100", "length=6000").wait()
    assert run.status == 0, run.output
    lines = [line for line in run.output.splitlines() if "<" in line]
    assert len(lines) == 800
    for line in lines:
        found = re.fullmatch(r"\[job #(\d), rank 0\] <(\d) \d+ (x{6000}|y{6000}) end>", line)
        assert found, line[:80]
        assert found[1] == found[2]


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_output_in_pieces(tmp_path: Path, kind: str) -> None:
    """Lines are whole also where the reader takes them piece by piece."""
    records = tmp_path / "records"
    records.mkdir()
    command = [
        sys.executable, str(APPS / "pooled.py"), "-m", "hydra/launcher=torchrun",
        "hydra.launcher.nproc_per_node=2", "hydra.launcher.local_ranks_filter=''",
        "hydra.launcher.n_jobs=3", "n=0,1,2", "lines=60", "length=9000",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]  # fmt: skip
    environ = {**os.environ, "RANK_RECORDS": str(records)}
    reader, writer = os.pipe() if kind == "pipe" else [s.detach() for s in socket.socketpair()]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=writer, stderr=writer) as run:
        os.close(writer)
        output = b"".join(iter(lambda: os.read(reader, 777), b"")).decode()
    os.close(reader)
    assert run.returncode == 0, output
    lines = [line for line in output.splitlines() if "xx" in line or "yy" in line]
    assert len(lines) == 3 * 2 * 2 * 60
    for line in lines:
        found = re.fullmatch(r"\[job #(\d), rank [01]\] <(\d) \d+ (x{9000}|y{9000}) end>", line)
        assert found, line[:80]
        assert found[1] == found[2]


@pytest.mark.hydra_versions
def test_values_in_order(sweep: Start) -> None:
    """JobReturns are in the order of the jobs, whatever order they end in."""
    run = sweep(
        "faults.py", "point=2,1,0", "hydra.launcher.n_jobs=3", "hydra.launcher.devices=[0,1,2]",
        nproc=1,
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert len(run.jobs()) == 3


@pytest.mark.hydra_versions
def test_retries(start: Start, ranks: Any) -> None:
    """A job that failed runs again in new processes, and each try has its files."""
    run = start("hydra.launcher.retries=2", "fails=true", "fail_until=2").wait()
    assert run.status == 0, run.output
    assert [rank["attempts"] for rank in ranks()] == [2]
    assert "Job #0 failed: it runs again (retry 2 of 2)" in run.output
    folders = sorted(path.name for path in (run.directory / "0/ranks").iterdir())
    assert folders == ["attempt_0", "attempt_1", "attempt_2"]
    log = (run.directory / "0/pooled.log").read_text()
    assert "it runs again (retry 1 of 2), as it failed: ValueError: job 0 was asked to fail" in log


def test_retries_that_do_not_help(start: Start, ranks: Any) -> None:
    """A job that fails each time has failed."""
    run = start("hydra.launcher.retries=1", "fails=true").wait()
    assert run.status == 1
    assert run.output.count("ValueError: job 0 was asked to fail") >= 2
    assert ranks() == []


@pytest.mark.hydra_versions
def test_fail_fast(start: Start, ranks: Any) -> None:
    """The first failure stops what runs, starts nothing more, and keeps what has completed."""
    run = start("hydra.launcher.n_jobs=3", "hydra.launcher.devices=[0,1,2]",
                "hydra.launcher.fail_fast=true", "n=0,1,2,3,4",
                "+holds={0:0.1,1:60,2:2,3:60,4:60}", "+fail={2:true}")  # fmt: skip
    run.wait()
    assert run.status == 1
    assert [rank["job"] for rank in ranks()] == [0]
    why = "because job #2 failed (hydra.launcher.fail_fast): ValueError: job 2 was asked to fail"
    assert f"Job #1: stopped, {why}" in run.output
    assert "#4 : not started" in run.output
    assert run.seconds < 50


@pytest.mark.hydra_versions
def test_retries_of_a_single_run(sweep: Start, start: Start, ranks: Any, tmp_path: Path) -> None:
    """It runs again as a sweep's job does, on the same device."""
    run = sweep(
        "pooled.py", "hydra.launcher.retries=2", "fails=true", "fail_until=2", "n=0",
        "hydra.launcher.devices=[GPU-a]", single=True, nproc=1,
        environ={"RANK_RECORDS": str(tmp_path / "records")},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert [rank["attempts"] for rank in ranks()] == [2]
    assert devices(ranks()[0]) == {"GPU-a"}
    assert "Job failed: it runs again (retry 2 of 2)" in run.output
    log = (run.directory / "0/pooled.log").read_text()
    assert "it runs again (retry 1 of 2), as it failed: ValueError: job 0 was asked to fail" in log


def test_single_run_has_the_whole_machine(
    sweep: Start, start: Start, ranks: Any, tmp_path: Path
) -> None:
    """How many jobs of a sweep may run at once does not matter to it."""
    run = sweep(
        "pooled.py", "hydra.launcher.n_jobs=auto", "n=0", single=True, nproc=1,
        environ={"RANK_RECORDS": str(tmp_path / "records")},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert len(ranks()[0]["cores"]) == len(os.sched_getaffinity(0))


def last_event(run: Sweep, job: int) -> dict[str, Any]:
    line = (run.directory / f".torchrun/{job}.jsonl").read_text().splitlines()[-1]
    found = json.loads(line)
    assert isinstance(found, dict)
    return found


def test_completed_job_stays_so(start: Start, ranks: Any) -> None:
    """What a job leaves behind holds up its end; no limit and no other job's failure meanwhile
    takes its result away.
    """
    run = start(
        "hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1]", "n=0,1", "+fail={1:true}",
        "+holds={0:0,1:12}", "leaves=200", "hydra.launcher.timeout_s=10",
        "hydra.launcher.shutdown_timeout=20", "hydra.launcher.fail_fast=true",
    ).wait()  # fmt: skip
    assert run.status == 1
    assert [rank["job"] for rank in ranks()] == [0]
    assert (last_event(run, 0)["event"], last_event(run, 0).get("value")) == ("completed", 0)
    assert "Job #0: stopped" not in run.output
    assert last_event(run, 1)["error"] == "JobTimeoutError"


def test_signal_after_a_job_has_completed(start: Start, ranks: Any) -> None:
    """Its result is kept, and what it left behind ends soon."""
    run = start("n=0,1", "leaves=200", "hydra.launcher.shutdown_timeout=100")
    run.await_file("../records/job0.*.json")
    run.processes("keeper")[0].children()[0].wait(60)  # the agent leaves when ranks are done
    send(run.popen, signal.SIGTERM)
    assert run.wait().status == -signal.SIGTERM, run.output
    assert run.seconds < 60
    assert (last_event(run, 0)["event"], last_event(run, 0).get("value")) == ("completed", 0)
    assert "Stopped by SIGTERM; not started: 1 of 2 jobs" in run.output


def test_signal_to_a_job_that_fails(start: Start) -> None:
    """It has failed by its rank, also if a signal comes before it has ended."""
    run = start("n=0,1", "fails=true", "hold=2", "stubborn=60", nproc=2)
    run.await_text("Job #0 failed: rank 0")
    send(run.popen, signal.SIGTERM)
    assert run.wait().status == -signal.SIGTERM, run.output
    last = last_event(run, 0)
    assert (last["event"], last["error"], last["rank"]) == ("failed", "ValueError", 0)


def test_retries_of_an_exception_without_words(start: Start) -> None:
    """A class that refuses to tell its text disturbs nothing."""
    run = start("hydra.launcher.retries=1", "fails=true", "fail_until=1", "wordless=true", "n=0,1",
                "hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1]").wait()  # fmt: skip
    assert run.status == 0, run.output
    log = (run.directory / "0/pooled.log").read_text()
    assert "it runs again (retry 1 of 1), as it failed: WordlessError" in log


def test_value_that_cannot_be_rebuilt(start: Start, ranks: Any) -> None:
    """It fails its job, with a word on the console, and another try would not help."""
    run = start("hydra.launcher.retries=2", "unfit=true", "n=0,1").wait()
    assert run.status == 1
    for number in (0, 1):
        said = f"Job #{number} failed: The task function's return value cannot be rebuilt"
        assert run.output.count(said) == 1
    assert [rank["job"] for rank in ranks()] == [0, 1]


@pytest.mark.parametrize("kind", ["pipe", "null"])
def test_console_that_another_has_locked(tmp_path: Path, kind: str) -> None:
    """A stranger who holds a lock on the console and does nothing ends no sweep."""
    records = tmp_path / "records"
    records.mkdir()
    reader, writer = os.pipe() if kind == "pipe" else (-1, os.open(os.devnull, os.O_RDWR))
    fcntl.lockf(writer, fcntl.LOCK_EX, 2, 0)
    command = [
        sys.executable, str(APPS / "pooled.py"), "-m", "hydra/launcher=torchrun", "lines=3",
        "hydra.launcher.nproc_per_node=1", "hydra.launcher.n_jobs=2", "n=0,1",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ]  # fmt: skip
    environ = {**os.environ, "RANK_RECORDS": str(records)}
    app = subprocess.Popen(command, cwd=tmp_path, env=environ, stdout=writer, stderr=writer)
    try:
        assert app.wait(HANG_S) == 0
    finally:
        app.kill()
        os.close(writer)
    if kind == "pipe":
        shown = os.read(reader, 1 << 16).decode()
        os.close(reader)
        assert shown.count("[job #0, rank 0] <0 ") == shown.count("[job #1, rank 0] <1 ") == 6


def test_retries_in_vain(sweep: Start) -> None:
    """What cannot be sent once cannot be sent the next time."""
    code = "import hydra\nclass Held:\n    def __reduce__(self): raise TypeError('no')\n"
    code += "held = Held()\n"
    code += "def run():\n    def main(cfg, held=held): pass\n"
    code += "    hydra.main(version_base='1.3', config_path=None)(main)()\nrun()\n"
    run = sweep("", "hydra.launcher.retries=2", code=code).wait()
    assert run.status == 1
    assert "cannot be sent to the ranks" in run.output
    assert "runs again" not in run.output


@pytest.mark.hydra_versions
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_sweep_that_cannot_go_on(start: Start, ranks: Any, method: str) -> None:
    """Where Hydra's part of a job fails, as Hydra does the sweep ends: what runs ends with it."""
    run = start(
        "hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1]", "+holds={0:90,1:0}", "n=0,1,2",
        "hydra.job_logging.root.level=${level}", "+levels={n1:NONSENSE}",
        f"hydra.launcher.start_method={method}",
    )  # fmt: skip
    run.wait()
    assert run.status == 1
    assert "NONSENSE" in run.output or "Unable to configure" in run.output, run.output
    assert run.seconds < 60
    assert ranks() == []
    last = json.loads((run.directory / ".torchrun/0.jsonl").read_text().splitlines()[-1])
    assert (last["event"], last["error"]) == ("stopped", "SweepEndedError")
    assert last["message"] == "stopped, as the sweep ended: ValueError"


class BrokenJobs:
    """Runs jobs, and breaks when one has ended."""

    fail_fast = False

    def __init__(self) -> None:
        self.begun: list[Any] = []
        self.stopped: list[int] = []

    def lender(self, _: Any) -> Any:
        return SimpleNamespace(take=lambda _: Share(), give_back=lambda _: None)

    def check_nodes(self) -> None:
        """There are no others."""

    def start(self, begun: Any, *_: Any) -> None:
        self.begun.append(begun)

    def wait(self, _: Any) -> Iterator[Any]:
        yield self.begun.pop(0), Ended(error=ValueError("as jobs do"))

    def tries_again(self, *_: Any) -> bool:
        raise RuntimeError("our mistake")

    def stop(self, begun: Any, _: Any) -> None:
        assert begun in self.begun
        self.stopped.append(begun.number)


def test_mistake_of_ours_at_a_jobs_end(tmp_path: Path) -> None:
    """It is what is raised, and every job's events end, with that job's own error."""

    def make(waiting: Waiting) -> Any:
        begun = Begun(waiting.number, None, "", {"SECRET": "x"}, "", None)  # type: ignore[arg-type]
        assert "SECRET" not in repr(begun)
        return SimpleNamespace(begin=lambda _: begun, config=OmegaConf.create())

    jobs = BrokenJobs()
    sweep = SimpleNamespace(failed_fast=None, make=make, log_as_sweep=lambda: None)
    watch = SimpleNamespace(received=None)
    waiting = [Waiting(number, [], EventFile(tmp_path / ".torchrun", number)) for number in (0, 1)]
    with pytest.raises(RuntimeError, match="our mistake"):
        Batch(sweep, jobs, watch).run(waiting)  # type: ignore[arg-type]
    for number in (0, 1):
        assert read(tmp_path / f".torchrun/{number}.jsonl")[-1]["message"] == "as jobs do"
    assert jobs.stopped == [1]


@pytest.mark.hydra_versions
@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_callback_that_leaves(start: Start, method: str) -> None:
    """Whatever ends the app within a sweep, no rank outlives it."""
    run = start(
        "hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1,2,3]", "n=0,1", "stubborn=60",
        "+hydra.callbacks.leave._target_=leaving_callback.Leave", "hold=60",
        "hydra.launcher.shutdown_timeout=4", f"hydra.launcher.start_method={method}", nproc=2,
    )  # fmt: skip
    run.wait()
    assert processes_with(run.marker) == []
    assert run.status == 3, run.output


ACCELERATORS = """
import hydra_torchrun_launcher.machine
hydra_torchrun_launcher.machine.may_have_accelerators = lambda: True
"""
"""What an interpreter runs first that believes in a GPU, whom only torch can tell otherwise."""


def test_signal_while_devices_are_counted(sweep: Start, start: Start, tmp_path: Path) -> None:
    """A signal that comes while torch is asked ends the app as it would later."""
    (tmp_path / "sitecustomize.py").write_text(ACCELERATORS)
    (tmp_path / "never_ready.py").write_text(
        "import os, time\nopen(os.environ['RANK_RECORDS'] + '/asked', 'w')\ntime.sleep(100)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    run = sweep(
        "pooled.py", "hydra.launcher.n_jobs=auto", "hydra.launcher.preload=[never_ready]",
        "n=0,1", environ={"RANK_RECORDS": str(tmp_path / "records"), "PYTHONPATH": path},
    )  # fmt: skip
    run.await_text("Launching 2 jobs")
    run.await_file("../records/asked")
    send(run.popen, signal.SIGTERM)
    assert run.wait().status == -signal.SIGTERM, run.output
    assert "Traceback" not in run.output
    assert "Error" not in run.output


def sharing(**changes: Any) -> Sharing:
    usual = Sharing(
        n_jobs=2,
        devices=None,
        jobs_per_device=1,
        fail_fast=False,
        resume=False,
        dry_run=False,
        debug_rank=None,
        progress="none",
    )
    return replace(usual, **changes)


def test_jobs_on_cores_beside_accelerators() -> None:
    """With nproc_per_node=cpu jobs share cores, whatever accelerators there are."""
    lender = Lender(sharing(), "cpu", lambda: Accelerators(8, 8), {})
    ranks = lender.ranks("cpu")
    assert lender.problem(ranks) is None
    share = lender.take(ranks)
    assert share is not None
    assert share.devices is None
    assert share.cores is not None
    assert len(share.cores) == max(1, cpu_cores() // 2)


def test_cpu_among_jobs_that_share_accelerators() -> None:
    """It is refused with what would do."""
    lender = Lender(sharing(devices=("0", "1")), "cpu", lambda: Accelerators(8, 8), {})
    with pytest.raises(SettingsError, match=r"share accelerators.*\(0, 1\): expected gpu"):
        lender.ranks("cpu")


def test_lost_word_of_a_job(start: Start, tmp_path: Path) -> None:
    """A job whose end cannot be heard is over only when its ranks are."""
    run = start("n=0", "fails=true", "hold=2", "stubborn=60", "hydra.launcher.shutdown_timeout=5",
                nproc=2)  # fmt: skip
    run.await_file("../records/try.0.0")
    stubborn = run.processes("rank")[1]
    app = psutil.Process(run.popen.pid)
    app.rlimit(psutil.RLIMIT_NOFILE, (app.num_fds(), app.rlimit(psutil.RLIMIT_NOFILE)[1]))
    run.await_text("raise the limit of open files")
    assert not stubborn.is_running()
    assert run.wait().status == 1


@pytest.mark.parametrize("limit", ["fail_fast=true", "timeout_s=12"])
def test_own_failure_comes_first(start: Start, limit: str) -> None:
    """A job whose rank has failed, and that cannot end at once, has failed by that rank."""
    run = start(
        "hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1,2]", f"hydra.launcher.{limit}",
        "hydra.launcher.nproc_per_node=${n}", "n=1,2", "fails=true", "+holds={1:3,2:0}",
        "stubborn=60", "hydra.launcher.shutdown_timeout=16", nproc=0,
    ).wait()  # fmt: skip
    assert run.status == 1
    for number in (0, 1):
        lines = (run.directory / f".torchrun/{number}.jsonl").read_text().splitlines()
        last = json.loads(lines[-1])
        assert (last["event"], last["error"], last["rank"]) == ("failed", "ValueError", 0)
    assert "job 1 was asked to fail" in (run.directory / "1/pooled.log").read_text()
    assert run.seconds > 12


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_time_limit(start: Start, ranks: Any, method: str) -> None:
    """A job that takes too long is ended; logs and message show where its ranks stood."""
    run = start(
        "n=0,1", "+holds={0:90,1:0}", "hydra.launcher.timeout_s=12", "hydra.launcher.retries=1",
        f"hydra.launcher.start_method={method}", "hydra.launcher.redirects='1:3'", nproc=2,
    ).wait()  # fmt: skip
    assert run.status == 1
    assert [rank["job"] for rank in ranks()] == [1, 1]
    line = (APPS / "pooled.py").read_text().split("time.sleep(cfg.get")[0].count("\n") + 1
    for number in (0, 1):
        assert run.output.count(f"  rank {number}: {APPS / 'pooled.py'}:{line} in main") >= 2
        for attempt in (0, 1):
            log = run.directory / f"0/ranks/attempt_{attempt}/{number}/stderr.log"
            assert f'"{APPS / "pooled.py"}", line {line} in main' in log.read_text()
    assert "took longer than hydra.launcher.timeout_s=12 and was ended" in run.output


def test_time_limit_of_a_rank_that_is_stopped(start: Start) -> None:
    """A rank that cannot answer is named with its state, and ended all the same."""
    run = start("n=0", "hold=90", "hydra.launcher.timeout_s=8",
                "hydra.launcher.shutdown_timeout=1", nproc=2)  # fmt: skip
    run.await_file("../records/try.0.0")
    send(run.processes("rank")[1], signal.SIGSTOP)
    run.wait()
    assert run.status == 1
    assert "rank 1: unknown: its process is stopped" in run.output, run.output


@pytest.mark.hydra_versions
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_signal_stops_all(start: Start, ranks: Any, signum: int) -> None:
    """A signal stops every job that runs, and the sweep."""
    run = start("hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1]", "n=0,1,2", "hold=60")
    run.await_file("../records/try.[01].0", 2)
    send(run.popen, signum)
    assert run.wait().status == -signum, run.output
    assert ranks() == []
    assert not (run.directory / "2").exists()


@pytest.mark.parametrize("kind", ["keeper", "agent", "rank"])
def test_killed_process_of_one_job(start: Start, ranks: Any, kind: str) -> None:
    """The other job goes on."""
    run = start("hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1]", "n=0,1", "hold=3")
    run.await_file("../records/try.[01].0", 2)
    victims = run.processes("keeper")
    victim = victims[0] if kind == "keeper" else victims[0].children()[kind == "rank"]
    send(victim)
    run.wait()
    assert run.status == 1, run.output
    assert len(ranks()) == 1
    assert os.path.exists(run.directory)
