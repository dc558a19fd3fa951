"""What Hydra's users set means in ranks what it means with Hydra's basic launcher."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import APPS, Sweep

Run = Callable[..., Sweep]
pytestmark = pytest.mark.hydra_versions

CASES = {
    "nothing": [],
    "chdir": ["hydra.job.chdir=true"],
    "no chdir": ["hydra.job.chdir=false"],
    "environment": ["+hydra.job.env_set.SET=by the job", "hydra.job.env_copy=[COPIED]"],
    "verbose": ["hydra.verbose=true"],
    "verbose logger": ["hydra.verbose=features.quiet"],
    "no output folder": ["hydra.output_subdir=null"],
    "another output folder": ["hydra.output_subdir=mine"],
    "override dirname": ["hydra.sweep.subdir=${hydra.job.override_dirname}"],
    "job name": ["hydra.job.name=mine"],
    "experiment": ["+experiment=small"],
    "no job logging": ["hydra/job_logging=none"],
    "job logging disabled": ["hydra/job_logging=disabled"],
    "both loggings disabled": ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled"],
    "colours": ["hydra/job_logging=colorlog", "hydra/hydra_logging=colorlog"],
    "rotating files": ["hydra/job_logging=rotating"],
    "another config": ["-cn", "params"],
    "another config folder": ["-cd", str(APPS / "features/other"), "-cn", "elsewhere"],
    "config from a package": ["-cp", "pkg://pkg.conf", "-cn", "console", "+name=x"],
}


def records(run: Sweep) -> list[dict[str, Any]]:
    found = sorted((run.directory / "sweep").rglob("record.rank0.json"))
    assert found, run.output
    text = "[" + ",".join(file.read_text() for file in found) + "]"
    text = text.replace(str(run.directory), "<folder>")
    return list(json.loads(re.sub(r",?hydra[./]launcher[^,\"]*", "", text)))


def log_lines(run: Sweep) -> dict[str, list[str]]:
    """Return the lines of log files of the task and of rank 0, without times."""
    root = run.directory / "sweep"
    return {
        str(file.relative_to(root)): re.sub(r"\[[\d\- :,]+\]", "", file.read_text()).splitlines()
        for file in sorted(root.rglob("*"))
        if (file.suffix == ".log" or file.name == "late")
        and ".rank" not in file.name
        and "ranks" not in file.parts
    }


@pytest.mark.parametrize("case", CASES)
def test_as_with_the_basic_launcher(sweep: Run, case: str) -> None:
    """Rank 0 sees and logs the same; every other rank has log files of its own."""
    environ = {"COPIED": "from outside", "PYTHONPATH": str(APPS)}
    options = [text for text in CASES[case] if not re.match(r"[+\w./]+=", text)]
    overrides = [text for text in CASES[case] if text not in options]
    overrides += [] if case == "another config" else ["point=1,2"]
    runs = [
        sweep(
            "features/features.py", *overrides, environ=environ, launcher=launcher,
            nproc=nproc, sweep_dir="sweep", flags=["-m", *options],
        ).wait()
        for launcher, nproc in (("basic", 0), ("torchrun", 2))
    ]  # fmt: skip
    basic, ours = runs
    assert (basic.status, ours.status) == (0, 0), basic.output + ours.output
    assert records(ours) == records(basic)
    assert log_lines(ours) == log_lines(basic)
    for path in (ours.directory / "sweep").rglob("record.rank0.json"):
        other = json.loads(path.with_name("record.rank1.json").read_text())
        for kind, name, _ in other["handlers"]:
            assert not name or ".rank1" in name, (kind, name)


def test_launcher_in_the_defaults_list(sweep: Run) -> None:
    """A config may choose the launcher itself."""
    run = sweep(
        "features/features.py", "point=1,2", launcher=None, nproc=0,
        environ={"PYTHONPATH": str(APPS)}, sweep_dir="sweep", flags=["-m", "-cn", "in_defaults"],
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert len(list((run.directory / "sweep").rglob("record.rank1.json"))) == 2


@pytest.mark.parametrize("what", ["config", "defaults", "plugins", "all"])
def test_info(sweep: Run, what: str) -> None:
    """`--info` tells and starts nothing."""
    flags = ["--info", what]
    run = sweep("features/features.py", nproc=2, sweep_dir="sweep", flags=flags).wait()
    assert run.status == 0, run.output
    assert not Path(run.directory, "sweep").exists()
    assert "Launching" not in run.output
