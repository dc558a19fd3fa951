"""An app with a value to make small; it fails where it is told to."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig


@hydra.main(version_base="1.3", config_path="conf", config_name="optimum")
def main(cfg: Any) -> float:
    started, job = time.monotonic(), HydraConfig.get().job.num
    # The work that a job takes: by their length, jobs end in another order than they start in.
    time.sleep(cfg.hold * (3 - job % 3))
    line = {"job": job, "x": cfg.x, "started": started, "ended": time.monotonic()}
    rank = os.environ.get("RANK", "0")
    if "ALL_RANKS" in os.environ:
        Path(cfg.log, f"{job:02}.{rank}.json").write_text(json.dumps(line))
    elif rank == "0":
        Path(cfg.log, f"{job:02}.json").write_text(json.dumps(line))
    if cfg.x < cfg.fails_below:
        raise ValueError(f"x={cfg.x} is too small")
    return (cfg.x - 2) ** 2


if __name__ == "__main__":
    main()
