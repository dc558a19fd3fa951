"""Names of torch, Hydra, OmegaConf and CPython that are not public: a test fails when one moves."""

from __future__ import annotations

import atexit
import importlib
import inspect
import logging
import multiprocessing.process
import subprocess
import threading

import hydra
import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core import utils
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer

from hydra_torchrun_launcher import rank_logging
from hydra_torchrun_launcher.payload import evaluate_cached_resolvers, resolvers
from hydra_torchrun_launcher.pickling import dumps

pytestmark = pytest.mark.hydra_versions


def test_elastic_starts_ranks_by_a_module_level_name() -> None:
    """LocalElasticAgent looks `start_processes` up in its module when it starts ranks."""
    from torch.distributed.elastic.agent.server import local_elastic_agent

    source = inspect.getsource(local_elastic_agent.LocalElasticAgent._start_workers)
    assert "= start_processes(" in source
    assert callable(local_elastic_agent.start_processes)


def test_elastic_context_has_the_hooks() -> None:
    """PContext's four hooks are abstract, so that elastic calls ours."""
    from torch.distributed.elastic.multiprocessing.api import PContext

    assert PContext.__abstractmethods__ == {"_start", "_poll", "_close", "pids"}


def test_interpreter_names() -> None:
    """What a rank needs of CPython to leave as an interpreter does."""
    assert callable(threading._shutdown)
    assert callable(atexit._run_exitfuncs)
    assert callable(atexit._clear)
    assert isinstance(multiprocessing.process._children, set)
    assert callable(subprocess._args_from_interpreter_flags)
    assert isinstance(logging.Logger.manager.loggerDict, dict)


def test_hydra_names() -> None:
    """run_job and its result are as they are used."""
    assert {"job_dir_key", "job_subdir_key", "hydra_context"} <= set(
        inspect.signature(run_job).parameters
    )
    assert callable(importlib.import_module("hydra.main")._run_hydra)
    run_app = importlib.import_module("hydra._internal.utils")._run_app
    arguments = {"multirun", "mode", "hydra", "config_name", "task_function", "overrides"}
    assert arguments <= set(inspect.signature(run_app).parameters)
    if "execution_whitelist" in inspect.signature(hydra.main).parameters:  # hydra-core >= 1.4
        with rank_logging.execution_whitelist(["collections.*"]):
            assert rank_logging.active_whitelist() is not None
        assert hasattr(utils, "_log_job_error_to_file")
    assert list(inspect.signature(Hydra.__init__).parameters) == [
        "self",
        "task_name",
        "config_loader",
    ]
    assert list(inspect.signature(ConfigLoaderImpl.__init__).parameters) == [
        "self",
        "config_search_path",
    ]
    assert "_return_value" in JobReturn.__dataclass_fields__
    if hydra.__version__ >= "1.4":
        assert "_remote_traceback" in JobReturn.__dataclass_fields__
        for name in ("traceback", "exception_chain", "exception_group"):
            assert callable(getattr(utils, f"_serialize_{name}"))
    assert list(inspect.signature(configure_log).parameters)[:2] == ["log_config", "verbose_config"]


@pytest.mark.filterwarnings("ignore:register_new_resolver")
def test_cached_resolvers_are_found() -> None:
    """Values of resolvers with `use_cache=True` are put into the config's cache, others not."""
    setup_globals()
    calls = []
    OmegaConf.register_new_resolver("counts", lambda: calls.append(1) or len(calls), replace=True)
    OmegaConf.register_new_resolver(
        "counts_once", lambda: calls.append(1) or len(calls), use_cache=True, replace=True
    )
    try:
        node = OmegaConf.create(
            {
                "a": "${counts:}",
                "b": ["${counts_once:}"],
                "c": {"d": "x-${counts_once:}"},
                "e": None,
                "f": "???",
            }
        )
        evaluate_cached_resolvers(node)
        assert calls == [1]
        assert OmegaConf.get_cache(node)["counts_once"] == {(): 1}
        assert set(resolvers()) >= {"counts", "counts_once"}
        assert "now" not in resolvers()
    finally:
        OmegaConf.clear_resolver("counts")
        OmegaConf.clear_resolver("counts_once")
    assert isinstance(BaseContainer._resolvers, dict)


def test_names_of_configs() -> None:
    """What ranks that others started use of HydraConfig and of OmegaConf's nodes."""
    root = OmegaConf.create({"hydra": {"run": "${x}"}, "x": 3})
    assert root.hydra._get_root() is root
    assert root.hydra._get_node("run")._value() == "${x}"


def test_closure_keeps_its_file_name_and_its_module() -> None:
    """A function by value comes back with its code's file and its module's own globals."""
    import pickle

    held = {"value": 3}

    def closure(more: int, *, again: int = 2) -> int:
        return held["value"] + more * again + len(calls_of_this_module)

    def recursive(n: int) -> int:
        return 0 if n == 0 else 1 + recursive(n - 1)

    copy = pickle.loads(dumps(closure))
    assert copy(4) == 11
    assert copy.__code__.co_filename == __file__
    assert copy.__globals__ is globals()
    assert pickle.loads(dumps(recursive))(5) == 5


calls_of_this_module: list[int] = []
