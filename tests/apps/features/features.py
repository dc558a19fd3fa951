"""An app whose ranks write down all that Hydra users set and read."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd, to_absolute_path
from omegaconf import OmegaConf

log = logging.getLogger(__name__)


def handlers() -> list[tuple[str, str, str]]:
    return [
        (
            type(each).__name__,
            Path(getattr(each, "baseFilename", "")).name,
            type(each.formatter).__name__,
        )
        for each in logging.getLogger().handlers
    ]


def set_or_not(node: Any, key: str) -> Any:
    return None if OmegaConf.is_missing(node, key) else node[key]


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: Any) -> Any:
    node = HydraConfig.get()
    record = {
        "cwd": os.getcwd(),
        "original": get_original_cwd(),
        "absolute": to_absolute_path("data"),
        "output_dir": node.runtime.output_dir,
        "config_name": node.job.config_name,
        "job_name": node.job.name,
        "job_num": set_or_not(node.job, "num"),
        "job_id": set_or_not(node.job, "id"),
        "dirname": node.job.override_dirname,
        "env_set": OmegaConf.to_container(node.job.env_set),
        "mode": str(node.mode),
        "config": OmegaConf.to_yaml(cfg, resolve=True),
        "environment": {key: os.environ.get(key) for key in ("SET", "COPIED")},
        "level": logging.getLogger().level,
        "own_level": logging.getLogger("features.quiet").getEffectiveLevel(),
        "handlers": handlers(),
        "choices": {k: v for k, v in node.runtime.choices.items() if k != "hydra/launcher"},
        "composed": OmegaConf.to_yaml(hydra.compose(node.job.config_name, ["point=9"])),
    }
    log.info("said by the task")
    logging.getLogger("features.quiet").debug("said quietly")
    name = f"record.rank{os.environ.get('RANK', '0')}.json"
    Path(node.runtime.output_dir, name).write_text(json.dumps(record))
    return cfg.point


if __name__ == "__main__":
    main()
