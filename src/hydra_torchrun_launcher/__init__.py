"""Runs a Hydra app's task function in torch.distributed ranks."""

__version__ = "0.1.0"
