"""Long sweeps: what a job costs does not grow, and no device waits for a job that would fit."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Sweep
from running import read_records

Start = Callable[..., Sweep]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(1800)]

JOBS = 1000


def ends(run: Sweep) -> list[float]:
    """Return when jobs completed, in order."""
    files = (run.directory / ".torchrun").glob("*.jsonl")
    lasts = [json.loads(file.read_text().splitlines()[-1]) for file in files]
    assert {last["event"] for last in lasts} == {"completed"}
    return sorted(last["time"] for last in lasts)


@pytest.mark.parametrize("at_once", [1, 2])
def test_a_thousand_jobs(sweep: Start, tmp_path: Path, at_once: int) -> None:
    """The last hundred cost what the first hundred did, within a fifth."""
    records = tmp_path / "records"
    records.mkdir()
    run = sweep("empty.py", f"n=range({JOBS})", f"hydra.launcher.n_jobs={at_once}",
                "~hydra.callbacks.meter",  # it collects garbage after each job
                nproc=1, environ={"RANK_RECORDS": str(records)}).wait(1500)  # fmt: skip
    assert run.status == 0, run.output
    assert sorted(record["n"] for record in read_records(records)) == list(range(JOBS))
    times = ends(run)
    assert len(times) == JOBS
    first, last = times[100] - times[0], times[-1] - times[-101]
    print(f"n_jobs={at_once}: first hundred {first:.1f} s, last hundred {last:.1f} s")
    assert last <= 1.2 * first


DEVICES = 4


def gaps(jobs: list[dict[str, Any]], devices: int) -> list[float]:
    """Return what lay between a job's end and the next one's task, where one waited that fits."""
    found = []
    for job in jobs:
        at = job["ended"]
        free = devices - sum(
            other["size"] for other in jobs if other["started"] < at < other["ended"]
        )
        later = [other for other in jobs if other["started"] > at]
        if any(other["size"] <= free for other in later):
            found.append(min(other["started"] for other in later) - at)
    return found


def test_no_device_waits(sweep: Start, tmp_path: Path) -> None:
    """A device gets its next job, if one waits that fits, within twice what a start takes.

    A start is what lies between two jobs of a sweep that runs them in turn.
    """

    def run(name: str, sizes: list[int], *settings: str) -> list[dict[str, Any]]:
        (records := tmp_path / name).mkdir()
        done = sweep(
            "pooled.py", *settings, f"sizes={sizes}", "hydra.launcher.nproc_per_node=${size}",
            f"n=range({len(sizes)})", nproc=0, environ={"RANK_RECORDS": str(records)},
        ).wait()  # fmt: skip
        assert done.status == 0, done.output
        jobs = {rank["job"]: rank for rank in read_records(records)}
        return [{**job, "size": sizes[number]} for number, job in jobs.items()]

    start = statistics.median(gaps(run("in_turn", [1] * 8, "hold=0.5"), 1))
    sizes = [1, 2, 1, 3, 1, 4, 2, 1, 1, 2, 3, 1, 1, 2, 4, 1, 2, 1, 1, 1]
    shared = f"hydra.launcher.devices={list(range(DEVICES))}", "hydra.launcher.n_jobs=auto"
    found = sorted(gaps(run("at_once", sizes, *shared, "hold=1.5"), DEVICES))
    print(f"a start takes {start:.2f} s; gaps: {', '.join(f'{gap:.2f}' for gap in found)}")
    assert len(found) > len(sizes) // 2
    assert found[-1] <= 2 * start
