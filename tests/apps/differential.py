"""An app that writes down all that a task function can see of its job."""

import json
import logging
import os
import sys
import time
import uuid
from pathlib import Path

import either
import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd, to_absolute_path
from omegaconf import DictConfig, OmegaConf

log = logging.getLogger(__name__)


class BrokenError(ValueError):
    """What the task raises when it is asked to fail."""


@either.main(version_base=None, config_path="conf", config_name="differential")
def main(cfg: DictConfig) -> dict[str, object]:
    """Record, log, print, write a file, and return or raise."""
    rank = int(os.environ.get("RANK", "0"))
    job = HydraConfig.get()
    number = either.job_number(job)
    view = {
        "job": number,
        "cwd": os.getcwd(),
        "argv": sys.argv,
        "variable": os.environ.get("DIFFERENTIAL"),
        "config": OmegaConf.to_yaml(cfg),
        "resolved": OmegaConf.to_yaml(cfg, resolve=True),
        "flags": [OmegaConf.is_struct(cfg), OmegaConf.is_readonly(cfg)],
        "hydra": OmegaConf.to_yaml(job),
        "composed": OmegaConf.to_yaml(hydra.compose("differential", overrides=["x=7"])),
        "original_cwd": get_original_cwd(),
        "absolute_path": to_absolute_path("some/file"),
        "log_level": logging.getLogger().level,
        "handlers": [type(handler).__name__ for handler in logging.getLogger().handlers],
    }
    records = Path(os.environ["DIFFERENTIAL_RECORDS"])
    log.info("MARK task of job %d in rank %d", number, rank)
    log.debug("MARK debug")
    print("MARK printed in job", number)
    if rank == 0:
        Path(job.runtime.output_dir, "result.txt").write_text(cfg.text)
        Path("written_in_cwd.txt").write_text(cfg.text)
    record = records / f"{number}.{rank}.{uuid.uuid4().hex}"
    record.write_text(json.dumps(view))
    record.rename(record.with_suffix(".json"))
    # A rank that fails at once would end the others before they have written.
    deadline = time.monotonic() + 60
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    while len(list(records.glob(f"{number}.*.json"))) < world_size:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    if cfg.x == cfg.fail_at:
        raise BrokenError(f"asked to fail at {cfg.x}")
    return {"x": cfg.x, "dir": job.runtime.output_dir, "pair": (1, None)}


if __name__ == "__main__":
    main()
