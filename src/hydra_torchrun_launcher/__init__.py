"""Runs a Hydra app's task function in torch.distributed ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra_torchrun_launcher.entry import main

__all__ = ["main"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import `main` when it is asked for: servers and agents, which are no Hydra apps, are not."""
    if name == "main":
        from hydra_torchrun_launcher.entry import main

        return main
    problem = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(problem)
