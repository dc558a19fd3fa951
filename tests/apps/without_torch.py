"""An app in an interpreter without torch, or with an old one."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from typing import Any

import hydra

find_version = importlib.metadata.version
find_spec = importlib.util.find_spec


def find_all_but_torch(name: str, package: str | None = None) -> Any:
    return None if name == "torch" else find_spec(name, package)


def find_old_torch(name: str) -> str:
    return "2.3.1+cu121" if name == "torch" else find_version(name)


@hydra.main(version_base="1.3", config_path=None)
def main(_: Any) -> None:
    """Do nothing."""


if __name__ == "__main__":
    if os.environ.get("TORCH_IS") == "old":
        importlib.metadata.version = find_old_torch
    else:
        importlib.util.find_spec = find_all_but_torch
    main()
