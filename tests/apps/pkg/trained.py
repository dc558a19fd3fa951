"""An app in a package, started with `python -m pkg.trained`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from .sibling import Marker


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: DictConfig) -> Marker:
    record = {"package": __package__, "world": os.environ["WORLD_SIZE"]}
    name = f"rank{os.environ['RANK']}.json"
    (Path(HydraConfig.get().runtime.output_dir) / name).write_text(json.dumps(record))
    return Marker(7)


if __name__ == "__main__":
    main()
