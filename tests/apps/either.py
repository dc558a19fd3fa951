"""The decorator under test, for apps that are run with Hydra's own and with ours."""

import os
from typing import Any

import hydra
from omegaconf import OmegaConf

import hydra_torchrun_launcher

main = hydra_torchrun_launcher.main if os.environ.get("APP_MAIN") == "ours" else hydra.main


def job_number(hydra_node: Any) -> int:
    """Return a job's number in its sweep; a single run has none and counts as 0."""
    return int(OmegaConf.select(hydra_node, "job.num", throw_on_missing=False) or 0)
