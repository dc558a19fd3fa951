"""A job whose rank failed starts again with a rendezvous of its own, and loses no log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from running import read_records

RESTARTS = 20


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """Return the folder for what ranks record."""
    folder = tmp_path / "records"
    folder.mkdir()
    return folder


def test_many_restarts_in_a_row(sweep: Callable[..., Any], records: Path) -> None:
    """Each attempt reduces over gloo in a fresh store and keeps its own logs."""
    run = sweep(
        "restarting.py",
        f"+last_attempt={RESTARTS}",
        f"hydra.launcher.max_restarts={RESTARTS}",
        "hydra.launcher.redirects=3",
        environ={"RANK_RECORDS": str(records)},
    ).wait()
    assert run.status == 0, run.output

    attempts = range(RESTARTS + 1)
    found = read_records(records)
    ran = sorted((record["attempt"], record["rank"]) for record in found)
    assert ran == [(attempt, rank) for attempt in attempts for rank in (0, 1)]
    assert len({record["pid"] for record in found}) == len(found)
    assert {record["total"] for record in found} == {3.0}
    assert [record for record in found if record["found"]] == [], "a store outlived its attempt"
    for attempt in attempts:
        assert len({r["port"] for r in found if r["attempt"] == attempt}) == 1

    ranks = run.directory / "0" / "ranks"
    names = {f"attempt_{attempt}" for attempt in attempts}
    assert {path.name for path in ranks.iterdir()} == names
    for attempt in attempts:
        for rank in (0, 1):
            log = ranks / f"attempt_{attempt}" / str(rank) / "stdout.log"
            assert log.read_text() == f"attempt {attempt} rank {rank}\n"
    for attempt in attempts[:-1]:
        log = ranks / f"attempt_{attempt}" / str(attempt % 2) / "stderr.log"
        assert f"RuntimeError: asked to fail in attempt {attempt}" in log.read_text()


def test_too_many_failures_end_the_job(sweep: Callable[..., Any], records: Path) -> None:
    """A job gets as many restarts as it was given, then it has failed with its last error."""
    run = sweep(
        "restarting.py",
        "+last_attempt=9",
        "hydra.launcher.max_restarts=2",
        environ={"RANK_RECORDS": str(records)},
    ).wait()
    assert run.status == 1, run.output
    assert {record["attempt"] for record in read_records(records)} == {0, 1, 2}
    assert "RuntimeError: asked to fail in attempt 2" in run.output


def test_resumed_training_ends_as_an_undisturbed_one(
    sweep: Callable[..., Any], tmp_path: Path
) -> None:
    """A training that resumes twice from its own checkpoint reaches the same weights exactly."""
    ends = {}
    for disturbed in ("false", "true"):
        records = tmp_path / disturbed
        records.mkdir()
        run = sweep(
            "resuming.py",
            f"+disturbed={disturbed}",
            "hydra.launcher.max_restarts=2",
            environ={
                "RANK_RECORDS": str(records),
                # torch's own cache, which otherwise lies in the temporary folder.
                "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
            },
        ).wait()
        assert run.status == 0, run.output
        ends[disturbed] = read_records(records)

    undisturbed, resumed = ends["false"], ends["true"]
    assert [(end["rank"], end["attempt"], end["first"]) for end in undisturbed] == [
        (0, 0, 0),
        (1, 0, 0),
    ]
    assert [(end["rank"], end["attempt"]) for end in resumed] == [(0, 2), (1, 2)]
    assert all(end["first"] > 0 for end in resumed)
    weights = [end["weights"] for end in (*undisturbed, *resumed)]
    assert weights[0]
    assert weights == weights[:1] * 4
