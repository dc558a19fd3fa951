"""The launching process does around a job what it does with Hydra's basic launcher."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra.experimental.callbacks
import pytest
import yaml
from running import read_records, run_app

pytestmark = pytest.mark.hydra_versions

THREE_JOBS = "x=1,2,3"
LAUNCHERS = {
    "basic": ["hydra/launcher=basic"],
    "one rank": ["hydra/launcher=torchrun", "hydra.launcher.nproc_per_node=1"],
    "two ranks": ["hydra/launcher=torchrun", "hydra.launcher.nproc_per_node=2"],
}
CASES = {
    "plain": [],
    "chdir": ["hydra.job.chdir=true"],
    "no output_subdir": ["hydra.output_subdir=null"],
    "other output_subdir": ["hydra.output_subdir=meta", "hydra.sweep.subdir=run_${x}"],
    "env_set": ["+hydra.job.env_set.DIFFERENTIAL='job ${hydra.job.num}'"],
    "log mode w": ["+hydra.job_logging.handlers.file.mode=w"],
    "job name": ["hydra.job.name=other"],
    "verbose": ["hydra.verbose=true"],
    "no logging": ["hydra/job_logging=disabled"],
    "one directory": ["hydra.sweep.subdir=same"],
    "batches": ["hydra.sweeper.max_batch_size=1"],
    "failing task": ["fail_at=2", "hydra.job.chdir=true"],
}
if hasattr(hydra.experimental.callbacks, "PickleJobInfoCallback"):  # hydra-core 1.3
    kinds = {"info": "PickleJobInfoCallback", "log": "LogJobReturnCallback"}
    CASES["callbacks of Hydra"] = [
        f"+hydra.callbacks.{name}._target_=hydra.experimental.callbacks.{kind}"
        for name, kind in kinds.items()
    ]


_ERROR = re.compile(r"Error executing job|(\w+\.)?BrokenError: ")
"""How Hydra and Python name a job's error; we name it twice, when it happens and at the end."""


@dataclass
class Traces:
    """What a sweep left, with names that differ by its folder or launcher replaced."""

    output: str
    exit_code: int
    errors: list[str]
    console: list[str]
    files: dict[str, Any]
    callbacks: list[dict[str, Any]]
    views: dict[int, list[dict[str, Any]]]


def sweep(folder: Path, launcher: list[str], arguments: list[str]) -> Traces:
    """Run the app's sweep in a new folder."""
    records, start = folder / "records", folder / "start"
    records.mkdir(parents=True)
    start.mkdir()
    finished = run_app(
        "differential.py",
        "-m",
        THREE_JOBS,
        *launcher,
        *arguments,
        f"hydra.sweep.dir={folder / 'sweep'}",
        cwd=start,
        environ={"DIFFERENTIAL_RECORDS": str(records), "DIFFERENTIAL": "as launched"},
    )
    lines = _plain(finished.output, folder).splitlines()
    found = {
        str(path.relative_to(folder)): _content(path, folder)
        for path in sorted(folder.rglob("*"))
        if records not in [path, *path.parents] and not _ours(path.relative_to(folder))
    }
    calls = (records / "callbacks.jsonl").read_text().splitlines()
    views: dict[int, list[dict[str, Any]]] = {}
    for path in records.glob("*.json"):
        rank = int(path.name.split(".")[1])
        views.setdefault(rank, []).append(_plain_values(json.loads(path.read_text()), folder))
    return Traces(
        output=finished.output,
        exit_code=finished.exit_code,
        errors=sorted({line for line in lines if _ERROR.match(line)}),
        console=[line for line in lines if "MARK" in line],
        files=found,
        callbacks=[_plain_values(json.loads(line), folder) for line in calls],
        views={rank: sorted(seen, key=lambda view: view["job"]) for rank, seen in views.items()},
    )


def _ours(path: Path) -> bool:
    return bool({"ranks", ".torchrun", "start.console"} & set(path.parts)) or bool(
        re.search(r"\.rank\d+\.", path.name)
    )


def _content(path: Path, folder: Path) -> Any:
    if path.is_dir():
        return "a directory"
    if path.suffix == ".pickle":
        return "a pickle"
    text = _plain(path.read_text(), folder)
    if path.suffix == ".yaml":
        return _without_launcher(yaml.safe_load(text))
    if path.suffix == ".log":
        # Which error of ours or of Hydra's stands there too differs by version.
        return [line for line in text.splitlines() if "MARK" in line]
    return text


def _plain(text: str, folder: Path) -> str:
    text = text.replace(str(folder), "<folder>")
    return re.sub(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\]", "[time]", text)


def _plain_values(value: Any, folder: Path) -> Any:
    """Replace the same in plain data; a text with several lines is YAML."""
    if isinstance(value, dict):
        return {key: _plain_values(item, folder) for key, item in value.items() if key != "pid"}
    if isinstance(value, list):
        texts = [_plain_values(item, folder) for item in value]
        return [text for text in texts if not _chooses_launcher(text)]
    if isinstance(value, str):
        text = _plain(value, folder)
        return _without_launcher(yaml.safe_load(text)) if "\n" in text else text
    return value


def _without_launcher(config: Any) -> Any:
    if isinstance(config, dict):
        dropped = ("launcher", "hydra/launcher", "torchrun_guard")
        return {key: _without_launcher(item) for key, item in config.items() if key not in dropped}
    if isinstance(config, list):
        return [_without_launcher(item) for item in config if not _chooses_launcher(item)]
    return config


def _chooses_launcher(item: Any) -> bool:
    return isinstance(item, str) and item.startswith(("hydra/launcher=", "hydra.launcher."))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.replace(" ", "_"))
def traces(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Run one case with every launcher."""
    folder = tmp_path_factory.mktemp("differential")
    return {
        name: sweep(folder / name.replace(" ", "_"), launcher, CASES[request.param])
        for name, launcher in LAUNCHERS.items()
    }


OURS = pytest.mark.parametrize("launcher", ["one rank", "two ranks"])


@OURS
def test_files(traces: dict[str, Traces], launcher: str) -> None:
    """A sweep leaves the same files, apart from ours, with the same config and log lines."""
    assert traces["basic"].files
    assert traces[launcher].files.keys() == traces["basic"].files.keys()
    for name, content in traces["basic"].files.items():
        assert traces[launcher].files[name] == content, name


@OURS
def test_callbacks(traces: dict[str, Traces], launcher: str) -> None:
    """Callbacks are called in the same order, in one process, and see the same at each call."""
    expected = traces["basic"].callbacks
    assert {"on_multirun_start", "on_job_start", "on_job_end"} <= {
        call["hook"] for call in expected
    }
    assert [call["hook"] for call in traces[launcher].callbacks] == [
        call["hook"] for call in expected
    ]
    for call, other in zip(traces[launcher].callbacks, expected, strict=True):
        assert call == other


@OURS
def test_console_and_status(traces: dict[str, Traces], launcher: str) -> None:
    """The app leaves with the same status, and what jobs and callbacks say reaches the console."""
    assert traces[launcher].exit_code == traces["basic"].exit_code, traces[launcher].output
    assert traces[launcher].errors == traces["basic"].errors
    assert traces[launcher].console == traces["basic"].console


@OURS
def test_view_of_the_task(traces: dict[str, Traces], launcher: str) -> None:
    """Every rank's task sees the config, HydraConfig and surroundings that basic's task sees."""
    expected = traces["basic"].views[0]
    assert len(expected) == len(THREE_JOBS.split(","))
    ranks = {"one rank": [0], "two ranks": [0, 1]}[launcher]
    assert sorted(traces[launcher].views) == ranks
    for rank in ranks:
        for view, other in zip(traces[launcher].views[rank], expected, strict=True):
            assert view == other, rank


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_script_without_a_guard(tmp_path: Path, launcher: str) -> None:
    """A script that calls its main function at its top level runs as many tasks as it has ranks."""
    records, start = tmp_path / "records", tmp_path / "start"
    records.mkdir()
    start.mkdir()
    finished = run_app(
        "unguarded.py",
        "-m",
        *LAUNCHERS[launcher],
        cwd=start,
        environ={"RANK_RECORDS": str(records)},
    )
    assert finished.exit_code == 0, finished.output
    ranks = {"basic": [None], "one rank": [0], "two ranks": [0, 1]}[launcher]
    assert [record["rank"] for record in read_records(records)] == ranks
