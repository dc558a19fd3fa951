"""A single run, in which Hydra would use no launcher, is stopped; other runs notice no guard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import APPS, Sweep
from hydra.experimental.callback import Callback

from hydra_torchrun_launcher.guard import Hook

Run = Callable[..., Sweep]
pytestmark = pytest.mark.hydra_versions


def quiet(run: Sweep) -> Sweep:
    """Wait for a run in which nothing but the app itself speaks."""
    run.wait()
    assert "arning" not in run.output
    assert "Traceback" not in run.output
    return run


def test_single_run_is_stopped_before_any_work(sweep: Run) -> None:
    """Without -m the app does not run alone: every remedy is named, nothing is written."""
    run = quiet(sweep("guarded.py", flags=[], sweep_dir="sweep"))
    assert run.status == 1
    for remedy in (
        "-m",
        "hydra.mode=MULTIRUN",
        "hydra.launcher.guard=false",
    ):
        assert remedy in run.output
    assert "ran in rank" not in run.output
    assert {path.name for path in run.directory.iterdir()} == {"console.txt"}


def test_rank_of_torchrun_gets_other_advice(sweep: Run) -> None:
    """In a rank that torchrun started, -m would be no remedy."""
    torchrun = (
        f"-B -m torch.distributed.run --nproc_per_node=1 --log-dir=logs {APPS / 'guarded.py'}"
    )
    run = sweep(torchrun, flags=[], sweep_dir=None).wait()
    assert run.status == 1
    assert "torchrun has started this process as a rank already" in run.output
    assert "ran in rank" not in run.output


@pytest.mark.parametrize(
    ("flags", "override", "said"),
    [
        (["-m"], "hydra.launcher.nproc_per_node=1", "ran in rank 0"),
        ([], "hydra.mode=MULTIRUN", "ran in rank 0"),
        ([], "hydra.launcher.guard=false", "ran in rank None"),
    ],
)
def test_run_that_goes_on(sweep: Run, flags: list[str], override: str, said: str) -> None:
    """A multirun, by flag or by mode, and a single run with the guard off, are as ever."""
    run = quiet(sweep("guarded.py", override, flags=flags, nproc=1))
    assert run.status == 0, run.output
    assert said in run.output


def test_app_that_chooses_the_launcher_can_run_alone(sweep: Run) -> None:
    """An app with the launcher in its defaults list can be run alone on purpose."""
    for guard, status in (("true", 1), ("false", 0)):
        run = sweep(
            "features/features.py", f"hydra.launcher.guard={guard}", launcher=None, nproc=0,
            flags=["-cn", "in_defaults"], environ={"PYTHONPATH": str(APPS)},
        ).wait()  # fmt: skip
        assert run.status == status, run.output


@pytest.mark.parametrize("package", ["job", "hydra", "all"])
def test_config_can_be_shown_and_resolved(sweep: Run, package: str) -> None:
    """The guard's entry can be printed, resolved or not."""
    run = quiet(sweep("guarded.py", flags=["--cfg", package, "--resolve"]))
    assert run.status == 0, run.output


def test_every_hook_of_hydra_is_there() -> None:
    """A hook that Hydra calls and that is missing would be a warning in every run."""
    assert {name for name in dir(Callback) if name.startswith("on_")} == {h.name for h in Hook}
