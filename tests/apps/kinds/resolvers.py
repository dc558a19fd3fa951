"""Resolvers registered late: after the imports of others, under the guard, and in the task."""

from __future__ import annotations

from typing import Any

import hydra
from kind import record
from omegaconf import OmegaConf


@hydra.main(version_base="1.3", config_path=".", config_name="kind")
def main(cfg: Any) -> int:
    OmegaConf.register_new_resolver("in_task", lambda: "task", replace=True)
    own = OmegaConf.create({"in_task": "${in_task:}"})
    return record(cfg, after=cfg.after, under_guard=cfg.under_guard, in_task=own.in_task)


OmegaConf.register_new_resolver("after", lambda: "after")

if __name__ == "__main__":
    OmegaConf.register_new_resolver("under_guard", lambda: "under the guard")
    main()
