"""A training that saves its state after every step and goes on from what it finds saved."""

import os
import signal
from pathlib import Path

import either
import rank_records
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

STEPS = 8


@either.main(version_base=None)
def main(cfg: DictConfig) -> None:
    """Train; with `disturbed`, a rank raises in one attempt and one is killed in the next."""
    dist.init_process_group("gloo")
    rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    checkpoint = Path(HydraConfig.get().runtime.output_dir, "checkpoint.pt")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"] + 1
    for step in range(first, STEPS):
        if cfg.disturbed and (step, attempt, rank) == (3, 0, 1):
            raise RuntimeError("asked to fail")
        if cfg.disturbed and (step, attempt, rank) == (5, 1, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        train(model, optimizer, torch.Generator().manual_seed(100 * step + rank))
        if rank == 0:
            save(
                checkpoint,
                {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()},
            )
        dist.barrier()
    weights = [
        weight for tensor in model.state_dict().values() for weight in tensor.flatten().tolist()
    ]
    rank_records.write("end", first=first, weights=weights)
    dist.destroy_process_group()


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: torch.Generator) -> None:
    """Take one step along the mean of the ranks' gradients."""
    x = torch.randn(16, 4, generator=data)
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()


def save(path: Path, state: dict[str, object]) -> None:
    """Write whole or not at all."""
    torch.save(state, path.with_suffix(".unfinished"))
    path.with_suffix(".unfinished").rename(path)


if __name__ == "__main__":
    main()
