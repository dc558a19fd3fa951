"""Makes an interpreter believe that it has other versions than are installed."""

from __future__ import annotations

import importlib.metadata
import os

real = importlib.metadata.version
fakes = {"torch": "FAKE_TORCH", "hydra-torchrun-launcher": "FAKE_PACKAGE"}


def version(name: str) -> str:
    return os.environ.get(fakes.get(name, ""), "") or real(name)


importlib.metadata.version = version
