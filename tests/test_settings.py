"""Settings: what they do in real runs, and what bad ones get."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Sweep
from omegaconf import OmegaConf

from hydra_torchrun_launcher.config import StartMethod, TorchrunConf
from hydra_torchrun_launcher.errors import SettingsError
from hydra_torchrun_launcher.machine import cpu_cores
from hydra_torchrun_launcher.settings import check

Run = Callable[..., Sweep]


def raw(**changes: object) -> dict[str, Any]:
    """Return settings as Hydra composes them: the defaults and some changes."""
    defaults: Any = OmegaConf.to_container(OmegaConf.structured(TorchrunConf), resolve=True)
    return {**defaults, **changes}


def test_defaults_are_torchruns() -> None:
    """Unset settings are the torchrun command's, but for the console, which is rank 0's."""
    settings = check(raw(), {})
    assert settings.max_restarts == 0
    assert settings.shutdown_timeout_s == 30
    assert settings.signals == ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    assert settings.start_method is StartMethod.forkserver
    assert settings.console_ranks == (0,)
    assert check(raw(), {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "7"}).shutdown_timeout_s == 7


@pytest.mark.parametrize("value", [1, 8, "3", "gpu", "cpu", "auto"])
def test_good_nproc(value: object) -> None:
    """Numbers and torchrun's words are accepted."""
    expected = int(value) if str(value).isdecimal() else value
    assert check(raw(nproc_per_node=value), {}).nproc_per_node == expected


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None, "", "many", "-2", [2]])
def test_bad_nproc(value: object) -> None:
    """Anything else is refused with its value and what is allowed."""
    with pytest.raises(SettingsError, match=r"nproc_per_node=.*expected a number from 1"):
        check(raw(nproc_per_node=value), {})


@pytest.mark.parametrize("value", [[], "", [0, 0], [None], [True], [1.5], {"a": 1}, ["0,1"], [-1]])
def test_bad_devices(value: object) -> None:
    """Names are text or whole numbers, each once."""
    with pytest.raises(SettingsError, match=r"devices=.*expected null, or names without doubles"):
        check(raw(devices=value), {})


def test_streams_by_rank() -> None:
    """Ranks above 9 can be addressed, which torch's own parser cannot."""
    settings = check(raw(redirects="3", tee="0:1,12:3", local_ranks_filter=""), {})
    assert settings.redirects == {-1: 3}
    assert settings.tee == {0: 1, 12: 3}
    assert settings.console_ranks is None


def test_all_problems_in_one_message() -> None:
    """Every bad setting is named at once."""
    bad = {
        "nproc_per_node": 0,
        "max_restarts": -1,
        "monitor_interval": 0.0,
        "signals_to_handle": "SIGNOTHING",
        "extra": {"nproc_per_node": 1},
        "shutdown_timeout": -1,
        "redirects": "4",
        "tee": "x",
        "local_ranks_filter": "a",
    }
    with pytest.raises(SettingsError) as caught:
        check(raw(**bad), {})
    assert all(
        f"hydra.launcher.{name}={value!r}" in str(caught.value) for name, value in bad.items()
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("signals_to_handle", "SIGTERM,SIGKILL"),
        ("signals_to_handle", "SIGCHLD"),
        ("monitor_interval", 1e10),
        ("extra", {"rdzv_backend": "c10d"}),
    ],
)
def test_value_that_would_break_the_launcher(name: str, value: object) -> None:
    """What cannot be handled, waited for or overridden is refused."""
    with pytest.raises(SettingsError, match=f"hydra.launcher.{name}="):
        check(raw(**{name: value}), {})


@pytest.mark.hydra_versions
def test_bad_setting_stops_before_any_work(sweep: Run) -> None:
    """A bad setting ends in sentences, without a stack trace, before any job."""
    run = sweep("faults.py", "hydra.launcher.max_restarts=-1", "hydra.launcher.tee=9").wait()
    assert run.status == 1
    assert "hydra.launcher.max_restarts=-1: expected a number from 0" in run.output
    assert "hydra.launcher.tee='9'" in run.output
    assert "Traceback" not in run.output
    assert not (run.directory / "0").exists()


def test_unknown_setting_is_refused(sweep: Run) -> None:
    """A setting that does not exist is refused by name."""
    run = sweep("faults.py", "hydra.launcher.no_such=1").wait()
    assert run.status == 1
    assert "no_such" in run.output
    run = sweep("faults.py", "+hydra.launcher.nproc_per_nod=1").wait()  # as Hydra's hint says
    assert run.status == 1
    problem = (
        "hydra.launcher.nproc_per_nod=1: there is no such setting; did you mean nproc_per_node?"
    )
    assert problem in run.output
    assert "Launching" not in run.output


def test_unknown_extra_is_refused(sweep: Run) -> None:
    """A field that this torch's LaunchConfig lacks is refused with the fields it has."""
    run = sweep("faults.py", "+hydra.launcher.extra.no_such=1").wait()
    assert run.status == 1
    assert "no_such: the installed torch's LaunchConfig has no such field" in run.output
    assert "log_line_prefix_template" in run.output
    assert "Traceback" not in run.output


def test_torch_missing(sweep: Run) -> None:
    """Without torch the launcher says so, in a sentence."""
    run = sweep("without_torch.py").wait()
    assert run.status == 1
    assert "torch is not installed for" in run.output
    assert "Traceback" not in run.output


def test_torch_too_old(sweep: Run) -> None:
    """A torch that is too old is named, with what is needed."""
    run = sweep("without_torch.py", environ={"TORCH_IS": "old"}).wait()
    assert run.status == 1
    assert "needs torch 2.4 or later" in run.output
    assert "has 2.3.1+cu121" in run.output
    assert "Traceback" not in run.output


def test_preloaded_module_that_is_missing(sweep: Run) -> None:
    """A module that does not exist is refused by name, before any job."""
    run = sweep("faults.py", "hydra.launcher.preload=[no_such_module]").wait()
    assert run.status == 1
    assert "hydra.launcher.preload: no module named 'no_such_module'" in run.output
    assert "Launching" not in run.output


def test_preloaded_module_that_raises(sweep: Run, tmp_path: Path) -> None:
    """A preloaded module that raises is named, with the setting and what it raised."""
    (tmp_path / "raising.py").write_text("raise RuntimeError('boom')")
    environ = {"PYTHONPATH": str(tmp_path)}
    run = sweep("faults.py", "hydra.launcher.preload=[raising]", environ=environ).wait()
    assert run.status == 1
    assert "hydra.launcher.preload: importing raising raised RuntimeError: boom" in run.output


def test_streams_go_where_settings_say(sweep: Run) -> None:
    """`tee` reaches file and console with elastic's prefix, `redirects` only files."""
    run = sweep(
        "fresh.py", "+size=size", "hydra.launcher.log_dir=logs", "hydra.launcher.tee='2:1'",
        "hydra.launcher.redirects='0:1'", "hydra.launcher.local_ranks_filter='0,2'",
        "hydra.launcher.role=trainer", nproc=3,
    ).wait()  # fmt: skip
    folder = run.directory / "logs/0/attempt_0"
    for rank in range(3):
        assert f"printed by rank {rank}" in (folder / str(rank) / "stdout.log").read_text()
    assert "[trainer2]:printed by rank 2" in run.output
    assert "printed by rank 0" not in run.output
    assert "by rank 1" not in run.output


def test_rank_that_a_job_has_not(sweep: Run) -> None:
    """A setting that names a local rank beyond the job's is said, and the job runs."""
    run = sweep("faults.py", "hydra.launcher.local_ranks_filter='0,5'").wait()
    assert run.status == 0, run.output
    assert "hydra.launcher.local_ranks_filter names local rank 5, the job has 0 to 1" in run.output


def test_error_file(sweep: Run) -> None:
    """A rank that raised leaves torchrun's error file."""
    run = sweep("faults.py", "fault=raise", "at_job=0").wait()
    (record,) = run.lines("0/ranks/attempt_0/1/error.json")
    assert "ScriptError: raised on purpose" in record["message"]["message"]
    assert "in fail" in record["message"]["extraInfo"]["py_callstack"]


def test_second_run_in_a_directory_overwrites_no_log(sweep: Run) -> None:
    """Attempts are numbered on from what an earlier run left."""
    first = sweep("faults.py").wait()
    second = sweep("faults.py", f"hydra.sweep.dir={first.directory}").wait()
    assert second.status == 0, second.output
    assert sorted(os.listdir(first.directory / "0/ranks")) == ["attempt_0", "attempt_1"]


def test_thread_limit_of_the_user_wins(sweep: Run) -> None:
    """OMP_NUM_THREADS is 1 only where it is unset and there are several ranks."""
    run = sweep("fresh.py", "+size=size", "+hydra.job.env_set.OMP_NUM_THREADS='2'").wait()
    assert [rank["torch_threads"] for rank in run.lines("0/rank*.json")] == [2, 2], run.output
    run = sweep("fresh.py", "+size=size", nproc=1).wait()
    assert "OMP_NUM_THREADS" not in run.lines("0/rank0.json")[0]["env"], run.output


def test_auto_counts_cores_without_accelerators(sweep: Run) -> None:
    """`auto` is a rank for each accelerator, or else for each core this process may use."""
    run = sweep("faults.py", "hydra.launcher.nproc_per_node=auto").wait()
    assert run.status == 0, run.output
    assert len(list(run.directory.glob("0/started.*"))) == cpu_cores()


def test_gpu_without_gpus_is_refused(sweep: Run) -> None:
    """`gpu` on a machine where torch sees none is refused."""
    run = sweep(
        "faults.py", "hydra.launcher.nproc_per_node=gpu", environ={"CUDA_VISIBLE_DEVICES": ""}
    ).wait()
    assert run.status == 1
    assert "torch sees no GPU here" in run.output


def test_jobs_may_differ_in_settings(sweep: Run) -> None:
    """A job's own config decides: an override may sweep over the number of ranks."""
    run = sweep("faults.py", "+experiment=a,b", nproc=0).wait()
    assert run.status == 0, run.output
    assert len(list(run.directory.glob("0/started.*"))) == 1
    assert len(list(run.directory.glob("1/started.*"))) == 3
