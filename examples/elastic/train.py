"""Train on nodes that come and go; the result is as if they had not.

The same command on every node, whenever it is there:

    python train.py -m hydra/launcher=torchrun hydra.launcher.nnodes=1:3 \
        hydra.launcher.nproc_per_node=2 hydra.launcher.rdzv_endpoint=node0:29400 lr=0.1,0.05

When a node comes or goes, all ranks start again and read the last checkpoint, whatever number of
ranks has written it. Checkpoints have to be on a disk that all nodes share.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from hydra_torchrun_launcher import PreemptionNotice

log = logging.getLogger(__name__)


def load_data(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images and labels to train on, and others to validate with; alike in every rank."""
    images, labels = load_digits(return_X_y=True)
    train, valid = train_test_split(range(len(labels)), test_size=0.2, random_state=seed)
    images, labels = torch.tensor(images / 16), torch.tensor(labels)
    return (images[train], labels[train]), (images[valid], labels[valid])


class Training:
    """All that a checkpoint holds: what has been learnt, and from which samples.

    It has no part that belongs to a rank, so any number of ranks can go on from it.
    """

    def __init__(self, cfg: DictConfig, samples: int) -> None:
        """Begin at the first step."""
        torch.manual_seed(cfg.seed)
        # In float64 a sum over ranks comes out alike, but for the last digits, on any number.
        self.model = nn.Sequential(
            nn.Linear(64, cfg.hidden), nn.ReLU(), nn.Linear(cfg.hidden, 10)
        ).double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=cfg.lr, momentum=0.9)
        self.step = 0
        self.seen = torch.zeros(samples, dtype=torch.int64)
        """How often each sample has been trained on, by any rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint writes, and reads into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "seen": self.seen, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint has read."""
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.seen, self.step = state["seen"], state["step"]


class Checkpoints:
    """A job's checkpoints: folders, and a file that names the last one that is whole."""

    def __init__(self, folder: Path) -> None:
        """Begin with what is there."""
        self._folder = folder
        self._latest = folder / "latest"

    def load(self, training: Training) -> bool:
        """Read the last one, if there is one; say whether there is."""
        if not self._latest.exists():
            return False
        load({"training": training}, checkpoint_id=self._folder / self._latest.read_text())
        return True

    def save(self, training: Training) -> None:
        """Write one, all ranks together."""
        # By attempt too: a rank of a node that was cut off may be writing still.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        name = f"step_{training.step:05d}.{attempt}"
        save({"training": training}, checkpoint_id=self._folder / name)
        if dist.get_rank() == 0:
            unfinished = self._latest.with_suffix(".tmp")
            unfinished.write_text(name)
            unfinished.replace(self._latest)


def batch_of(step: int, cfg: DictConfig, samples: int) -> tuple[Tensor, bool]:
    """Return the samples of a step and whether it is the last: a matter of the seed alone."""
    steps = -(-samples // cfg.batch_size)
    epoch, place = divmod(step, steps)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(cfg.seed + epoch))
    batch = order[place * cfg.batch_size : (place + 1) * cfg.batch_size]
    return batch, step + 1 == cfg.epochs * steps


def fit(cfg: DictConfig, training: Training, images: Tensor, labels: Tensor) -> bool:
    """Train to the end, or until this rank has to leave; say whether it is the end."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    checkpoints = Checkpoints(Path(HydraConfig.get().runtime.output_dir) / "checkpoints")
    if checkpoints.load(training):
        log.info("Continuing after step %d on %d ranks", training.step, ranks)
    replica = DistributedDataParallel(training.model)
    before_step: Callable[[int, int], None] | None = instantiate(cfg.before_step)
    seen = torch.zeros_like(training.seen)  # by this rank, since the last checkpoint
    is_last = training.step > 0 and batch_of(training.step - 1, cfg, len(labels))[1]
    with PreemptionNotice() as notice:
        while not is_last:
            if before_step is not None:
                before_step(training.step, ranks)
            batch, is_last = batch_of(training.step, cfg, len(labels))
            mine = batch[rank::ranks]
            # The mean over the whole batch: DistributedDataParallel takes the ranks' mean.
            loss = cross_entropy(replica(images[mine]), labels[mine], reduction="sum")
            training.optimizer.zero_grad()
            (loss * ranks / len(batch)).backward()
            training.optimizer.step()
            training.step += 1
            seen[mine] += 1
            has_to_save = notice.anywhere()  # all ranks agree on the step
            if has_to_save or is_last or training.step % cfg.save_every == 0:
                dist.all_reduce(seen)
                training.seen += seen
                seen.zero_()
                checkpoints.save(training)
            if notice.received is not None:
                log.info("Leaving after step %d, which is saved", training.step)
                return False
    return True


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    """Run one job, and return the validation accuracy."""
    dist.init_process_group("gloo")
    (images, labels), (valid_images, valid_labels) = load_data(cfg.seed)
    training = Training(cfg, len(labels))
    accuracy = None
    if fit(cfg, training, images, labels):
        with torch.no_grad():
            right = training.model(valid_images).argmax(dim=1) == valid_labels
        accuracy = right.double().mean().item()
        least, most = training.seen.aminmax()
        log.info("Accuracy %.4f; each sample was seen %d to %d times", accuracy, least, most)
    dist.destroy_process_group()
    return accuracy


if __name__ == "__main__":
    main()
