"""The benchmark's task: one all-reduce over gloo. Runs alike under torchrun and the launcher."""

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig


@hydra.main(version_base="1.3", config_path=None)
def main(_: DictConfig) -> float:
    """Sum up a one of each rank."""
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return total.item()


if __name__ == "__main__":
    main()
