"""Sweeps on several hosts, with real processes in network namespaces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import Sweep
from hosts import Hosts, make_hosts, wait_for

from hydra_torchrun_launcher.errors import LookError
from hydra_torchrun_launcher.hub import MUST_AGREE, Hub
from hydra_torchrun_launcher.job_logs import JobLogs
from hydra_torchrun_launcher.lines import line_pair
from hydra_torchrun_launcher.sweep_state import Reader


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts."""
    yield from make_hosts(tmp_path_factory.mktemp("network"), 3)


@pytest.fixture
def hosts(network: Hosts) -> Iterator[Hosts]:
    """The hosts, of whose apps nothing may be left at the end of the test."""
    yield network
    network.end()


def notes(folder: Path) -> list[dict[str, Any]]:
    """Return what ranks have noted, by job, attempt and rank."""
    found = [
        json.loads(line)
        for file in folder.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return sorted(found, key=lambda note: (note["job"] or 0, note["attempt"], note["rank"]))


def statuses(apps: list[Sweep]) -> list[int]:
    """Wait for apps, and return their exit statuses."""
    return [app.wait().status for app in apps]


def said(apps: list[Sweep]) -> str:
    """Return what apps have said, for messages."""
    return "\n".join(f"== {app.read_output()}" for app in apps)


def test_one_sweep(hosts: Hosts, tmp_path: Path) -> None:
    """Both nodes run the same jobs, with one config and one directory."""
    apps = hosts.start_all(
        f"records={tmp_path}", "x=1,2", "colour=BLUE", "hydra.sweep.dir=out/${now:%S-%f}",
        "+hydra.job.env_set.SET='of job ${hydra.job.num} at ${now:%f}'",
    )  # fmt: skip
    assert statuses(apps) == [0, 0], said(apps)
    found = notes(tmp_path)
    assert [(note["x"], note["rank"], note["host"]) for note in found] == [
        (1, 0, "host1"), (1, 1, "host2"), (2, 0, "host1"), (2, 1, "host2"),
    ]  # fmt: skip
    assert {note["sum"] for note in found} == {3.0}
    assert {tuple(note["kinds"]) for note in found} == {("Settings", "Optimizer")}
    for first, second in (found[:2], found[2:]):
        for fact in ("config", "overrides", "output_dir", "run_id", "master", "set"):
            assert first[fact] == second[fact], fact
        assert first["set"].startswith(f"of job {first['job']} at ")
    assert found[0]["run_id"] != found[2]["run_id"]
    assert found[0]["cwd"] != found[1]["cwd"]
    assert not list(apps[1].directory.glob("out")), "the follower has a sweep directory of its own"


SEVERAL_KINDS = (
    "{'x': 1, 7: <Colour.BLUE: 2>, 'path': PosixPath('a/b'), 'raw': b'\\x00\\xff', 'nan': nan}"
)


def test_rank_0_on_the_follower(hosts: Hosts, tmp_path: Path) -> None:
    """The node that leads need not have rank 0; the value of rank 0 comes to it all the same."""
    show = "+hydra.callbacks.show={_target_: nodes_callback.Show}"
    apps = [
        hosts.start(
            host, f"records={tmp_path}", "x=1", "hydra.sweep.dir=out", show,
            f"hydra.launcher.rdzv_conf={{is_host:{host == 1}}}",
            environ={"PET_NODE_RANK": str(2 - host)},
        )
        for host in (1, 2)
    ]  # fmt: skip
    assert statuses(apps) == [0, 0], said(apps)
    assert [(note["rank"], note["host"]) for note in notes(tmp_path)] == [
        (0, "host2"),
        (1, "host1"),
    ]
    assert {note["master"] for note in notes(tmp_path)} == {hosts.address(2)}
    assert SEVERAL_KINDS in apps[0].output
    assert "returned" not in apps[1].output, "callbacks ran on the follower"


def test_value_that_cannot_be_sent(hosts: Hosts, tmp_path: Path) -> None:
    """A value that is no data, on a follower, fails the job and says why."""
    apps = [
        hosts.start(
            host, f"records={tmp_path}", "what=unsendable",
            f"hydra.launcher.rdzv_conf={{is_host:{host == 1}}}",
            f"hydra.launcher.node_rank={2 - host}",
        )
        for host in (1, 2)
    ]  # fmt: skip
    assert statuses(apps) == [1, 1], said(apps)
    assert "The task function's return value cannot be sent" in apps[0].output
    assert "type builtins.object" in apps[0].output


@pytest.mark.parametrize("on", [0, 1])
@pytest.mark.parametrize("what", ["raise", "die"])
def test_failing_rank(hosts: Hosts, tmp_path: Path, what: str, on: int) -> None:
    """A rank that fails on either node fails the job on both; the sweep goes on."""
    apps = hosts.start_all(f"records={tmp_path}", "x=1,2", f"what={what}", f"on={on}")
    assert statuses(apps) == [1, 1], said(apps)
    how = "ValueError: told to, x=1" if what == "raise" else "was killed by SIGKILL"
    place = f"rank {on} (local rank 0 on host{on + 1}, attempt 0)"
    for app in apps:
        assert how in app.output, said(apps)
        assert place in app.output
    assert [(note["x"], note["rank"]) for note in notes(tmp_path)] == [
        (1, 0), (1, 1), (2, 0), (2, 1),
    ]  # fmt: skip


def test_restarts(hosts: Hosts, tmp_path: Path) -> None:
    """A job whose rank fails starts again on all nodes, as often as it may, on either node."""
    apps = hosts.start_all(
        f"records={tmp_path}", "what=raise", "on=0,1", "attempts=2",
        "hydra.launcher.max_restarts=2", "hydra.sweep.dir=out",
    )  # fmt: skip
    assert statuses(apps) == [0, 0], said(apps)
    assert [(note["job"], note["attempt"], note["rank"]) for note in notes(tmp_path)] == [
        (job, attempt, rank) for job in (0, 1) for attempt in (0, 1, 2) for rank in (0, 1)
    ]
    assert "attempt 1 failed, its ranks start again (restart 2 of 2)" in apps[0].output


def test_too_many_failures(hosts: Hosts, tmp_path: Path) -> None:
    """The number of restarts is the job's, not a node's: they fail in turn."""
    apps = hosts.start_all(f"records={tmp_path}", "what=in turn", "hydra.launcher.max_restarts=1")
    assert statuses(apps) == [1, 1], said(apps)
    assert [(note["attempt"], note["rank"]) for note in notes(tmp_path)] == [
        (0, 0), (0, 1), (1, 0), (1, 1),
    ]  # fmt: skip


def test_late_failure(hosts: Hosts, tmp_path: Path) -> None:
    """A rank that fails when the other node's ranks have left fails the job on both."""
    apps = hosts.start_all(f"records={tmp_path}", "what=late", "hydra.sweep.dir=out")
    assert statuses(apps) == [1, 1], said(apps)
    for app in apps:
        assert "ValueError: late" in app.output, said(apps)
        assert "rank 1 (local rank 0 on host2, attempt 0)" in app.output
        assert "has completed" not in app.output
    events = (apps[0].directory / "out/.torchrun/0.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in events] == ["queued", "started", "failed"]


def test_no_shared_disk(hosts: Hosts, tmp_path: Path) -> None:
    """Each node has the output directory on its own disk; the follower's has its ranks' files."""
    own = tmp_path / "own"
    own.mkdir()
    apps = hosts.start_all(
        f"records={own}", f"hydra.sweep.dir={own}/out", "hydra.launcher.redirects='3'", private=own
    )
    assert statuses(apps) == [0, 0], said(apps)
    disks = [hosts.state / f"host{number}" for number in (1, 2)]
    assert [len(notes(disk)) for disk in disks] == [1, 1]
    assert {note["output_dir"] for disk in disks for note in notes(disk)} == {f"{own}/out/0"}
    assert (disks[0] / "out/0/.hydra/config.yaml").exists()
    assert list((disks[1] / "out/0/ranks/node_1/attempt_0/0").iterdir())
    assert not list((disks[0] / "out/0/ranks").glob("node_1"))
    reader = Reader(str(disks[0] / "out"))
    assert reader.read().jobs[0].hosts == ("host1", "host2")
    with pytest.raises(LookError, match="it ran on host2, which may have files of its own there"):
        JobLogs(reader, 0, 1, follow=False)


def test_shared_disk(hosts: Hosts, tmp_path: Path) -> None:
    """Where nodes share a disk, none writes into another's files."""
    out = tmp_path / "out"
    apps = hosts.start_all(
        f"records={tmp_path}", f"hydra.sweep.dir={out}", "hydra.launcher.redirects='3'"
    )
    assert statuses(apps) == [0, 0], said(apps)
    names = {str(path.relative_to(out)) for path in out.rglob("*.log") if "ranks" in str(path)}
    assert names == {
        f"0/ranks/node_{node}/attempt_0/0/{stream}.log"
        for node in (0, 1)
        for stream in ("stdout", "stderr")
    }


@pytest.mark.parametrize("single", [False, True], ids=["sweep", "single run"])
def test_slurm(hosts: Hosts, tmp_path: Path, single: bool) -> None:
    """`nnodes: auto` reads all from Slurm's variables; nothing else has to be set."""
    nodes = "host[1-2]"
    slurm = {
        "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NTASKS": "2",
    }  # fmt: skip
    apps = [
        hosts.start(
            host, f"records={tmp_path}", "x=3", flags=() if single else ("-m",),
            nodes="auto", endpoint=None,
            environ={
                **slurm, "SLURM_NODEID": str(host - 1), "SLURM_PROCID": str(host - 1),
                **({"OURS": "1"} if single else {}),
            },
        )
        for host in (2, 1)
    ]  # fmt: skip
    assert statuses(apps) == [0, 0], said(apps)
    assert [(note["rank"], note["host"]) for note in notes(tmp_path)] == [
        (0, "host1"),
        (1, "host2"),
    ]


def test_kubernetes(hosts: Hosts, tmp_path: Path) -> None:
    """The variables of training operators say all."""
    apps = [
        hosts.start(
            host, f"records={tmp_path}", "x=3", flags=(), nodes=None, endpoint=None,
            environ={
                "PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(host - 1),
                "PET_MASTER_ADDR": "host1", "PET_MASTER_PORT": "29500", "OURS": "1",
                # as operators for older versions set them, by node
                "RANK": str(host - 1), "WORLD_SIZE": "2", "MASTER_ADDR": "host1",
                "MASTER_PORT": "29500",
            },
        )
        for host in (1, 2)
    ]  # fmt: skip
    assert statuses(apps) == [0, 0], said(apps)
    assert [note["host"] for note in notes(tmp_path)] == ["host1", "host2"]


@pytest.mark.parametrize("what", ["nothing", "raise"])
def test_single_run(hosts: Hosts, tmp_path: Path, what: str) -> None:
    """A single run of `main` has one config and one directory on all nodes, and one end."""
    apps = hosts.start_all(f"records={tmp_path}", f"what={what}", flags=(), environ={"OURS": "1"})
    assert statuses(apps) == ([0, 0] if what == "nothing" else [1, 1]), said(apps)
    first, second = notes(tmp_path)
    for fact in ("config", "overrides", "output_dir", "run_id", "master"):
        assert first[fact] == second[fact], fact
    assert second["host"] == "host2"


def test_three_nodes(hosts: Hosts, tmp_path: Path) -> None:
    """Nodes that are not numbered are counted by their names, in any order of starting."""
    apps = hosts.start_all(f"records={tmp_path}", hosts=(3, 2, 1), nodes=3)
    assert statuses(apps) == [0, 0, 0], said(apps)
    assert [note["host"] for note in notes(tmp_path)] == ["host1", "host2", "host3"]


def test_ipv6(hosts: Hosts, tmp_path: Path) -> None:
    """Nodes meet by IPv6."""
    for host in (1, 2):
        hosts.in_namespace(host, "addr", "replace", f"fd00::{host}/64", "dev", "eth0", "nodad")
    apps = hosts.start_all(f"records={tmp_path}", endpoint="'[fd00::1]:29400'")
    assert statuses(apps) == [0, 0], said(apps)
    assert {note["master"] for note in notes(tmp_path)} == {"fd00::1"}


def test_several_interfaces(hosts: Hosts, tmp_path: Path) -> None:
    """`local_addr` says by which address the others reach a node."""
    for host in (1, 2):
        hosts.in_namespace(host, "addr", "replace", f"10.99.0.{host}/24", "dev", "eth0")
    apps = [
        hosts.start(host, f"records={tmp_path}", f"hydra.launcher.local_addr=10.99.0.{host}")
        for host in (1, 2)
    ]
    assert statuses(apps) == [0, 0], said(apps)
    assert {note["master"] for note in notes(tmp_path)} == {"10.99.0.1"}


def test_names_that_do_not_resolve(hosts: Hosts, tmp_path: Path) -> None:
    """Nodes whose names nobody can resolve, their own included, meet by address."""
    table = hosts.state / "hosts"
    before = table.read_text()
    table.write_text("127.0.0.1 localhost\n")
    try:
        apps = hosts.start_all(f"records={tmp_path}", endpoint=f"{hosts.address(1)}:29400")
        assert statuses(apps) == [0, 0], said(apps)
    finally:
        table.write_text(before)
    assert {note["sum"] for note in notes(tmp_path)} == {3.0}


def test_optuna(hosts: Hosts, tmp_path: Path) -> None:
    """Optuna on the leader decides; the follower runs those jobs, and has no study of its own."""
    pytest.importorskip("optuna", reason="hydra-optuna-sweeper is not installed")
    apps = [
        hosts.start(
            host, "hydra/sweeper=optuna", "hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=1",
            "hydra.sweeper.sampler.n_startup_trials=2", "hydra.sweeper.direction=minimize",
            "hydra.sweeper.study_name=study", "hydra.sweep.dir=out",
            f"hydra.sweeper.sampler.seed={host}", "x=interval(-5,5)",
            f"log={tmp_path}", app="optimum.py", environ={"ALL_RANKS": "1"},
        )
        for host in (1, 2)
    ]  # fmt: skip
    assert statuses(apps) == [0, 0], said(apps)
    found = {
        rank: [
            json.loads(path.read_text())["x"] for path in sorted(tmp_path.glob(f"*.{rank}.json"))
        ]
        for rank in (0, 1)
    }
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert "A new study created" in apps[0].output
    assert (apps[0].directory / "out/optimization_results.yaml").exists()
    assert "study" not in apps[1].output
    assert not (apps[1].directory / "out").exists()


@pytest.mark.parametrize("fact", sorted(MUST_AGREE))
def test_what_all_nodes_need_alike(fact: str) -> None:
    """A node that differs in any of these is turned away, and the words say in what."""
    facts = {**dict.fromkeys(MUST_AGREE, "1"), "host": "a", "node_rank": None}
    facts |= {"most": 2, "is_elastic": False}
    ours, theirs = line_pair()
    hub = Hub(ours, {"facts": facts, "host": "", "port": 0, "lost_after_s": 1})
    assert hub.objection({**facts, "host": "b"}) == ""
    why = hub.objection({**facts, fact: "other", "host": "b"})
    assert MUST_AGREE[fact].format("other") in why
    assert "b has" in why
    ours.close()
    theirs.close()


def test_jobs_at_once(hosts: Hosts, tmp_path: Path) -> None:
    """Jobs of several nodes run at once, each with its own part of every machine."""
    apps = hosts.start_all(f"records={tmp_path}", "x=1,2,3", "what=hold", "hydra.launcher.n_jobs=2")
    wait_for(lambda: len(notes(tmp_path)) == 4, "two jobs at work", apps)
    (tmp_path / "go").touch()
    assert statuses(apps) == [0, 0], said(apps)
    assert [(note["x"], note["host"]) for note in notes(tmp_path)] == [
        (x, host) for x in (1, 2, 3) for host in ("host1", "host2")
    ]


def test_time_limit(hosts: Hosts, tmp_path: Path) -> None:
    """A job whose time is up ends on all nodes, and it is said where each rank stood."""
    apps = hosts.start_all(f"records={tmp_path}", "what=hold", "hydra.launcher.timeout_s=4")
    assert statuses(apps) == [1, 1], said(apps)
    assert "took longer than hydra.launcher.timeout_s=4" in apps[0].output
    for rank in (0, 1):
        assert re.search(rf"rank {rank}: .*nodes.py:\d+", apps[0].output), said(apps)


def test_retries(hosts: Hosts, tmp_path: Path) -> None:
    """A job that is tried again is on all nodes."""
    apps = hosts.start_all(f"records={tmp_path}", "what=once", "hydra.launcher.retries=1")
    assert statuses(apps) == [0, 0], said(apps)
    assert len(notes(tmp_path)) == 4


def test_resume(hosts: Hosts, tmp_path: Path) -> None:
    """What has completed is taken over by the leader, and the nodes run the rest."""
    overrides = (f"records={tmp_path}", "stamp=s", f"hydra.sweep.dir={tmp_path}/out")
    assert statuses(hosts.start_all(*overrides, "x=1")) == [0, 0]
    apps = hosts.start_all(*overrides, "x=1,2", "hydra.launcher.resume=true")
    assert statuses(apps) == [0, 0], said(apps)
    assert [note["x"] for note in notes(tmp_path)] == [1, 1, 2, 2]
    assert "completed before" in apps[0].output


def test_dry_run(hosts: Hosts, tmp_path: Path) -> None:
    """It says what would be on all nodes, and meets none of them."""
    app = hosts.start(1, f"records={tmp_path}", "hydra.launcher.dry_run=true")
    assert statuses([app]) == [0]
    assert "2 nodes x 1 rank" in app.output
    assert "WORLD_SIZE=2" in app.output
    assert "torchrun --nnodes=2 --nproc-per-node=1 --rdzv-backend=c10d" in app.output
