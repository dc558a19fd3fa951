"""One job as Hydra sees it: what Hydra's run_job does around the task, in two halves.

Hydra's own run_job is called with a stand-in for the task that notes what a task would see. It does
everything before the task itself (directory, files, HydraConfig, `on_job_start`) and returns; the
ranks then do the work, and `finish` does what comes after it. Runs in the launching process.
"""

from __future__ import annotations

import copy
import dataclasses
import locale
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from hydra.core import utils
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus, run_job
from hydra.types import HydraContext, TaskFunction
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from hydra_torchrun_launcher import payload, rank_logging
from hydra_torchrun_launcher.errors import printable
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.plans import Begun

log = logging.getLogger(__name__)


class _HeldBack:
    """Hydra's callbacks with `on_job_end` held back, and the real task in `on_job_start`."""

    def __init__(self, callbacks: Any, task_function: TaskFunction) -> None:
        self._callbacks = callbacks
        self._task_function = task_function

    def on_job_start(self, config: Any, **_: Any) -> None:
        self._callbacks.on_job_start(config=config, task_function=self._task_function)

    def on_job_end(self, **_: Any) -> None:
        pass


class HydraJob:
    """One job of a sweep."""

    def __init__(self, context: HydraContext, task_function: TaskFunction, config: Any) -> None:
        """Take a job's composed config; nothing happens yet."""
        self.config = config
        self._context = context
        self._task_function = task_function
        self._job_return: JobReturn
        self._hydra_config: Any = None
        self._working_dir = ""

    def _current_dir(self) -> str:
        try:
            return os.getcwd()
        except FileNotFoundError:  # a callback removed it: a rank will say so
            return str(self.config.hydra.runtime.output_dir)

    def begin(self, number: int) -> Begun:
        """Do all that Hydra does before a task function."""
        payload.evaluate_cached_resolvers(self.config)
        seen: list[Any] = []
        environ: dict[str, str] = {}

        def stand_in(config: Any) -> None:
            environ.update(os.environ)
            self._working_dir = self._current_dir()
            self._hydra_config = HydraConfig.instance().cfg
            seen.append(config)

        callbacks = _HeldBack(self._context.callbacks, self._task_function)
        try:
            self._job_return = run_job(
                task_function=stand_in,
                config=self.config,
                job_dir_key="hydra.sweep.dir",
                job_subdir_key="hydra.sweep.subdir",
                hydra_context=dataclasses.replace(self._context, callbacks=callbacks),  # type: ignore[arg-type]
            )
        except ValueError as error:
            if isinstance(error.__cause__, OSError):  # a log file cannot be opened
                raise error.__cause__ from None
            raise
        work = payload.Work(
            task=self._task_function,
            config=seen[0],
            hydra_config=self._hydra_config,
            job_name=str(JobRuntime.instance().get("name")),
            search_path=self._context.config_loader.get_search_path(),
            resolvers=payload.resolvers(),
            execution_whitelist=getattr(self._context, "execution_whitelist", None),
        )
        output_dir = str(self.config.hydra.runtime.output_dir)
        return Begun(number, self.config, output_dir, environ, self._working_dir, work)

    def not_run(self, ended: Ended, working_dir: str | None = None) -> JobReturn:
        """Return the JobReturn of a job for which nothing was called, callbacks neither.

        Args:
            ended: how it ended, before it began or in an earlier run.
            working_dir: where it was then.
        """
        task_config = copy.deepcopy(self.config)
        with read_write(task_config), open_dict(task_config):
            del task_config["hydra"]
        overrides = OmegaConf.to_container(self.config.hydra.overrides.task)
        return JobReturn(
            overrides=overrides,  # type: ignore[arg-type]
            cfg=task_config,
            hydra_cfg=OmegaConf.create({"hydra": self.config.hydra}),
            working_dir=working_dir,
            task_name=str(JobRuntime.instance().get("name")),
            status=JobStatus.COMPLETED if ended.error is None else JobStatus.FAILED,
            _return_value=ended.value if ended.error is None else ended.error,
        )

    def finish(self, ended: Ended) -> JobReturn:
        """Do all that Hydra does after a task function."""
        result, error = self._job_return, ended.error
        result.return_value = ended.value if error is None else error
        result.status = JobStatus.COMPLETED if error is None else JobStatus.FAILED
        if error is not None:
            add_remote_traceback(result, error)
        hydra = self.config.hydra
        whitelist = getattr(self._context, "execution_whitelist", None)
        with self._state(), rank_logging.execution_whitelist(whitelist):
            log_ended(f"Job #{hydra.job.num}", hydra, ended, whitelist)
            self._context.callbacks.on_job_end(config=self.config, job_return=result)
        return result

    @contextmanager
    def _state(self) -> Iterator[None]:
        """Be where run_job is when it calls `on_job_end`."""
        hydra_config, directory = HydraConfig.instance().cfg, None
        with suppress(FileNotFoundError):  # the task may have removed it
            directory = os.getcwd()
        HydraConfig.instance().cfg = self._hydra_config
        try:
            if os.path.isdir(self._working_dir):
                os.chdir(self._working_dir)
            yield
        finally:
            HydraConfig.instance().cfg = hydra_config
            if directory is not None:
                os.chdir(directory)


def share_settings(result: JobReturn, shared: dict[str, Any]) -> None:
    """Let the JobReturns of a sweep hold one copy of the launcher's settings where they are alike.

    Hydra keeps every JobReturn to the end of a sweep; a copy of the settings takes some 25 kB. They
    are alike when they read and mean the same. OmegaConf has no public way to put a node into two
    configs; test_sweep_hygiene.py fails if this one does not work any more.

    Args:
        result: a finished job's.
        shared: what the sweep's other JobReturns hold, by name; the first job's is added.
    """
    hydra = result.hydra_cfg.hydra  # type: ignore[union-attr]
    for parent, name in ((hydra, "launcher"), (hydra.callbacks, "torchrun_guard")):
        node = parent.get(name)
        other = shared.setdefault(name, node)
        if node is not None and node is not other and _facts(node) == _facts(other):
            parent._content[name] = other  # noqa: SLF001


def _facts(node: Any) -> Any:
    try:
        return [OmegaConf.to_container(node, resolve=resolve) for resolve in (False, True)]
    except OmegaConfBaseException:  # settings that failed their job; like no other
        return object()


def add_remote_traceback(result: JobReturn, error: BaseException) -> None:
    """Put the traceback beside the exception as data, as hydra-core 1.4's run_job does.

    1.3 has no such fields, 1.4 no public way to fill them; test_seams.py fails if they move.
    """
    for field, serialize, subject in (
        ("_remote_traceback", "_serialize_traceback", error.__traceback__),
        ("_remote_exception_chain", "_serialize_exception_chain", error),
        ("_remote_exception_group", "_serialize_exception_group", error),
    ):
        if hasattr(result, field) and hasattr(utils, serialize):
            setattr(result, field, getattr(utils, serialize)(subject))


def hydra_logs_failures() -> bool:
    """Tell whether Hydra itself logs what a task function raises: since 1.4."""
    return hasattr(utils, "_log_job_error_to_file")


def log_ended(job: str, hydra: Any, ended: Ended, whitelist: Any) -> None:
    """Put the job's logging in force again and write to its log how it ended.

    Args:
        job: what to call it.
        hydra: its `hydra` node.
        ended: how it ended.
        whitelist: what hydra-core 1.4 may execute; None on 1.3.
    """
    try:
        rank_logging.apply(hydra.job_logging, hydra.verbose, whitelist)
        for text in ended.restarts:
            log_to_files(logging.WARNING, f"{job}: {text}")
        if ended.error is not None:
            log_to_files(logging.ERROR, f"{job} failed", ended.error)
    except Exception as problem:  # noqa: BLE001 - its directory is gone or full
        log.warning("%s: its log cannot be written: %s", job, problem.__cause__ or problem)


def _locale() -> str:
    """Return the encoding of files that are opened without one, as log files are."""
    return locale.getpreferredencoding(do_setlocale=False)


def log_to_files(level: int, text: str, error: BaseException | None = None) -> None:
    """Write to the log files only: the console has had it when it happened."""
    trace = (type(error), error, error.__traceback__) if error is not None else None
    record = log.makeRecord(__package__, level, __file__, 0, printable(text, _locale()), (), trace)
    if trace is not None:
        # A handler's stream may refuse what an exception's text holds.
        record.exc_text = printable(
            "".join(traceback.format_exception(*trace)).rstrip("\n"), _locale()
        )
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and record.levelno >= handler.level:
            handler.handle(record)
    sys.stderr.flush()
