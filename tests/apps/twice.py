"""An app that runs two task functions one after the other."""

from __future__ import annotations

import os
from pathlib import Path

import rank_records
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import hydra_torchrun_launcher


@hydra_torchrun_launcher.main(version_base="1.3", config_path=None)
def first(_: DictConfig) -> None:
    Path("in_first").touch()
    rank_records.write("first", output_dir=HydraConfig.get().runtime.output_dir)


@hydra_torchrun_launcher.main(version_base="1.3", config_path=None)
def second(_: DictConfig) -> None:
    assert not os.path.exists("in_first"), "the first one's directory stayed"
    rank_records.write("second", output_dir=HydraConfig.get().runtime.output_dir)


if __name__ == "__main__":
    first()
    assert not HydraConfig.initialized()
    second()
