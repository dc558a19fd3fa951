"""The example trains alike, whoever starts its ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Sweep

EXAMPLE = Path(__file__).parents[1] / "examples/digits/train.py"
SRUN = Path(__file__).parent / "fakes/srun.py"
OURS = ["hydra/launcher=torchrun", "hydra.launcher.nproc_per_node=2"]
WAYS = {
    "sweep": ("", ["-m", *OURS]),
    "single run": ("", OURS),
    "torchrun": ("-m torch.distributed.run --nproc_per_node=2 --log-dir=logs", []),
    "srun": (f"{SRUN} 2 {sys.executable}", []),
}
_found: dict[str, str] = {}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.replace(" ", "_"))
def test_same_accuracy_by_every_way(sweep: Callable[..., Sweep], way: str) -> None:
    """Two ranks reach the same accuracy by each of the ways to start them."""
    starter, arguments = WAYS[way]
    run = sweep(
        f"-B {starter} {EXAMPLE}", "epochs=2", "optimizer=adam", launcher=None, nproc=0,
        flags=arguments, sweep_dir=None,
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    (accuracy,) = set(re.findall(r"Validation accuracy (\d\.\d+)", run.output))
    _found[way] = accuracy
    assert set(_found.values()) == {accuracy}
    assert float(accuracy) > 0.5
    assert len(list(run.directory.glob("*/*/*/**/checkpoint.pt"))) == 1
