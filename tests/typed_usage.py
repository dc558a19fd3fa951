"""Read by the type checker: our decorator has the signature of Hydra's. Never run."""

import hydra
from omegaconf import DictConfig

import hydra_torchrun_launcher


@hydra_torchrun_launcher.main(version_base="1.3", config_path="conf", config_name="config")
def task(cfg: DictConfig) -> float:
    """Return a number."""
    return float(cfg.x)


@hydra_torchrun_launcher.main("conf", "config", "1.3")
def positional(cfg: DictConfig) -> None:
    """Take the arguments by position."""


def task_of_hydra(cfg: DictConfig) -> float:
    """Return a number."""
    return float(cfg.x)


ours = hydra_torchrun_launcher.main(version_base=None)(task_of_hydra)
theirs = hydra.main(version_base=None)(task_of_hydra)
ours = theirs
theirs = ours
hydra_torchrun_launcher.main(config_pth=None)  # type: ignore[call-arg]
hydra_torchrun_launcher.main(config_path=3)  # type: ignore[arg-type]
