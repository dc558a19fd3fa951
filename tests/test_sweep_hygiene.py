"""A long sweep holds at its end what it held at its start."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import read_records, run_app

pytestmark = pytest.mark.timeout(900)

JOBS = 100
WARM, SETTLED = 5, 50
"""Jobs after which nothing may be added, and after which memory may only grow slowly.

Memory that was freed while the app started is used up first, by either launcher for some 30 jobs.
"""
KB_PER_JOB = 20
"""How much more memory a job may keep in the launching process than with Hydra's basic launcher.

Hydra keeps every job's config, 100 kB of it; our settings would be 25 kB more if jobs did not share
them.
"""


def growth_kb_per_job(meter: list[dict[str, Any]], values: list[int]) -> float:
    """Return how much was added per job between the settled state and the end."""
    assert [line["job"] for line in meter] == list(range(JOBS))
    return (values[-1] - values[SETTLED]) / 1024 / (JOBS - 1 - SETTLED)


def read_meter(path: Path) -> list[dict[str, Any]]:
    """Return what the callback measured, a line for each job."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_hundred_jobs_leave_nothing(sweep: Callable[..., Any], tmp_path: Path) -> None:
    """Jobs add no process, descriptor, port, shared memory or temporary file, and little memory.

    What is left when the app has ended, the `sweep` fixture looks at.
    """
    records, basic = tmp_path / "records", tmp_path / "basic"
    records.mkdir()
    shared_memory = set(os.listdir("/dev/shm"))
    run = sweep("empty.py", f"n=range({JOBS})", environ={"RANK_RECORDS": str(records)}).wait(600)
    assert run.status == 0, run.output

    ran = sorted((record["n"], record["rank"]) for record in read_records(records))
    assert ran == [(n, rank) for n in range(JOBS) for rank in (0, 1)]
    meter = read_meter(run.directory / "meter.jsonl")
    assert [(line["status"], line["value"]) for line in meter] == [
        ("COMPLETED", n) for n in range(JOBS)
    ]
    for line in meter:
        assert not line["listening"]
        assert not line["temporary"]
    # Tests that run beside this one come and go; what a job left would stay.
    stayed = set(meter[JOBS // 2]["shared_memory"]) & set(meter[-1]["shared_memory"])
    assert stayed <= shared_memory
    for name in ("fds", "children", "children_fds"):
        assert meter[-1][name] == meter[WARM][name], name
    assert len(meter[-1]["children"]) == 1, "more than the server is alive between jobs"

    expected = basic_growth_kb_per_job(basic)
    own = growth_kb_per_job(meter, [line["memory"] for line in meter])
    server = growth_kb_per_job(meter, [line["children_memory"][0] for line in meter])
    print(f"kB per job: {own:.1f} with ours, {expected:.1f} with basic, {server:.1f} in the server")
    assert own <= expected + KB_PER_JOB
    assert server <= KB_PER_JOB


def basic_growth_kb_per_job(folder: Path) -> float:
    """Run the same sweep with Hydra's basic launcher."""
    start, records = folder / "start", folder / "records"
    for path in (start, records):
        path.mkdir(parents=True)
    finished = run_app(
        "empty.py",
        "-m",
        "hydra/launcher=basic",
        f"n=range({JOBS})",
        f"hydra.sweep.dir={folder}",
        cwd=start,
        environ={"RANK_RECORDS": str(records)},
    )
    assert finished.exit_code == 0, finished.output
    meter = read_meter(folder / "meter.jsonl")
    return growth_kb_per_job(meter, [line["memory"] for line in meter])
