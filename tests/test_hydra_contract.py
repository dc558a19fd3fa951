"""Hydra's own suites for launchers, unchanged, with two ranks for each job."""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.test_utils.launcher_common_tests import (
    BatchedSweeperTestSuite,
    IntegrationTestSuite,
    LauncherTestSuite,
)
from hydra.test_utils.test_utils import SweepTaskFunction
from omegaconf import DictConfig
from running import HANG_S, read_records, write_record

pytestmark = [
    pytest.mark.hydra_versions,
    pytest.mark.timeout(180),
    # The suites pass no version_base, at which 1.3 announces what 1.4 does.
    pytest.mark.filterwarnings(
        "ignore:Future Hydra versions will no longer change working directory"
    ),
]

TWO_RANKS = "hydra.launcher.nproc_per_node=2"
RECORDS = "CONTRACT_RECORDS"
NO_SWEEP = {"test_not_sweeping_hydra_overrides", "test_sweep_1_job_strict_and_bad_key"}
"""Tests of the suites in which Hydra refuses the command line before any job."""

_PROLOG = f"""\
import json, os, uuid
if "RANK" in os.environ:
    with open(os.path.join(os.environ["{RECORDS}"], uuid.uuid4().hex + ".json"), "w") as record:
        json.dump({{"job": 0, "rank": int(os.environ["RANK"]), "pid": os.getpid()}}, record)
"""


class RecordingSweep(SweepTaskFunction):
    """Hydra's runner of a sweep whose task function also says in which rank it ran."""

    records = Path()

    def __call__(self, cfg: DictConfig) -> Any:
        """Record the rank, wait for the other one's record, then do what the suite asks for.

        Otherwise a task that fails in one rank would end the other before it has written.
        """
        job = HydraConfig.get().job.num
        record = {"job": job, "rank": int(os.environ["RANK"]), "pid": os.getpid()}
        write_record(self.records / f"{job}.{uuid.uuid4().hex}.json", record)
        deadline = time.monotonic() + HANG_S / 2
        while len(list(self.records.glob(f"{job}.*.json"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return super().__call__(cfg)


@pytest.fixture(scope="module", autouse=True)
def plugins_loaded() -> None:
    """Load the plugins before a suite first saves Hydra's state, which it restores after each test.

    Saved earlier it has no `hydra/sweeper/basic`, and a module that is imported already registers
    nothing again: under 1.4.0rc3 Hydra's own basic launcher then fails all tests but the first.
    """
    Plugins.instance()


@pytest.fixture
def records(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which ranks leave their records."""
    folder = tmp_path_factory.mktemp("records")
    monkeypatch.setenv(RECORDS, str(folder))
    return folder


@pytest.fixture
def hydra_sweep_runner(
    records: Path, request: pytest.FixtureRequest
) -> Iterator[Callable[..., SweepTaskFunction]]:
    """Take the place of Hydra's fixture: the same, and each job ran in ranks 0 and 1."""

    def runner(
        calling_file: str | None,
        calling_module: str | None,
        task_function: Any,
        config_path: str | None,
        config_name: str | None,
        overrides: list[str] | None,
        temp_dir: Path | None = None,
        configure_logging: bool = False,
    ) -> SweepTaskFunction:
        sweep = RecordingSweep()
        sweep.records = records
        sweep.calling_file = calling_file
        sweep.calling_module = calling_module
        sweep.task_function = task_function
        sweep.config_path = config_path
        sweep.config_name = config_name
        sweep.overrides = overrides or []
        sweep.temp_dir = str(temp_dir)
        sweep.configure_logging = configure_logging
        return sweep

    yield runner
    found = read_records(records)
    if request.node.originalname in NO_SWEEP:
        assert not found
    else:
        _assert_two_ranks_per_run(found, runs=1)


def _assert_two_ranks_per_run(found: list[dict[str, Any]], runs: int) -> None:
    """Ranks 0 and 1 of every job wrote a record in each run, all in processes of their own."""
    jobs = {record["job"] for record in found}
    ran = Counter((record["job"], record["rank"]) for record in found)
    assert jobs == set(range(len(jobs)))
    assert jobs
    assert ran == {(job, rank): runs for job in jobs for rank in (0, 1)}
    pids = {record["pid"] for record in found}
    assert len(pids) == len(found)
    assert os.getpid() not in pids


@pytest.mark.parametrize(("launcher_name", "overrides"), [("torchrun", [TWO_RANKS])])
class TestLauncher(LauncherTestSuite):
    """A sweep's results are what any launcher of Hydra gives."""


@pytest.mark.parametrize(
    ("launcher_name", "overrides"),
    [("torchrun", [TWO_RANKS, "hydra/sweeper=basic", "hydra.sweeper.max_batch_size=2"])],
)
class TestBatchedSweeper(BatchedSweeperTestSuite):
    """A sweeper may hand over the jobs of a sweep in several batches."""


@pytest.mark.parametrize(
    ("task_launcher_cfg", "extra_flags"),
    [
        (
            {},
            [
                "-m",
                "hydra/job_logging=hydra_debug",
                "hydra/job_logging=disabled",
                "hydra/launcher=torchrun",
                TWO_RANKS,
            ],
        )
    ],
)
class TestIntegration(IntegrationTestSuite):
    """Names and directories inside a task are what any launcher of Hydra gives."""

    runs: int

    def generate_custom_cmd(self) -> Callable[..., list[str]]:
        """Return what the suite calls before each run of its script: let its ranks say so."""

        def fun(cmd: list[str], filename: str) -> list[str]:
            script = Path(filename)  # the suite has changed into its folder
            script.write_text(_PROLOG + script.read_text())
            self.runs += 1
            return cmd

        return fun

    @pytest.fixture(autouse=True)
    def two_ranks(self, records: Path) -> Iterator[None]:
        """Look at the records after each test."""
        self.runs = 0
        yield
        assert self.runs
        _assert_two_ranks_per_run(read_records(records), self.runs)
