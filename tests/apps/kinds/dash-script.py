"""A script whose name is no module name, with types, a resolver, a target and a log handler of its
own.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import hydra
import torch.backends.cudnn
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from kind import record
from omegaconf import OmegaConf

torch.backends.cudnn.deterministic = True
OmegaConf.register_new_resolver("doubled", lambda number: int(number) * 2)


class Color(Enum):
    RED = 1


@dataclass
class Model:
    width: int = 3
    color: Color = Color.RED


@dataclass
class Config:
    point: int = 1
    model: Model = field(default_factory=Model)
    thing: Any = field(default_factory=lambda: {"_target_": "__main__.Thing", "number": 5})
    part: Any = field(default_factory=lambda: {"_target_": "late_sibling.Part", "number": 6})
    twice: int = "${doubled:${point}}"  # type: ignore[assignment]


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number


class Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler of the script's own."""

    def format(self, line: logging.LogRecord) -> str:
        return "OWN " + super().format(line)


ConfigStore.instance().store(name="config", node=Config)
LOGGING = {
    "version": 1,
    "handlers": {
        "own": {"class": "__main__.Handler", "stream": "ext://sys.stdout"},
        "siblings": {"class": "late_sibling.Handler", "stream": "ext://sys.stdout"},
    },
    "root": {"level": "INFO", "handlers": ["own", "siblings"]},
    "disable_existing_loggers": False,
}
ConfigStore.instance().store(group="hydra/job_logging", name="own", node=LOGGING)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(cfg: Config) -> int:
    logging.getLogger(__name__).info("said")
    config = OmegaConf.to_object(cfg)  # type: ignore[call-overload]
    return record(
        cfg,
        is_config=isinstance(config, Config) and isinstance(config.model, Model),
        is_color=cfg.model.color is Color.RED,
        is_thing=isinstance(instantiate(cfg.thing), Thing),
        part=instantiate(cfg.part).number,
        twice=cfg.twice,
    )


if __name__ == "__main__":
    main()
