"""A job as data for processes that compose its config themselves: other nodes, and ranks that
torchrun or Slurm started.

Structure and types are the receiver's own, every value is the sender's.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict, read_write

from hydra_torchrun_launcher import overlay, payload, tagged
from hydra_torchrun_launcher.errors import TransportError

Configs = tuple[Any, Any]
"""A task's config, and the one with the `hydra` node in which Hydra's interpolations are resolved:
each has a cache of its own."""


def caches_of(configs: Configs) -> list[dict[str, Any]]:
    """Evaluate what resolvers with use_cache=True give, and return it.

    Raises:
        TransportError: one has given what is no data.
    """
    for each in configs:
        payload.evaluate_cached_resolvers(each)
    return [_shared_values(each) for each in configs]


def set_caches(configs: Configs, caches: Any) -> None:
    """Have resolvers with use_cache=True give what they gave elsewhere."""
    for each, cache in zip(configs, caches, strict=False):
        # OmegaConf adds what is not there yet, by resolver.
        OmegaConf.set_cache(each, defaultdict(dict, cache))


def publish(configs: Configs, hydra: Any, working_dir: str, environ: Any) -> str:
    """Return a job as text.

    Args:
        configs: the task's config and the whole.
        hydra: the `hydra` node.
        working_dir: where the task runs.
        environ: the variables that it sees.

    Raises:
        TransportError: something in it is no data.
    """
    return tagged.dumps({
        "config": overlay.raw(configs[0]),
        "hydra": overlay.raw(hydra),
        "resolvers": caches_of(configs),
        "overrides": [*hydra.overrides.hydra, *hydra.overrides.task],
        "working_dir": working_dir,
        "env_set": _shared_variables(overlay.raw(hydra.job.env_set), environ),
    })  # fmt: skip


def lay(job: dict[str, Any], config: Any, stack: ExitStack) -> Configs:
    """Give a config that was composed here the values of a job, and put HydraConfig in force.

    Args:
        job: what `publish` made, read.
        config: composed from the job's overrides.
        stack: sets HydraConfig back when it is unwound.

    Raises:
        StartError: the config has another structure here.
    """
    overlay.lay({**job["config"], "hydra": job["hydra"]}, config)
    stack.callback(setattr, HydraConfig.instance(), "cfg", HydraConfig.instance().cfg)
    HydraConfig.instance().set_config(config)
    task_config = copy.deepcopy(config)
    with read_write(task_config), open_dict(task_config):
        del task_config["hydra"]
    configs = (task_config, config)
    set_caches(configs, job["resolvers"])
    return configs


def enter_directory(job: dict[str, Any], output_dir: str) -> str | None:
    """Make a job's output directory; return it if the task runs there."""
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    return output_dir if job["working_dir"] == os.path.realpath(output_dir) else None


def _shared_values(config: Any) -> dict[str, Any]:
    """Return what resolvers with use_cache=True have given for a config, by their names."""
    cache: dict[str, Any] = OmegaConf.get_cache(config)
    for name, values in cache.items():
        try:
            tagged.dumps(values)
        except TransportError as error:
            problem = (
                f"The resolver {name!r}, whose values ranks share (use_cache=True), has one that "
                f"cannot be sent to the other ranks: {str(error).rpartition(': ')[2]}"
            )
            raise TransportError(problem) from None
    return cache


def _shared_variables(env_set: dict[str, Any], environ: Any) -> dict[str, str]:
    """Return what the job has set that all must see alike: Hydra keeps it nowhere else."""
    mark = payload.cached_resolvers_mark()
    return {
        name: environ[name]
        for name, value in env_set.items()
        if isinstance(value, str) and mark.search(value)
    }
