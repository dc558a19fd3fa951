"""What a user may set under `hydra.launcher`.

Imported by every Hydra app in the environment (through the door): no heavy imports here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class StartMethod(Enum):
    """How a rank's process comes to be."""

    forkserver = "forkserver"
    """Forked from a server of ours that has imported torch and no code of the user's."""
    spawn = "spawn"
    """A new interpreter for each rank, as torchrun's."""
    fork = "fork"
    """Forked from the launching process, whose memory it sees."""


def _pet(name: str, default: str = "null") -> Any:
    """Default to a variable that torchrun reads too (training operators of Kubernetes set it)."""
    return f"${{oc.env:PET_{name},{default}}}"


@dataclass
class TorchrunConf:
    """Settings of `hydra/launcher=torchrun`; names are torchrun's wherever it has one.

    Each job reads them from its own composed config, so an experiment file may set them. The
    variables `PET_*`, which torchrun reads, are the defaults of the settings of the same name.
    """

    _target_: str = "hydra_plugins.hydra_torchrun_launcher.TorchrunLauncher"

    guard: bool = True
    """Stop a single run (without -m), in which Hydra would use no launcher and say nothing."""

    nproc_per_node: Any = _pet("NPROC_PER_NODE", "auto")
    """Ranks per node: a number from 1, or `gpu`, `cpu`, or `auto` (accelerators if there are any,
    else CPU cores)."""

    nnodes: Any = _pet("NNODES")
    """Nodes of every job, each of which is started with the same command; null: 1. `auto`: as many
    as Slurm has given to this step or job, or 1 outside of Slurm. One value for the sweep."""

    min_nodes: int | None = None
    """The older launcher's spelling of the same: the least number of nodes."""

    max_nodes: int | None = None
    """The largest number of nodes."""

    node_rank: int | None = _pet("NODE_RANK")
    """This node's rank among the nodes. Null: the leader is node 0, or Slurm counts them, or they
    are counted by their names. Node 0 leads, unless rdzv_conf says is_host."""

    rdzv_backend: str | None = _pet("RDZV_BACKEND")
    """`c10d` or `static`, which mean the same here: nodes meet at rdzv_endpoint. One node needs no
    meeting and listens on a free port of the loopback interface, whatever the settings say."""

    rdzv_endpoint: str | None = _pet("RDZV_ENDPOINT")
    """Where nodes meet, as in `node0:29400`: the leader's name or address, and a port that is free
    there (29400 where none is given). Null: master_addr and master_port, or Slurm's first host."""

    master_addr: str | None = _pet("MASTER_ADDR")
    """The same without the port, where rdzv_endpoint is null."""

    master_port: int | None = _pet("MASTER_PORT")
    """The port that goes with master_addr; null: 29400."""

    rdzv_id: str | None = _pet("RDZV_ID")
    """The job's id for torch elastic (TORCHELASTIC_RUN_ID). Null or `none`: a new one for each.
    Nodes with another one are turned away."""

    rdzv_timeout: int | None = None
    """Seconds that nodes wait for each other, from 1; unused with one node. Null or -1: torch's,
    600."""

    rdzv_conf: Any = _pet("RDZV_CONF")
    """Further settings of the meeting, a mapping or `name=value,…`: `is_host` says whether this
    node leads, `join_timeout` or `timeout` what rdzv_timeout says."""

    node_timeout_s: float = 60
    """Seconds without a word from a node after which it is lost, and with it the job and the sweep;
    unused with one node."""

    local_addr: str | None = _pet("LOCAL_ADDR")
    """This node's name or address for the others. Null: the one by which it reaches the leader."""

    max_restarts: int = _pet("MAX_RESTARTS", "0")
    """How often a job whose rank failed is started again, all ranks of it; torchrun's default."""

    monitor_interval: float = _pet("MONITOR_INTERVAL", "0.1")
    """Seconds between torch elastic's looks at the group of nodes. A rank's end is seen at once."""

    role: str = _pet("ROLE", "default")
    """Name of the ranks' role: the variable ROLE_NAME and the prefix of teed lines."""

    signals_to_handle: str = _pet("SIGNALS_TO_HANDLE", "'SIGTERM,SIGINT,SIGHUP,SIGQUIT'")
    """Signals that stop the job and the sweep and are passed on to the ranks. One that was ignored
    when the app was started (nohup ignores SIGHUP) stays ignored."""

    shutdown_timeout: int | None = _pet("SHUTDOWN_TIMEOUT")
    """Seconds that ranks have to leave once they were asked to, before they are killed. Null: the
    variable TORCH_ELASTIC_SHUTDOWN_TIMEOUT, or 30."""

    numa_binding: str | None = None
    """Cores for each rank, near its GPU: `node`, `socket`, `exclusive` or `core-complex`; needs
    GPUs. Null: any core."""

    virtual_local_rank: bool = _pet("VIRTUAL_LOCAL_RANK", "false")
    """Give each rank LOCAL_RANK 0 and only its own GPU to see."""

    start_method: StartMethod = _pet("START_METHOD", "forkserver")
    """forkserver, spawn or fork."""

    preload: list[str] = field(default_factory=list)
    """Modules that the fork server imports besides torch: heavy libraries, not your own code."""

    preload_env: list[str] = field(default_factory=list)
    """Variables that those modules read while they load. Jobs with other values of them get a
    server of their own, as they do for OMP_*, MKL_*, LD_*, PYTHON*, TORCH_* and their like."""

    log_dir: str | None = _pet("LOG_DIR")
    """Folder for the ranks' output, a subfolder per job. Null: `ranks` in the job's output
    directory."""

    redirects: str = _pet("REDIRECTS", "'0'")
    """Streams that go to files only: 0 none, 1 stdout, 2 stderr, 3 both; for all ranks, or by local
    rank as in `0:3,12:1`."""

    tee: str = _pet("TEE", "'0'")
    """Streams that go to files and to the console; values as for `redirects`."""

    local_ranks_filter: str = _pet("LOCAL_RANKS_FILTER", "'0'")
    """Local ranks whose output may reach the console, as in `0,1`; the others write to their files.
    Empty: all."""

    n_jobs: Any = 1
    """Jobs of a sweep that run at once: a number from 1, or `auto`: as many as fit on the
    accelerators, or on the CPU cores where there are none. One value for the sweep."""

    devices: Any = None
    """Accelerators that the sweep may use, a list of names as the visibility variable
    (CUDA_VISIBLE_DEVICES or its like) takes them. Null: all that this process sees. One value for
    the sweep."""

    jobs_per_device: int = 1
    """How many jobs may share an accelerator. One value for the sweep."""

    fail_fast: bool = False
    """Once a job has failed, stop those that run and start no more. One value for the sweep."""

    retries: int = 0
    """How often a job that failed runs again, in new processes."""

    resume: bool = False
    """Take over what has completed in the sweep's directory with the same overrides and config, and
    run the rest. One value for the sweep."""

    timeout_s: float | None = None
    """Seconds that a job may take, from the start of its processes; then it is ended and has
    failed, and its ranks' Python stacks are in their logs. Each retry has the whole time. Null: no
    limit."""

    progress: str = "auto"
    """What is shown of a running sweep: `plain`: a line for each job that has completed; `auto`: on
    a terminal also a table of its jobs, below all other output; `none`: neither. One value for the
    sweep."""

    dry_run: bool = False
    """Say what each job would be, and start none."""

    debug_rank: int | None = None
    """The rank that has the terminal, for a debugger: standard input and Ctrl-C are its own, all
    others write to their files, and there is no time limit. One job at a time."""

    extra: dict[str, Any] = field(default_factory=dict)
    """Any other field of the installed torch's LaunchConfig, by its name."""
