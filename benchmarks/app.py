"""The benchmark's task: one all-reduce over gloo. Runs alike under torchrun and the launcher.

BENCHMARK_MAIN=ours chooses our decorator, for single runs.
"""

import os
import time

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig

import hydra_torchrun_launcher

OURS = os.environ.get("BENCHMARK_MAIN") == "ours"
decorator = hydra_torchrun_launcher.main if OURS else hydra.main


@decorator(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> float:
    """Sum up a one of each rank, and stay as long as a longer job would."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    time.sleep(cfg.get("hold_s", 0))  # the work of a longer job
    return total.item()


if __name__ == "__main__":
    main()
