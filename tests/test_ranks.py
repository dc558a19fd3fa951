"""What a rank is and sees: as fresh as torchrun's, with the job's config and Hydra's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from conftest import APPS, Sweep

Run = Callable[..., Sweep]
pytestmark = pytest.mark.hydra_versions
METHODS = ("forkserver", "spawn", "fork")


@pytest.fixture(scope="module", params=METHODS)
def fresh(request: pytest.FixtureRequest, start_sweep: Run) -> Sweep:
    """Run two jobs of two ranks under each start method."""
    return start_sweep(
        "fresh.py", "+size=size", "+x=1,2", f"hydra.launcher.start_method={request.param}",
        environ={"FROM_OUTSIDE": "here"},
    ).wait()  # fmt: skip


def ranks(run: Sweep, job: int = 0) -> list[dict[str, Any]]:
    found = run.lines(f"{job}/rank*.json")
    assert len(found) == 2, run.output
    return found


def test_all_jobs_ran(fresh: Sweep) -> None:
    """Both jobs complete and every rank is a process of its own."""
    assert fresh.status == 0, fresh.output
    assert len({rank["pid"] for job in (0, 1) for rank in ranks(fresh, job)}) == 4


def test_environment(fresh: Sweep) -> None:
    """Ranks have torchrun's variables, the launching process's and the job's own."""
    for job in (0, 1):
        for number, rank in enumerate(ranks(fresh, job)):
            expected = {
                "RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "ROLE_RANK": str(number),
                "ROLE_NAME": "default", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1",
                "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True", "FROM_OUTSIDE": "here",
                "SET_BY_JOB": "yes", "OF_THE_JOB": str(job),
            }  # fmt: skip
            assert {name: rank["env"].get(name) for name in expected} == expected
            assert rank["torch_threads"] == 1
    runs = {ranks(fresh, job)[0]["env"]["TORCHELASTIC_RUN_ID"] for job in (0, 1)}
    assert len(runs) == 2


def is_fork(run: Sweep) -> bool:
    return str(run.popen.args[-1]).endswith("=fork")


def test_environment_is_there_at_import(fresh: Sweep) -> None:
    """The script finds its rank and the job's variables when it is imported; under fork it was
    imported by the launching process, before them.
    """
    for number, rank in enumerate(ranks(fresh, 1)):
        expected = {
            "RANK": str(number),
            "LOCAL_RANK": str(number),
            "SET_BY_JOB": "yes",
            "OF_THE_JOB": "1",
        }
        assert rank["at_import"] == (dict.fromkeys(expected) if is_fork(fresh) else expected)


def test_process_is_fresh(fresh: Sweep) -> None:
    """Start method, parent, arguments, input, directory, signals are as in a new interpreter."""
    for rank in ranks(fresh):
        assert rank["start_method"] is None
        assert rank["parent"] is True
        assert rank["process"] == "MainProcess"
        assert rank["children"] == 1  # its own
        assert rank["threads"] == 2  # its own
        assert rank["session"] is True
        assert rank["argv"][0] == str(APPS / "fresh.py")
        assert "hydra/launcher=torchrun" in rank["argv"]
        assert rank["path"][0] == str(APPS)
        assert rank["stdin"] == ""
        assert rank["cwd"] == str(fresh.directory)
        assert "SIG_DFL" in rank["term"]
        assert "SIG_DFL" in rank["child_signal"]
        assert "default_int_handler" in rank["interrupt"]
        assert rank["loaded"] == rank["loaded_by_lambda"] == [[1], [2], [3]]


@pytest.mark.parametrize("name", ["numpy", "python", "torch"])
def test_random_state(fresh: Sweep, name: str) -> None:
    """No two ranks inherit one random state, but under fork, where the script's seed must hold."""
    values = [rank[name] for job in (0, 1) for rank in ranks(fresh, job)]
    assert len(set(values)) == (1 if is_fork(fresh) else 4)


def test_exit_handlers_and_threads(fresh: Sweep) -> None:
    """`atexit` runs, non-daemon threads are joined, daemonic children are terminated."""
    assert len(list(fresh.directory.glob("*/rank*.exited"))) == 4
    assert len(list(fresh.directory.glob("*/rank*.joined"))) == 4
    assert len(list(fresh.directory.glob("*/rank*.terminated"))) == 4, "multiprocessing's own"


def test_config(fresh: Sweep) -> None:
    """Ranks agree on cached resolvers' values, jobs differ; others are read where they are."""
    first, second = ranks(fresh)
    for name in ("moment", "once"):
        assert first[name] == second[name]
    assert first["moment"] == first["again"]
    assert first["mine"] == 6
    assert [first["late"], second["late"]] == ["0", "1"]
    assert (first["size_is_ours"], second["size_is_ours"]) == (True, True)
    assert [rank["num"] for rank in (first, *ranks(fresh, 1))] == [0, 1, 1]
    assert first["output_dir"] == str(fresh.directory / "0")


def test_output(fresh: Sweep) -> None:
    """Rank 0 is on the console; the others are in their files; no two processes in one log."""
    assert fresh.output.count("printed by rank 0") == 2, fresh.output
    assert "by rank 1" not in fresh.output
    folder = fresh.directory / "0"
    lines = (folder / "ranks/attempt_0/1/stdout.log").read_text()
    assert "printed by rank 1" in lines
    assert "[__main__][INFO] - told by rank 1" in lines
    assert "[__main__][INFO] - told by rank 0" in (folder / "fresh.log").read_text()
    assert "told by rank 1" not in (folder / "fresh.log").read_text()
    assert "told by rank 1" in (folder / "fresh.rank1.log").read_text()


@pytest.mark.parametrize("method", METHODS)
def test_module_with_relative_imports(sweep: Run, method: str) -> None:
    """`python -m pkg.mod` works, relative imports and its types included."""
    run = sweep(
        "-m pkg.trained", f"hydra.launcher.start_method={method}",
        "+hydra.callbacks={recorder: {_target_: recorder.Recorder}}",
        environ={"PYTHONPATH": str(APPS)},
    ).wait()  # fmt: skip
    assert [job["text"] for job in run.jobs()] == ["Marker(value=7)"], run.output
    assert [rank["package"] for rank in ranks(run)] == ["pkg", "pkg"]


def test_task_function_of_another_module(sweep: Run) -> None:
    """A task function that stands in an importable module runs from there."""
    run = sweep(
        "borrowed.py", "+x=1,2", "+hydra.callbacks={recorder: {_target_: recorder.Recorder}}"
    ).wait()
    assert [job["text"] for job in run.jobs()] == ["2", "3"], run.output
