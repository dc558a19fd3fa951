"""An app in an interpreter without torch."""

from __future__ import annotations

import importlib.util
from typing import Any

import hydra

find_spec = importlib.util.find_spec


def find_all_but_torch(name: str, package: str | None = None) -> Any:
    return None if name == "torch" else find_spec(name, package)


@hydra.main(version_base="1.3", config_path=None)
def main(_: Any) -> None:
    """Do nothing."""


if __name__ == "__main__":
    importlib.util.find_spec = find_all_but_torch
    main()
