"""Frameworks that start processes of their own see that theirs are started already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import read_records

JOBS = (0, 1, 2)


@pytest.mark.parametrize("app", ["lightning_ddp.py", "accelerate_ddp.py"])
def test_framework_trains_in_the_ranks_it_finds(
    sweep: Callable[..., Any], tmp_path: Path, app: str
) -> None:
    """Every job of a sweep has two processes, one world of two, and gradients that are shared."""
    records = tmp_path / "records"
    records.mkdir()
    environ = {
        "RANK_RECORDS": str(records),
        # torch's own cache, which otherwise lies in the temporary folder.
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    run = sweep(app, "+seed=1,2,3", environ=environ).wait()
    assert run.status == 0, run.output

    found = read_records(records)
    imported = [record["pid"] for record in found if record["kind"] == "import"]
    tasks = {job: [r for r in found if r["kind"] == f"task{job}"] for job in JOBS}
    pids = {record["pid"] for job in JOBS for record in tasks[job]}
    assert sorted(imported) == sorted(pids | {run.popen.pid}), "a process was started twice"
    assert len(pids) == 2 * len(JOBS)
    for job in JOBS:
        assert [record["rank"] for record in tasks[job]] == [0, 1]
        assert [record["framework_rank"] for record in tasks[job]] == [0, 1]
        assert {record["world_size"] for record in tasks[job]} == {2}
        assert {record["total"] for record in tasks[job]} == {3.0}
        first, second = tasks[job]
        assert first["parameters"] == second["parameters"]
        for epoch in (slice(0, 4), slice(4, 8)):  # each rank trained on its own half of the data
            assert sorted(first["seen"][epoch] + second["seen"][epoch]) == list(range(8))
