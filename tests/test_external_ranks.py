"""Ranks that torchrun or Slurm started, in an app by `hydra_torchrun_launcher.main`: one config,
one output directory, and nobody waits for ever.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import hydra
import psutil
import pytest
from conftest import APPS, HANG_S, Sweep, send
from running import read_records

from hydra_torchrun_launcher.launched import find_place

pytestmark = pytest.mark.hydra_versions
FAKES = Path(__file__).parent / "fakes"
Start = Callable[..., Sweep]
RESTARTS = "--max-restarts=2"


def torchrun(ranks: int, *options: str) -> str:
    return f"-m torch.distributed.run --nproc_per_node={ranks} --log-dir=logs {' '.join(options)}"


def srun(*per_node: int) -> str:
    tasks = ",".join(map(str, per_node))
    return f"{FAKES / 'srun.py'} {tasks} {sys.executable}"


def two_nodes(ranks: int, *options: str) -> str:
    return f"{FAKES / 'two_nodes.py'} {ranks} {'+'.join(('--max-restarts=0', *options))}"


@pytest.fixture
def start(sweep: Start, tmp_path: Path) -> Start:
    """Start the app by a starter; its output directory is `out` unless a test says otherwise."""
    records = tmp_path / "records"
    records.mkdir()

    def run(starter: str, *overrides: str, environ: dict[str, str] | None = None) -> Sweep:
        command = f"-B {starter} {APPS / 'started.py'}"
        own = {"RANK_RECORDS": str(records), **(environ or {})}
        return sweep(command, *overrides, launcher=None, nproc=0, flags=(), sweep_dir=None,
                     environ=own)  # fmt: skip

    return run


def seen(tmp_path: Path, count: int) -> list[dict[str, Any]]:
    found = sorted(read_records(tmp_path / "records"), key=lambda record: record["rank"])
    assert [record["rank"] for record in found] == list(range(count))
    return found


def await_stopped(run: Sweep) -> psutil.Process:
    """Return the rank that stops itself, once it has."""
    run.await_file("stopped")
    rank = psutil.Process(int((run.directory / "stopped").read_text()))
    deadline = time.monotonic() + HANG_S
    while rank.status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return rank


def await_end(rank: psutil.Process, limit_s: float = HANG_S) -> None:
    """Wait until a rank has ended, whether its starter has noticed or not."""
    deadline = time.monotonic() + limit_s
    with suppress(psutil.NoSuchProcess):
        while rank.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.02)


STARTERS = {
    "torchrun 2": (torchrun(2), 2),
    "torchrun 4": (torchrun(4), 4),
    "torchrun on two nodes": (two_nodes(1), 2),
    "srun": (srun(2), 2),
    "srun on two nodes": (srun(2, 1), 3),
}


@pytest.mark.parametrize("starter", STARTERS, ids=lambda name: name.replace(" ", "_"))
def test_ranks_share_config_and_directory(start: Start, tmp_path: Path, starter: str) -> None:
    """Rank 0 composes and writes Hydra's files; every rank sees its values with its own types."""
    command, count = STARTERS[starter]
    run = start(
        command, "size.width=7", "size.color=BLUE", "hydra.job.chdir=true", "reduce=true",
        "hydra.run.dir='outputs/of/${now:%f}'",
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    ranks = seen(tmp_path, count)
    first = ranks[0]
    (directory,) = run.directory.glob("outputs/*/*")
    for number, rank in enumerate(ranks):
        assert rank["output_dir"] == rank["cwd"] == str(directory)
        for name in ("config", "moment", "once", "hydra", "resolved_dir", "set_by_job"):
            assert rank[name] == first[name], name
        assert rank["size"] == ["Size", 7, "BLUE", "somewhere"]
        assert rank["size_is_ours"]
        assert rank["mine"] == str(number)  # read where it is
        assert rank["total"] == sum(range(count))
        log = "started.log" if number == 0 else f"started.rank{number}.log"
        assert f"told by rank {number}" in (directory / log).read_text()
        assert (directory / log).read_text().count("told by rank") == 1
    assert (directory / ".hydra/config.yaml").exists()
    assert run.output.count("after main") == count
    expected = {"WORLD_SIZE": str(count), "MASTER_ADDR": first["env"]["MASTER_ADDR"],
                "MASTER_PORT": first["env"]["MASTER_PORT"]}  # fmt: skip
    for rank in ranks:
        assert {name: rank["env"][name] for name in expected} == expected
    places = [(rank["env"]["GROUP_RANK"], rank["env"]["LOCAL_RANK"],
               rank["env"]["LOCAL_WORLD_SIZE"]) for rank in ranks]  # fmt: skip
    if starter == "srun on two nodes":
        assert places == [("0", "0", "2"), ("0", "1", "2"), ("1", "0", "1")]


def test_callbacks_run_in_rank_0(start: Start) -> None:
    """The run's callbacks are called once, with rank 0's value."""
    run = start(
        torchrun(2), "+hydra.callbacks.recorder._target_=recorder.Recorder", "hydra.sweep.dir=."
    ).wait()
    assert run.status == 0, run.output
    assert [(job["status"], job["text"]) for job in run.jobs()] == [("COMPLETED", "3")]


@pytest.mark.parametrize("shared", ["0", "1"])
@pytest.mark.parametrize(
    "starter", [torchrun(2, RESTARTS), two_nodes(1, RESTARTS)], ids=["one_node", "two_nodes"]
)
def test_restarted_ranks_meet_the_same_directory(
    start: Start, tmp_path: Path, starter: str, shared: str
) -> None:
    """Ranks that torchrun starts again go on where the first were, wherever its store is."""
    run = start(
        starter, "fail_until=2", "hold=true", "hydra.run.dir='out $ \"${now:%f}\" of'",
        environ={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": shared},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    found = read_records(tmp_path / "records")
    assert sorted((record["failures"], record["rank"]) for record in found) == [
        (failures, rank) for failures in range(3) for rank in range(2)
    ]
    assert len({record["output_dir"] for record in found}) == 1
    for name in ("moment", "once"):
        assert len({record[name] for record in found}) == 1, "a value changed with a restart"
    assert len(list(run.directory.glob("out*"))) == 1


@pytest.mark.parametrize("starter", [torchrun(2), srun(2)], ids=["torchrun", "srun"])
def test_failing_rank(start: Start, starter: str) -> None:
    """A rank's exception is shown once, without frames of ours, and torchrun names it too; it also
    stands in the rank's log.
    """
    run = start(starter, "fail_until=9").wait()
    assert run.status == 1
    assert run.output.count("\nTraceback (most recent call last):\n  File") >= 1
    assert run.output.count('    raise ValueError("asked to fail")') == (
        1 if "srun" in starter else 2  # torchrun's summary
    )
    assert "hydra_torchrun_launcher/" not in run.output
    assert run.output.count("Error executing job in rank 1\nTraceback") == 1
    (log,) = run.directory.glob("outputs/*/*/started.rank1.log")
    assert log.read_text().count("ValueError: asked to fail") == 1


def test_failing_rank_0(start: Start) -> None:
    """Rank 0's exception is shown as Hydra shows it, once, and logged once."""
    run = start(torchrun(1), "fail_until=9", "fails_in=0").wait()
    assert run.status == 1
    assert "Error executing job with overrides: ['fail_until=9', 'fails_in=0']" in run.output
    (log,) = run.directory.glob("outputs/*/*/started.log")
    assert log.read_text().count("ValueError: asked to fail") == 1


def test_limit_that_is_no_number(start: Start) -> None:
    """A limit that cannot work is refused in a sentence."""
    run = start(srun(2), environ={"HYDRA_TORCHRUN_MEETING_S": "soon"}).wait()
    assert run.status == 1
    assert run.output.count("HYDRA_TORCHRUN_MEETING_S=soon: expected seconds") == 2
    assert "Traceback" not in run.output


LEAVING = {
    "typo": (["sise=3"], 1, "Could not override 'sise'"),
    "help": (["--help"], 0, "is powered by Hydra"),
    "cfg": (["--cfg", "job"], 0, "fail_until: 0"),
    "multirun": (["-m", "size.width=1,2"], 1, "start it once, without"),
    "mode": (["hydra.mode=MULTIRUN", "size.width=1,2"], 1, "start it once, without"),
    "setting": (["--config-dir", "not there"], 1, "not found"),
}


@pytest.mark.parametrize("starter", [torchrun(2), srun(2)], ids=["torchrun", "srun"])
@pytest.mark.parametrize("case", LEAVING)
def test_runs_that_come_to_no_task(start: Start, tmp_path: Path, starter: str, case: str) -> None:
    """What Hydra says instead of running is said once, and all ranks leave with one status."""
    arguments, status, said = LEAVING[case]
    run = start(starter, *arguments).wait()
    assert run.status == status, run.output
    assert run.output.count(said) == 1, run.output
    assert read_records(tmp_path / "records") == []
    assert not list(run.directory.glob("outputs"))
    assert not list(run.directory.glob("multirun"))
    if status and "srun" not in starter:
        assert run.output.count("exitcode  : 1 ") == 2, run.output


def test_chosen_launcher_starts_no_ranks_in_ranks(start: Start, tmp_path: Path) -> None:
    """An app that chooses our launcher runs in the ranks that are there."""
    run = start(torchrun(2), "hydra/launcher=torchrun", "hydra.launcher.nproc_per_node=4").wait()
    assert run.status == 0, run.output
    seen(tmp_path, 2)


@pytest.mark.parametrize("starter", [torchrun(2), srun(2)], ids=["torchrun", "srun"])
def test_app_started_by_a_rank_is_no_rank(start: Start, tmp_path: Path, starter: str) -> None:
    """An app that a rank runs as a program of its own waits for nobody."""
    run = start(starter, "+nested=true").wait()
    assert run.status == 0, run.output
    assert len(read_records(tmp_path / "records")) == 3


@pytest.mark.parametrize("starter", [torchrun(2), srun(2)], ids=["torchrun", "srun"])
def test_two_task_functions_in_a_row(sweep: Start, tmp_path: Path, starter: str) -> None:
    """A script may call several decorated functions: each is a job of all ranks."""
    run = sweep(
        f"-B {starter} {APPS / 'twice.py'}", "hydra.run.dir='out/${now:%f}'",
        "hydra.job.chdir=true", launcher=None, nproc=0, flags=(), sweep_dir=None,
        environ={"RANK_RECORDS": str(tmp_path)},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    found = read_records(tmp_path)
    assert [(each["kind"], each["rank"]) for each in found] == [
        ("first", 0), ("first", 1), ("second", 0), ("second", 1),
    ]  # fmt: skip
    directories = [each["output_dir"] for each in found]
    assert directories[0] == directories[1] != directories[2] == directories[3]


def framed(message: Any) -> bytes:
    text = json.dumps(message).encode()
    return struct.pack("<Q", len(text)) + text


def greet(port: int, message: Any) -> bytes:
    """Say something to whoever listens, as soon as somebody does; return the answer."""
    deadline = time.monotonic() + HANG_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port), HANG_S) as line:
                line.sendall(framed(message))
                return line.recv(1000)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_ports_of_others(start: Start, tmp_path: Path) -> None:
    """A port at which a stranger listens, silent or of our kind, is passed over by all ranks, and a
    stranger that comes to rank 0's is taken for no rank.
    """
    job = f"{os.getpid()}{time.monotonic_ns() % 1000}"
    environ = {"SLURM_JOB_ID": job}
    place = find_place({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0",
                        **environ})  # fmt: skip
    assert place is not None
    silent, stranger, free = place.candidates[:3]
    with (
        socket.create_server(("127.0.0.1", silent)),
        socket.create_server(("127.0.0.1", stranger)) as other,
    ):
        run = start(srun(2), "reduce=true", environ=environ)
        other.settimeout(HANG_S)
        connection, _ = other.accept()
        with connection:
            assert greet(free, {"token": "another", "rank": 1}) == b""
            connection.recv(1000)
            connection.sendall(framed({"token": "another"}))
        run.wait()
    assert run.status == 0, run.output
    assert {rank["env"]["MASTER_PORT"] for rank in seen(tmp_path, 2)} == {str(free)}


def test_rank_0_that_dies_composing(start: Start) -> None:
    """The others leave at once and say that rank 0 was lost."""
    run = start(srun(3), "+x=${dangerous:}", "hydra.run.dir=${x}",
                environ={"RANK_0_DIES_COMPOSING": "1"}).wait()  # fmt: skip
    assert run.status != 0
    assert run.output.count("rank 0 was lost before the task function could start") == 2, run.output


def test_rank_that_dies_before_the_task(start: Start, tmp_path: Path) -> None:
    """Under srun, which ends no other task, the rest wait no longer than the limit."""
    environ = {"RANK_1_DIES_AT_IMPORT": "1", "HYDRA_TORCHRUN_MEETING_S": "5"}
    run = start(srun(3), environ=environ).wait()
    assert run.status == 1
    assert "not all ranks came within 5 s" in run.output
    assert not list(run.directory.glob("outputs"))
    assert read_records(tmp_path / "records") == []


def test_rank_0_that_never_comes(start: Start) -> None:
    """Ranks look for rank 0 no longer than the limit."""
    environ = {"RANK_0_DIES_AT_IMPORT": "1", "HYDRA_TORCHRUN_MEETING_S": "3"}
    run = start(srun(2), environ=environ).wait()
    assert run.status == 1
    assert "rank 1 found no rank 0 at 127.0.0.1" in run.output


def test_interrupt_while_ranks_wait(start: Start) -> None:
    """A rank that waits for rank 0 answers Ctrl-C."""
    run = start(srun(2), environ={"RANK_0_DIES_AT_IMPORT": "1"})
    run.await_text("dies at import")
    waiting = psutil.Process(run.popen.pid).children()[1]
    send(waiting, signal.SIGINT)
    run.wait()


def test_configs_of_another_structure(start: Start, tmp_path: Path) -> None:
    """Where a rank composes something else, the keys are named, and no rank runs the task."""
    environ = {"RANK_0_MORE": '{"a": 1, "shared": 1}', "RANK_1_MORE": '{"b": 1, "shared": [1]}'}
    run = start(srun(2), "+more=more", environ=environ).wait()
    assert run.status == 1
    line = next(line for line in run.output.splitlines() if "another structure" in line)
    for part in ("rank 1: ", "more.a is only in rank 0's", "more.b is only in this rank's",
                 "more.shared is a int in rank 0's and a list here"):  # fmt: skip
        assert part in line
    assert read_records(tmp_path / "records") == []


def test_resolver_whose_value_is_no_data(start: Start, tmp_path: Path) -> None:
    """It is named, once, and no rank runs the task."""
    run = start(srun(2), "+x=${no_data:}").wait()
    assert run.status == 1
    said = "The resolver 'no_data', whose values ranks share (use_cache=True), has one that cannot "
    assert run.output.count(f"{said}be sent to the other ranks: type builtins.object is no") == 1
    assert read_records(tmp_path / "records") == []


@pytest.mark.parametrize("starter", [torchrun(2), srun(2)], ids=["torchrun", "srun"])
def test_rank_0_that_is_stopped(start: Start, starter: str) -> None:
    """A stopped rank 0 is waited for no longer than the limit, and the wait can be interrupted."""
    environ = {"STOPS_COMPOSING": "0", "HYDRA_TORCHRUN_MEETING_S": "5"}
    run = start(starter, "+x=${stopping:}", "hydra.run.dir=${x}", environ=environ)
    stopped = await_stopped(run)
    run.await_text("no answer within 5 s")
    send(stopped)
    assert run.wait().status != 0


def test_interrupt_while_rank_0_is_stopped(start: Start) -> None:
    """Ctrl-C ends a rank that waits for a stopped one."""
    run = start(srun(2), "+x=${stopping:}", "hydra.run.dir=${x}", environ={"STOPS_COMPOSING": "0"})
    stopped = await_stopped(run)
    (waiting,) = [p for p in psutil.Process(run.popen.pid).children() if p != stopped]
    send(waiting, signal.SIGINT)
    await_end(waiting)
    send(stopped)
    run.wait()


def test_rank_that_is_lost_while_the_others_wait(start: Start) -> None:
    """A rank that is killed when it has come is named at once."""
    run = start(srun(3), "+x=${stopping:}", "hydra.run.dir=${x}", environ={"STOPS_COMPOSING": "0"})
    stopped = await_stopped(run)
    send(psutil.Process(run.popen.pid).children()[2])
    send(stopped, signal.SIGCONT)
    assert run.wait().status != 0
    assert "rank 2 was lost before the task function could start" in run.output


def test_rank_that_waits_for_another_to_leave_hears_a_signal(start: Start) -> None:
    """Rank 0 lets the others leave first, unless somebody ends it."""
    run = start(srun(2), "typo=1", environ={"RANK_1_STOPS_LEAVING": "1"})
    stopped = await_stopped(run)
    (waiting,) = [p for p in psutil.Process(run.popen.pid).children() if p != stopped]
    send(waiting, signal.SIGTERM)
    await_end(waiting, 15)  # it would leave by itself after 30 s
    send(stopped, signal.SIGCONT)
    assert run.wait().status != 0


def test_rank_0_that_leaves_at_once(start: Start) -> None:
    """A rank 0 that ends hard when its task is done takes no word from the others."""
    for _ in range(3):
        run = start(srun(3), environ={"ENDS_HARD": "1"}).wait()
        assert run.status == 0, run.output


def test_large_config(start: Start, tmp_path: Path) -> None:
    """A config may be larger than a message of torch's store."""
    run = start(torchrun(2), environ={"LARGE": str(12_000_000)}).wait()
    assert run.status == 0, run.output
    seen(tmp_path, 2)


def test_rank_that_cannot_log(start: Start, tmp_path: Path) -> None:
    """What a rank cannot set up for the task is said, and no rank runs the task."""
    run = start(srun(2), "hydra.run.dir=blocked", environ={"BLOCKS": "started.rank1.log"}).wait()
    assert run.status == 1
    assert "rank 1: Unable to configure handler" in run.output, run.output
    assert "Traceback" not in run.output
    assert read_records(tmp_path / "records") == []


@pytest.mark.parametrize("starter", [torchrun(2), srun(2)], ids=["torchrun", "srun"])
def test_closed_standard_error(tmp_path: Path, starter: str) -> None:
    """Ranks whose standard error is closed run as others do."""
    records = tmp_path / "records"
    records.mkdir()
    command = f"{sys.executable} {starter} {APPS / 'started.py'} 2>&-"
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, timeout=HANG_S, capture_output=True, check=False,
        env={**os.environ, "RANK_RECORDS": str(records)},
    )  # fmt: skip
    assert done.returncode == 0, done
    seen(tmp_path, 2)


def test_call_with_a_config_is_no_run(start: Start, tmp_path: Path) -> None:
    """A decorated function that a task calls with a config is called, and no more."""
    run = start(torchrun(2), "+calls=true").wait()
    assert run.status == 0, run.output
    assert [each["x"] for each in read_records(tmp_path / "records") if each["kind"] == "call"] == [
        3,
        3,
    ]


@pytest.mark.skipif(hydra.__version__ >= "1.4", reason="its rerun is an ordinary run")
@pytest.mark.parametrize("starter", [torchrun(2), srun(2)], ids=["torchrun", "srun"])
def test_rerun_is_refused(start: Start, tmp_path: Path, starter: str) -> None:
    """A rerun from a pickle, which each rank would make by itself, is refused."""
    config = "hydra.experimental.callbacks.PickleJobInfoCallback"
    first = start(torchrun(1), f"+hydra.callbacks.p._target_={config}", "hydra.run.dir=out").wait()
    assert first.status == 0, first.output
    pickle = first.directory / "out/.hydra/config.pickle"
    before = len(read_records(tmp_path / "records"))
    run = start(starter, "--experimental-rerun", str(pickle)).wait()
    assert run.status == 1, run.output
    assert run.output.count("--experimental-rerun of hydra-core 1.3 runs in no rank") == 1
    assert len(read_records(tmp_path / "records")) == before


@pytest.mark.parametrize("variable", ["RANK", "MASTER_PORT"])
def test_variables_that_are_no_numbers(sweep: Start, tmp_path: Path, variable: str) -> None:
    """A place that cannot be understood is refused in a sentence."""
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29400"}
    run = sweep(
        "started.py", launcher=None, nproc=0, flags=(), sweep_dir=None,
        environ={**place, variable: "x", "RANK_RECORDS": str(tmp_path)},
    ).wait()  # fmt: skip
    assert run.status == 1
    assert f"{variable}='x': expected a whole number" in run.output
    assert "Traceback" not in run.output


@pytest.mark.soak
def test_twenty_runs(start: Start, tmp_path: Path) -> None:
    """Each of 20 runs under torchrun has one directory and one value."""
    for _ in range(20):
        run = start(torchrun(2)).wait()
        assert run.status == 0, run.output
        assert len(list(run.directory.glob("outputs/*/*"))) == 1
    found = read_records(tmp_path / "records")
    values = {(record["output_dir"], record["moment"], record["once"]) for record in found}
    assert (len(found), len(values)) == (40, 20)
