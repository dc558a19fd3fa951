"""Every kind of script and of task function, under every start method: the same records."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import APPS, HANG_S, Sweep

Run = Callable[..., Sweep]
METHODS = ("forkserver", "spawn", "fork")
RECORDER = "+hydra.callbacks={recorder: {_target_: recorder.Recorder}}"
IMPORTABLE = {"PYTHONPATH": f"{APPS}:{APPS / 'kinds'}"}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "script with a dash": (
        "kinds/dash-script.py",
        {
            "is_config": True,
            "is_color": True,
            "is_thing": True,
            "part": 6,
            "main_file": "dash-script.py",
        },
    ),
    "console entry point": ("kinds/console-app", {"marker": 1, "main_file": "console-app"}),
    "module": ("-m pkg.console_main", {"marker": 1, "main_file": "console_main.py"}),
    "decorated": ("kinds/decorated.py", {"calls": ["under", "lower"]}),
    "closure": ("kinds/nameless.py", {"captured": [1, 2], "factor": 1}),
    "lambda": ("kinds/nameless.py", {"is_lambda": True}),
    "partial": ("kinds/nameless.py", {"more": 7}),
    "callable": ("kinds/nameless.py", {"name": "trainer"}),
    "method": ("kinds/nameless.py", {"method_of": "trainer"}),
    "resolvers": (
        "kinds/resolvers.py",
        {"after": "after", "under_guard": "under the guard", "in_task": "task"},
    ),
    "busy, without a guard": (
        "kinds/busy.py",
        {"product": 200.0, "sum": 300, "text": "before", "file": "busy.py"},
    ),
    "hydra-zen": ("kinds/zen_task.py", {"width": 4, "is_model": True}),
    "children": (
        "kinds/children.py",
        {
            "squares": {method: [4, 9] for method in ("fork", "spawn", "forkserver")},
            "written": True,
            "sibling": "sibling",
        },
    ),
}
SETTINGS = {
    "script with a dash": ["hydra/job_logging=own"],
    "resolvers": ["+after=${after:}", "+under_guard=${under_guard:}"],
    "hydra-zen": ["model.width=4"],
    "children": ["hydra.job.chdir=true"],
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", KINDS)
def test_kind(sweep: Run, kind: str, method: str) -> None:
    """The task runs in both ranks, sees what it would see without us, and its value comes back."""
    script, facts = KINDS[kind]
    run = sweep(
        script, "point=1,2", RECORDER, f"hydra.launcher.start_method={method}",
        *SETTINGS.get(kind, ()), environ={**IMPORTABLE, "TASK": kind},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert [(job["text"], job["type"]) for job in run.jobs()] == [("2", "int"), ("4", "int")]
    for job in (0, 1):
        records = run.lines(f"{job}/rank*.json")
        assert [record["rank"] for record in records] == [0, 1], run.output
        for record in records:
            assert record["point"] == job + 1
            assert {name: record[name] for name in facts} == (
                facts if "marker" not in facts else {**facts, "marker": job + 1}
            )


@pytest.mark.hydra_versions
@pytest.mark.parametrize("kind", ["script with a dash", "console entry point", "closure"])
def test_kind_on_this_hydra(sweep: Run, kind: str) -> None:
    """The kinds that touch Hydra most work on every version of it."""
    test_kind(sweep, kind, "forkserver")


def test_log_handler_of_the_script(sweep: Run) -> None:
    """Logging classes that stand in the script or beside it work in ranks."""
    run = sweep("kinds/dash-script.py", "hydra/job_logging=own", environ=IMPORTABLE).wait()
    assert "OWN said" in run.output, run.output
    assert "SIBLING'S said" in run.output


@pytest.mark.parametrize("start", ["command", "standard input"])
def test_interpreter_without_a_script(sweep: Run, start: str) -> None:
    """`python -c` and a script on standard input have no file: what can be sent is, by value."""
    code = (APPS / "kinds/nameless.py").read_text()
    code = code.replace('config_path=".", config_name="kind"', "config_path=None")
    run = sweep(
        "-", "+point=1,2", RECORDER, environ={**IMPORTABLE, "TASK": "closure"},
        code=code if start == "command" else None,
        stdin=code if start == "standard input" else None,
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert [job["text"] for job in run.jobs()] == ["2", "4"], run.output


def test_frozen_program(sweep: Run) -> None:
    """A frozen program has no interpreter to start: it is told so, and what works."""
    run = sweep("machine.py", environ={"BROKEN": "frozen"}).wait()
    assert run.status == 1
    assert "a frozen program" in run.output
    assert "start_method=fork" in run.output
    assert "Traceback" not in run.output
    run = sweep("machine.py", "hydra.launcher.start_method=fork", environ={"BROKEN": "frozen"})
    assert run.wait().status == 0, run.output


NOTEBOOK = """
import json, sys
from pathlib import Path
from hydra_zen import launch, make_config
import os

factor = 3

class Result:
    def __init__(self, number):
        self.number = number

def task(cfg):
    print("rank", os.environ["RANK"], "speaks")
    return Result(cfg.point * factor)

jobs = launch(
    make_config(point=1), task, overrides=["point=1,2", "hydra/launcher=torchrun",
    "hydra.launcher.nproc_per_node=2", f"hydra.sweep.dir={directory}"], multirun=True,
    version_base="1.3",
)
(job_one, job_two), = jobs
assert isinstance(job_two.return_value, Result)
print("values", job_one.return_value.number, job_two.return_value.number)
"""


def test_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task defined in a notebook's cell runs in ranks, rank 0 speaks in the notebook, and types
    of the notebook come back.
    """
    import nbclient
    import nbformat

    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel does not show what children print
    cells = [f"directory = {str(tmp_path / 'sweep')!r}", NOTEBOOK]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(
        book, timeout=HANG_S, resources={"metadata": {"path": tmp_path}}
    ).execute()
    printed = json.dumps(book.cells[-1].outputs)
    assert "values 3 6" in printed
    assert "rank 0 speaks" in printed
