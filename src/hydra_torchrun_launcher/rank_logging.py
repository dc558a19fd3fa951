"""Hydra's job logging in a rank, never two processes in one file (runs in each rank)."""

from __future__ import annotations

import importlib
import inspect
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import hydra.utils
from hydra.core.utils import configure_log
from omegaconf import OmegaConf

from hydra_torchrun_launcher.job_files import rank_log_name


def configure(hydra_config: Any, rank: tuple[int, str], whitelist: Any) -> None:
    """Apply the job's logging, with a file of its own for every rank but the first.

    Args:
        hydra_config: HydraConfig's config.
        rank: the global rank, and the job's label where it shares its directory.
        whitelist: what hydra-core 1.4 may execute; None on 1.3.
    """
    node = hydra_config.hydra
    if node.job_logging is not None and node.job_logging.get("root") is None:
        # Then Hydra configures nothing for a job, and what it has for itself stays in force.
        apply(node.hydra_logging, node.verbose, whitelist, rank)
    apply(node.job_logging, node.verbose, whitelist, rank)


def apply(job_logging: Any, verbose: Any, whitelist: Any, rank: tuple[int, str] = (0, "")) -> None:
    """Apply a job's logging so that no file is truncated that the job has already written to.

    Args:
        job_logging: Hydra's node of that name.
        verbose: Hydra's node of that name.
        whitelist: what hydra-core 1.4 may execute; None on 1.3.
        rank: the global rank, and the job's label where it shares its directory.
    """
    if job_logging is not None:
        plain = OmegaConf.to_container(job_logging, resolve=True)
        for handler in plain.get("handlers", {}).values():  # type: ignore[union-attr]
            if isinstance(handler.get("filename"), str):
                handler["filename"] = rank_log_name(handler["filename"], *rank)
                if str(handler.get("mode", "a"))[0] in "wx":
                    handler["mode"] = "a" + handler["mode"][1:]
        job_logging = OmegaConf.create(plain, flags={"allow_objects": True})
    if "execution_whitelist" in inspect.signature(configure_log).parameters:  # hydra-core >= 1.4
        configure_log(job_logging, verbose, execution_whitelist=whitelist)  # type: ignore[call-arg,unused-ignore]
    else:
        configure_log(job_logging, verbose)


def active_whitelist() -> Any:
    """Return what hydra-core 1.4 may execute here; None on 1.3.

    1.4 has no public way to ask; test_seams.py fails if this one moves.
    """
    with suppress(ModuleNotFoundError):
        policy: Any = importlib.import_module("hydra._internal.execution_policy")
        return policy._get_active_execution_whitelist()  # noqa: SLF001
    return None


def execution_whitelist(whitelist: Any) -> AbstractContextManager[Any]:
    """Return the context in which hydra-core 1.4 runs a task; 1.3 has none."""
    enter = getattr(hydra.utils, "execution_whitelist", None)
    return nullcontext() if enter is None else enter(whitelist, reset=True)
