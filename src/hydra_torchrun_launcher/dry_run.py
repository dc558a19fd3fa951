"""What a job would be, in words: its world, its variables, and the torchrun command that comes
nearest (runs in the launching process).
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from hydra_torchrun_launcher.config import TorchrunConf
from hydra_torchrun_launcher.payload import Program
from hydra_torchrun_launcher.settings import Settings

_AS_TORCHRUN = (
    "max_restarts", "monitor_interval", "role", "signals_to_handle", "shutdown_timeout",
    "numa_binding", "virtual_local_rank", "log_dir", "redirects", "tee", "local_ranks_filter",
)  # fmt: skip
"""Settings that are options of torchrun's."""
_NOT_THE_TASKS = ("hydra/launcher", "hydra.launcher", "hydra.mode", "hydra.sweep")


def describe(
    name: str, hydra: Any, settings: Settings, ranks: int, variables: Mapping[str, str]
) -> str:
    """Return some lines about a job that is not started.

    Args:
        name: what messages call it.
        hydra: its `hydra` node.
        settings: its settings.
        ranks: how many ranks it has.
        variables: what is set for it beside torch elastic's variables.
    """
    overrides = list(hydra.overrides.task)
    sets = {**variables, **_elastics(settings, ranks)}
    if settings.launch_config.get("virtual_local_rank"):
        seen = variables.get("CUDA_VISIBLE_DEVICES") or f"0…{ranks - 1}"
        sets |= {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": f"<one of {seen} for each rank>"}
    each = "1 rank" if ranks == 1 else f"{ranks} ranks"
    lines = [
        f"{name}: {' '.join(overrides) or 'no overrides'}",
        f"  {_nodes(settings)} x {each} ({settings.start_method.name})",
        "  sets: " + " ".join(f"{k}={shlex.quote(str(v))}" for k, v in sets.items()),
        f"  like: {_command(hydra, overrides, _meeting(settings, ranks), variables)}",
    ]
    return "\n".join(lines)


def _nodes(settings: Settings) -> str:
    return "1 node" if settings.nodes is None else f"{settings.nodes.count} nodes"


def _meeting(settings: Settings, ranks: int) -> list[str]:
    """Return torchrun's options for the world."""
    nodes, each = settings.nodes, f"--nproc-per-node={ranks}"
    if nodes is None:
        return ["--standalone", each]
    endpoint = f"--rdzv-endpoint={nodes.endpoint}"
    return [f"--nnodes={nodes.count}", each, "--rdzv-backend=c10d", endpoint]


def _numbers(count: int) -> str:
    return "0" if count == 1 else f"0…{count - 1}"


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}…{most}"


def _elastics(settings: Settings, ranks: int) -> dict[str, Any]:
    """Return the variables that torch elastic sets in each rank, in short."""
    count = 1 if settings.nodes is None else settings.nodes.most
    least = 1 if settings.nodes is None else settings.nodes.least
    return {
        **dict.fromkeys(("RANK", "ROLE_RANK"), _numbers(count * ranks)),
        "LOCAL_RANK": _numbers(ranks),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), _range(least * ranks, count * ranks)),
        "LOCAL_WORLD_SIZE": ranks,
        "GROUP_RANK": _numbers(count),
        "GROUP_WORLD_SIZE": _range(least, count),
        "ROLE_NAME": settings.role,
        "MASTER_ADDR": "127.0.0.1" if count == 1 else "<node 0>",
        "MASTER_PORT": "<free>",
        "TORCHELASTIC_RUN_ID": settings.run_id or "<new>",
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": settings.max_restarts,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": "<in ranks/>",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": 1,
    }


def _command(
    hydra: Any, overrides: Sequence[str], meeting: list[str], variables: Mapping[str, str]
) -> str:
    given: Any = OmegaConf.to_container(hydra.launcher, resolve=True)
    usual: Any = OmegaConf.to_container(OmegaConf.structured(TorchrunConf), resolve=True)
    options = [*meeting]
    for name in _AS_TORCHRUN:
        if given[name] != usual[name]:
            option = f"--{name.replace('_', '-')}"
            options.append(option if given[name] is True else f"{option}={given[name]}")
    program = Program.of_this_process()
    script = ["-m", program.main_module] if program.main_module else [program.main_path or "APP"]
    own = [o for o in hydra.overrides.hydra if not o.lstrip("+~").startswith(_NOT_THE_TASKS)]
    words = [*options, *script, *_where_config_is(sys.argv[1:]), *overrides, *own]
    env = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " ".join([*env, "torchrun", *map(shlex.quote, words)])


def _where_config_is(arguments: Sequence[str]) -> list[str]:
    """Return what the command line says of that, by Hydra's flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names = ("config-path", "config-name", "config-dir")
    for name, short in zip(names, ("-cp", "-cn", "-cd"), strict=True):
        parser.add_argument(f"--{name}", short)
    try:
        given = vars(parser.parse_known_args(arguments)[0]).values()
    except (argparse.ArgumentError, SystemExit):  # the command line of a program with its own
        return []
    return [f"--{name}={value}" for name, value in zip(names, given, strict=True) if value]


def show(text: str) -> None:
    """Print it, whatever the logging is."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
