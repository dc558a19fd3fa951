"""What the settings of one node do, seen by its ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import APPS, Sweep
from omegaconf import OmegaConf

from hydra_torchrun_launcher.config import TorchrunConf
from hydra_torchrun_launcher.errors import SettingsError
from hydra_torchrun_launcher.machine import cpu_cores, nvidia_gpus, too_many_ranks
from hydra_torchrun_launcher.node_settings import Nodes, is_own_address
from hydra_torchrun_launcher.settings import check

Run = Callable[..., Sweep]
SIZE = "+size=size"


def raw(**changes: object) -> dict[str, Any]:
    """Return settings as Hydra composes them: the defaults and some changes."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(TorchrunConf), resolve=True)
    return {**defaults, **changes}


def ranks(run: Sweep, job: int = 0) -> list[dict[str, Any]]:
    found = run.lines(f"{job}/rank*.json")
    assert found, run.output
    return found


def environs(run: Sweep, name: str) -> list[str | None]:
    return [rank["env"].get(name) for rank in ranks(run)]


TWO = {"nnodes": 2, "rdzv_endpoint": "node0"}


def nodes_of(environ: dict[str, str] | None = None, **settings: Any) -> Nodes:
    """Return the nodes that settings ask for."""
    found = check(raw(**settings), environ or {}).nodes
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("settings", "endpoint"),
    [
        (TWO, "node0:29400"),
        ({**TWO, "rdzv_endpoint": "node0:7"}, "node0:7"),
        ({**TWO, "rdzv_endpoint": "[fd00::1]:7"}, "[fd00::1]:7"),
        ({**TWO, "rdzv_endpoint": "[fd00::1]"}, "[fd00::1]:29400"),
        ({"nnodes": 2, "master_addr": "node1"}, "node1:29400"),
        ({"nnodes": 2, "master_addr": "fd00::1", "master_port": 7}, "[fd00::1]:7"),
    ],
)
def test_endpoints(settings: dict[str, Any], endpoint: str) -> None:
    """Where nodes meet, in torchrun's spellings."""
    assert nodes_of(**settings).endpoint == endpoint


@pytest.mark.parametrize(
    ("settings", "leads"),
    [
        (TWO, None),
        ({**TWO, "node_rank": 0}, True),
        ({**TWO, "node_rank": 1}, False),
        ({**TWO, "node_rank": 1, "rdzv_conf": "is_host=true"}, True),
        ({**TWO, "rdzv_conf": {"is_host": False}}, False),
    ],
)
def test_who_leads(settings: dict[str, Any], leads: bool | None) -> None:
    """Torchrun's `is_host`, then node 0, then whose address the endpoint is."""
    assert nodes_of(**settings).leads is leads


def test_times() -> None:
    """How long nodes wait for each other: torch's default, its two spellings, and ours."""
    assert nodes_of(**TWO).join_timeout_s == 600
    assert nodes_of(**TWO, rdzv_timeout=5).join_timeout_s == 5
    assert nodes_of(**TWO, rdzv_conf="join_timeout=7").join_timeout_s == 7
    assert nodes_of(**TWO).lost_after_s == 60
    assert nodes_of(**TWO).last_call_s == 30
    assert nodes_of(**TWO, rdzv_conf="last_call_timeout=0").last_call_s == 0


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"nnodes": 3}, "3"),
        ({"nnodes": "2:2"}, "2"),
        ({"nnodes": "1:3"}, "1:3"),
        ({"min_nodes": 1, "max_nodes": 3}, "1:3"),
        ({"max_nodes": 3}, "1:3"),
        ({"nnodes": "1:3", "max_nodes": 3}, "1:3"),
    ],
)
def test_how_many(settings: dict[str, Any], count: str) -> None:
    """Torchrun's spellings of a number of nodes and of a range."""
    found = nodes_of(rdzv_endpoint="node0", **settings)
    assert found.count == count
    assert found.is_elastic is (":" in count)


def test_slurms_variables() -> None:
    """`auto` counts Slurm's nodes; rank, host and port come from it where nothing else is set."""
    slurm = {
        "SLURM_JOB_ID": "12345", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_NODES": "3",
        "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "gpu[03-05]", "SLURM_NODEID": "1",
    }  # fmt: skip
    found = nodes_of(slurm, nnodes="auto")
    assert (found.count, found.rank, found.host, found.leads) == ("3", 1, "gpu03", False)
    assert found.port == nodes_of({**slurm, "SLURM_NODEID": "2"}, nnodes="auto").port
    assert found.port != nodes_of({**slurm, "SLURM_STEP_ID": "3"}, nnodes="auto").port
    assert nodes_of(slurm, nnodes="auto", rdzv_endpoint="other:9").endpoint == "other:9"
    with pytest.raises(SettingsError, match="started this app 6 times on 3 nodes"):
        nodes_of({**slurm, "SLURM_STEP_NUM_TASKS": "6"}, nnodes="auto")
    assert check(raw(nnodes="auto"), {}).nodes is None, "one, outside of Slurm"


def test_whose_address_it_is() -> None:
    """A name is this machine's if it resolves to one of its addresses."""
    assert is_own_address("localhost")
    assert is_own_address("127.0.0.1")
    assert is_own_address(socket.gethostname())
    assert not is_own_address("192.0.2.1")
    assert not is_own_address("no-such-host.invalid")


@pytest.mark.parametrize(
    "nodes",
    [
        {"nnodes": 1},
        {"nnodes": "1"},
        {"nnodes": "1:1"},
        {"min_nodes": 1, "max_nodes": 1},
        {"nnodes": 1, "max_nodes": 1},
        {"max_nodes": 1, "node_rank": 0},
    ],
)
def test_one_node(nodes: dict[str, Any]) -> None:
    """Every spelling of one node is accepted."""
    assert check(raw(**nodes), {})


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ({"nnodes": 0}, "nnodes=0: expected a number from 1"),
        ({"nnodes": "2:1"}, "contradict"),
        ({"nnodes": "1:"}, "nnodes='1:': expected"),
        ({"nnodes": 1, "min_nodes": 2}, "contradict"),
        ({"min_nodes": 2, "max_nodes": 1}, "contradict"),
        ({"nnodes": 2, "max_nodes": 2}, "rdzv_endpoint=null: 2 nodes need it"),
        ({"min_nodes": 2}, "rdzv_endpoint=null: 2 nodes need it"),
        ({"nnodes": "1:3"}, "rdzv_endpoint=null: 3 nodes need it"),
        ({"max_nodes": 2}, "rdzv_endpoint=null: 2 nodes need it"),
        ({"nnodes": "1:3", "min_nodes": 2}, "contradict"),
        ({"nnodes": "many"}, "nnodes='many': expected a number from 1, or auto"),
        ({**TWO, "node_rank": 2}, "node_rank=2: expected a number below the number of nodes, 2"),
        ({**TWO, "rdzv_conf": {"is_host": "maybe"}}, "rdzv_conf.is_host='maybe'"),
        ({**TWO, "rdzv_conf": "join_timeout=soon"}, "rdzv_conf.join_timeout='soon'"),
        ({**TWO, "rdzv_conf": "last_call_timeout=-1"}, "rdzv_conf.last_call_timeout='-1'"),
        ({**TWO, "node_timeout_s": 0}, "node_timeout_s=0: expected seconds from 1"),
        ({**TWO, "master_port": 65536}, "master_port=65536: expected a port"),
        ({"node_rank": 1}, "node_rank=1"),
        ({"node_rank": -1}, "node_rank=-1"),
        ({"rdzv_backend": "etcd"}, "rdzv_backend='etcd': expected c10d, static or null"),
        ({"rdzv_endpoint": "node:port"}, "rdzv_endpoint="),
        ({"rdzv_timeout": 0}, "rdzv_timeout=0"),
        ({"rdzv_conf": "timeout"}, "rdzv_conf='timeout'"),
        ({"numa_binding": "core"}, "numa_binding='core'"),
        ({"preload": [3]}, "preload="),
        ({"preload_env": [""]}, "preload_env="),
        ({"log_dir": ""}, "log_dir=''"),
        ({"max_restarts": float("inf")}, "max_restarts=inf"),
        ({"extra": {"numa_options": None}}, "extra="),
    ],
)
def test_what_cannot_be(nodes: dict[str, Any], message: str) -> None:
    """Contradictions and values that cannot be are refused with the setting's name and value."""
    with pytest.raises(SettingsError, match=r"hydra\.launcher\.") as caught:
        check(raw(**nodes), {})
    assert message in str(caught.value)


def test_settings_of_the_older_launcher(sweep: Run) -> None:
    """A config written for the older launcher loads and means the same."""
    run = sweep("fresh.py", SIZE, "+experiment=older", nproc=0).wait()
    assert run.status == 0, run.output
    assert environs(run, "WORLD_SIZE") == ["2", "2"]
    assert environs(run, "ROLE_NAME") == ["trainer", "trainer"]
    assert environs(run, "TORCHELASTIC_MAX_RESTARTS") == ["1", "1"]
    assert "none" not in environs(run, "TORCHELASTIC_RUN_ID")
    assert (run.directory / "logs/0/attempt_0/1/stdout.log").stat().st_size
    assert (run.directory / "logs/0/attempt_0/0/stderr.log").exists()


def test_nodes_that_scripts_add(sweep: Run) -> None:
    """`+hydra.launcher.nnodes=`, which scripts for the older launcher add, is this setting."""
    run = sweep("faults.py", "+hydra.launcher.nnodes=1", "hydra.launcher.max_nodes=1").wait()
    assert run.status == 0, run.output
    run = sweep("faults.py", "+hydra.launcher.nnodes=2", "hydra.launcher.max_nodes=2").wait()
    assert run.status == 1
    assert "hydra.launcher.rdzv_endpoint=null: 2 nodes need it" in run.output


@pytest.mark.hydra_versions
def test_variables_of_torchrun(sweep: Run) -> None:
    """PET_* variables fill what is not set; what is set wins."""
    environ = {"PET_NPROC_PER_NODE": "3", "PET_ROLE": "pet", "PET_MAX_RESTARTS": "2"}
    run = sweep("fresh.py", SIZE, "hydra.launcher.role=mine", environ=environ, nproc=0).wait()
    assert environs(run, "WORLD_SIZE") == ["3"] * 3
    assert set(environs(run, "ROLE_NAME")) == {"mine"}
    assert set(environs(run, "TORCHELASTIC_MAX_RESTARTS")) == {"2"}


def test_variable_that_is_no_number(sweep: Run) -> None:
    """A variable that cannot be a value of its setting is named with it."""
    run = sweep("faults.py", environ={"PET_MAX_RESTARTS": "many"}).wait()
    assert run.status == 1
    assert "'many'" in run.output
    assert "max_restarts" in run.output


def test_run_id(sweep: Run) -> None:
    """`rdzv_id` is the id that ranks see."""
    run = sweep("fresh.py", SIZE, "hydra.launcher.rdzv_id=mine", "hydra.launcher.nnodes=1").wait()
    assert environs(run, "TORCHELASTIC_RUN_ID") == ["mine", "mine"]


def test_virtual_local_rank(sweep: Run) -> None:
    """Every rank is local rank 0 of the one GPU that it sees; its files stay its own."""
    setting = "hydra.launcher.virtual_local_rank=true"
    run = sweep("fresh.py", SIZE, setting, environ={"CUDA_VISIBLE_DEVICES": "5,7"}).wait()
    assert environs(run, "LOCAL_RANK") == ["0", "0"]
    assert environs(run, "CUDA_VISIBLE_DEVICES") == ["5", "7"]
    assert "printed by rank 1" in (run.directory / "0/ranks/attempt_0/1/stdout.log").read_text()


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_numa_binding_without_gpus(sweep: Run, method: str) -> None:
    """Where ranks cannot be bound as they should, the job says so and starts no task."""
    run = sweep(
        "faults.py", "hydra.launcher.numa_binding=node", f"hydra.launcher.start_method={method}"
    ).wait()
    assert run.status == 1
    assert "hydra.launcher.numa_binding='node': torch cannot bind local rank" in run.output
    assert not list(run.directory.glob("0/started*"))


def test_prefix_of_teed_lines(sweep: Run) -> None:
    """Other fields of torch's LaunchConfig pass through `extra`; torchrun's variable works too."""
    run = sweep("fresh.py", SIZE, "+experiment=prefix").wait()
    assert "<default-0> printed by rank 0" in run.output, run.output
    environ = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "(${rank}) "}
    run = sweep("fresh.py", SIZE, "hydra.launcher.tee='1'", environ=environ).wait()
    assert "(0) printed by rank 0" in run.output, run.output


def test_variables_that_select_a_server(sweep: Run) -> None:
    """A job with another value of a variable that preloaded modules read gets its own server."""
    run = sweep(
        "fresh.py", SIZE, "+x=1,2", "hydra.launcher.preload=[slow_import]",
        "hydra.launcher.preload_env=[READ_WHILE_LOADING]",
        "+hydra.job.env_set.READ_WHILE_LOADING=${hydra.job.num}",
        environ={"PYTHONPATH": str(APPS)},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert [ranks(run, job)[0]["preloaded"] for job in (0, 1)] == ["0", "1"]


def test_more_ranks_than_gpus(tmp_path: Path) -> None:
    """More ranks than GPUs are a warning; without GPUs there is none."""
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/{number}").mkdir(parents=True)
    assert nvidia_gpus({}, tmp_path) == 4
    assert nvidia_gpus({"CUDA_VISIBLE_DEVICES": "2,3"}, tmp_path) == 2
    assert nvidia_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert too_many_ranks(4, {}, tmp_path) == []
    (problem,) = too_many_ranks(5, {}, tmp_path)
    assert "nproc_per_node=5: this process sees 4 GPUs" in problem
    assert too_many_ranks(5, {}, tmp_path / "elsewhere") == []
    (problem,) = too_many_ranks(100_000, {}, tmp_path)
    assert "nproc_per_node=100000: this process may use" in problem


@pytest.mark.parametrize(
    ("group", "limited"),
    [
        ("", "."),  # a container's own
        ("0::/a.slice/job.scope", "a.slice/job.scope"),
        ("12:pids:/x\n0::/a.slice/job.scope", "a.slice"),  # the one above limits it too
        ("4:cpu,cpuacct:/docker/f00", "cpu,cpuacct/docker/f00"),
        ("4:cpu,cpuacct:/docker/f00", "cpu,cpuacct"),  # within the container it is the root
        ("", "cpu"),
    ],
)
def test_cores(tmp_path: Path, group: str, limited: str) -> None:
    """A cgroup's quota counts as well as the affinity, wherever it is set."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"{group}\n")
    folder = tmp_path / "sys/fs/cgroup" / limited
    folder.mkdir(parents=True)
    everything = len(os.sched_getaffinity(0))
    assert cpu_cores(tmp_path) == everything

    def limit(quota: str, period: str) -> int:
        if limited.startswith("cpu"):
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (folder / "cpu.cfs_period_us").write_text(f"{period}\n")
        else:
            (folder / "cpu.max").write_text(f"{quota} {period}\n")
        return cpu_cores(tmp_path)

    assert limit("100000", "100000") == 1
    assert limit("50000", "100000") == 1
    assert limit("-1" if limited.startswith("cpu") else "max", "100000") == everything
