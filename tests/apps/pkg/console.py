"""An app that is started by a console entry point of an installed distribution."""

from __future__ import annotations

from typing import Any

import hydra
from kind import record

from .sibling import Marker


@hydra.main(version_base="1.3", config_path="conf", config_name="console")
def main(cfg: Any) -> int:
    return record(cfg, marker=Marker(cfg.point).value)
