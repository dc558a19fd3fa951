"""Sweepers get the values of jobs that run at once as they get those of jobs that run in turn."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import Sweep
from running import read_records

Start = Callable[..., Sweep]

OPTUNA = (
    "hydra/sweeper=optuna", "hydra.sweeper.n_trials=9", "hydra.sweeper.n_jobs=3",
    "hydra.sweeper.direction=minimize", "hydra.sweeper.sampler.seed=7",
    "hydra.sweeper.sampler.n_startup_trials=3", "hydra.sweeper.study_name=study",
    "x=interval(-5,5)",
)  # fmt: skip


@pytest.fixture
def optimise(sweep: Start, tmp_path: Path) -> Callable[..., tuple[Sweep, list[dict[str, Any]]]]:
    """Run the app; return the run and what its jobs were."""

    def run(launcher: str, *overrides: str) -> tuple[Sweep, list[dict[str, Any]]]:
        log = tmp_path / f"log_{launcher}"
        log.mkdir()
        own = ("hydra.launcher.n_jobs=2",) if launcher == "torchrun" else ()
        nproc = 1 if own else 0
        done = sweep("optimum.py", *overrides, *own, f"log={log}", launcher=launcher, nproc=nproc)
        return done.wait(), read_records(log)

    return run


def best(run: Sweep) -> Any:
    return yaml.safe_load((run.directory / "optimization_results.yaml").read_text())


@pytest.mark.parametrize("failing", [(), ("fails_below=-1", "hydra.sweeper.max_failure_rate=1.0")])
def test_optuna(optimise: Any, failing: tuple[str, ...]) -> None:
    """What is tried after the first jobs depends on every value: it is what it is in turn."""
    pytest.importorskip("optuna", reason="hydra-optuna-sweeper is not installed")
    expected, in_turn = optimise("basic", *OPTUNA, *failing)
    assert expected.status == 0, expected.output
    run, jobs = optimise("torchrun", *OPTUNA, "hold=0.5", *failing)
    assert run.status == 0, run.output
    assert [(job["job"], job["x"]) for job in jobs] == [(job["job"], job["x"]) for job in in_turn]
    assert len(jobs) == 9
    assert best(run) == best(expected)
    failed = sum(job["x"] < -1 for job in jobs) if failing else 0
    assert run.output.count("Failed experiment") == failed
    assert bool(failed) == bool(failing)
    assert any(a["started"] < b["started"] < a["ended"] for a in jobs for b in jobs)


def test_optuna_ends_at_failures(optimise: Any) -> None:
    """Optuna's sweeper raises the job's own error where more fail than the user allows."""
    pytest.importorskip("optuna", reason="hydra-optuna-sweeper is not installed")
    run, jobs = optimise("torchrun", *OPTUNA, "fails_below=100")
    assert run.status == 1
    assert len(jobs) == 3
    assert re.search(r"ValueError: x=.* is too small", run.output)


@pytest.mark.hydra_versions
def test_batches_of_the_basic_sweeper(optimise: Any) -> None:
    """A batch ends before the next begins, and a failed job ends the sweep after its batch."""
    batches = ("hydra.sweeper.max_batch_size=3", "x=0,1,-3,3,4,5,6", "hold=0.2")
    run, jobs = optimise("torchrun", *batches)
    assert run.status == 0, run.output
    assert [job["x"] for job in jobs] == [0, 1, -3, 3, 4, 5, 6]
    for one in jobs:
        for other in jobs:
            if one["job"] // 3 < other["job"] // 3:
                assert one["ended"] < other["started"]


@pytest.mark.hydra_versions
def test_failed_job_reaches_the_basic_sweeper(optimise: Any) -> None:
    """Its batch is completed, then the sweep ends with the job's error, as in turn."""
    batches = ("hydra.sweeper.max_batch_size=3", "x=0,-3,1,2,3", "fails_below=-1", "hold=0.1")
    run, jobs = optimise("torchrun", *batches)
    assert run.status == 1
    assert [job["x"] for job in jobs] == [0, -3, 1]
    assert "ValueError: x=-3 is too small" in run.output
