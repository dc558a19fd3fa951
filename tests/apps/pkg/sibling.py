"""A type of the package, and a task function for a start from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Marker:
    value: int


def task(cfg: Any) -> int:
    return int(cfg.x) + 1
