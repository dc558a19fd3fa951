"""Runs a Hydra app's task function in torch.distributed ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydra_torchrun_launcher.entry import main
    from hydra_torchrun_launcher.preemption import PreemptionNotice

__all__ = ["PreemptionNotice", "main"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Import what is asked for then: servers and agents, which are no Hydra apps, ask for none."""
    if name == "main":
        from hydra_torchrun_launcher.entry import main

        return main
    if name == "PreemptionNotice":
        from hydra_torchrun_launcher.preemption import PreemptionNotice

        return PreemptionNotice
    problem = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(problem)
