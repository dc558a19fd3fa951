"""Train a classifier of handwritten digits, in one process or in many ranks.

python train.py                                                            one process
python train.py hydra/launcher=torchrun hydra.launcher.nproc_per_node=2    two ranks
python train.py -m hydra/launcher=torchrun hydra.launcher.nproc_per_node=2 optimizer=sgd,adam
                                                                           two jobs of two ranks
torchrun --nproc_per_node=2 train.py                                       two ranks of torchrun's
srun --ntasks=2 python train.py                                            two ranks of Slurm's
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import hydra_torchrun_launcher

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class World:
    """This process's place among the ranks; a single process is rank 0 of 1."""

    rank: int
    size: int
    device: torch.device

    def sum(self, value: float) -> float:
        """Add up a number over all ranks."""
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        if dist.is_initialized():
            dist.all_reduce(total)
        return total.item()


@contextmanager
def join_world() -> Iterator[World]:
    """Join the process group where a launcher started this process, and leave it at the end."""
    if "WORLD_SIZE" not in os.environ:
        yield World(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        return
    # A GPU for each rank, or none: NCCL refuses ranks that share one.
    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device)
    finally:
        dist.destroy_process_group()


def load_data(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Return training and validation data, the same split in every rank."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train, valid = train_test_split(range(len(labels)), test_size=0.2, random_state=seed)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[valid], labels[valid])


def train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: DataLoader[tuple[Tensor, ...]],
    world: World,
) -> float:
    """Train for one epoch and return the mean loss over all ranks."""
    model.train()
    losses = []
    for images, labels in batches:
        loss = nn.functional.cross_entropy(model(images.to(world.device)), labels.to(world.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return world.sum(torch.stack(losses).mean().item()) / world.size


@torch.no_grad()
def accuracy(model: nn.Module, data: TensorDataset, world: World) -> float:
    """Return the share of right answers; each rank looks at a part of the data."""
    model.eval()
    images, labels = (part[world.rank :: world.size].to(world.device) for part in data.tensors)
    right = (model(images).argmax(dim=1) == labels).sum().item()
    return world.sum(right) / len(data)


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, epochs_done: int) -> None:
    """Write a checkpoint under another name first: whoever reads `path` finds a whole one."""
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epochs_done": epochs_done,
    }
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> int:
    """Restore a checkpoint if there is one, and return how many epochs are done."""
    if not path.exists():
        return 0
    state = torch.load(path, map_location=world.device, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    log.info("Continuing after epoch %d", state["epochs_done"])
    return int(state["epochs_done"])


def fit(cfg: DictConfig, world: World) -> float:
    """Train from the last checkpoint, or from the start, and return the validation accuracy."""
    torch.manual_seed(cfg.seed)
    train, valid = load_data(cfg.seed)
    sampler: DistributedSampler[tuple[Tensor, ...]] = DistributedSampler(
        train, num_replicas=world.size, rank=world.rank, seed=cfg.seed
    )
    batches = DataLoader(train, batch_size=cfg.batch_size, sampler=sampler)

    model: nn.Module = instantiate(cfg.model).to(world.device)
    optimizer: torch.optim.Optimizer = instantiate(cfg.optimizer)(model.parameters())
    checkpoint = Path(HydraConfig.get().runtime.output_dir) / "checkpoint.pt"
    epochs_done = load(checkpoint, model, optimizer, world)
    replica = DistributedDataParallel(model) if dist.is_initialized() else model

    for epoch in range(epochs_done, cfg.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(replica, optimizer, batches, world)
        log.info("Epoch %d: loss %.4f", epoch + 1, loss)
        if world.rank == 0:
            save(checkpoint, model, optimizer, epoch + 1)
    return accuracy(model, valid, world)


@hydra_torchrun_launcher.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    """Run one job; every rank returns the same number."""
    with join_world() as world:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        log.info("Rank %d of %d on %s, restart %s", world.rank, world.size, world.device, restarts)
        result = fit(cfg, world)
        log.info("Validation accuracy %.3f", result)
        return result


if __name__ == "__main__":
    main()
