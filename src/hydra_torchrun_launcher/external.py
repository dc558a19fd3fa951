"""Ranks that torchrun or Slurm started: one config and one output directory for all of them.

Rank 0 runs Hydra as if it were alone and tells the others what it has composed, or with which
status it leaves. The others compose without side effects, take rank 0's values, and run the task.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import env_override, setup_globals
from hydra.types import RunMode, TaskFunction
from omegaconf import OmegaConf

from hydra_torchrun_launcher import (
    guard,
    published,
    rank_logging,
    recording,
    settings,
    tagged,
)
from hydra_torchrun_launcher.config import TorchrunConf
from hydra_torchrun_launcher.errors import LauncherError, StartError, printable
from hydra_torchrun_launcher.hydra_job import hydra_logs_failures, log_to_files
from hydra_torchrun_launcher.launched import MARK, Place
from hydra_torchrun_launcher.meeting import Meeting, meet
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.restarts import Kept

_LEAVE_S = 30
"""How long rank 0 waits for the others to leave before it does."""
_NO_SWEEP = (
    "{by} has started this app as a job's ranks (WORLD_SIZE={count}), and each would run the whole "
    "sweep (-m, or hydra.mode=MULTIRUN): start it once, without {by}, and with "
    "hydra/launcher=torchrun, which starts the ranks of every job\n"
)
_NO_RERUN = "--experimental-rerun of hydra-core 1.3 runs in no rank: each would run it by itself\n"


def run(place: Place, with_hydra: Callable[[], Any]) -> Any:
    """Run the app in this rank.

    Args:
        place: which rank this is.
        with_hydra: starts Hydra.
    """
    os.environ.update({**place.variables, MARK: place.mark})
    try:
        meeting = meet(place)
        os.environ.setdefault("MASTER_PORT", str(meeting.port))
        rank = (_Leader if place.rank == 0 else _Follower)(place, meeting)
        guard.in_charge = rank
        return rank.run(with_hydra)
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None
    finally:
        guard.in_charge = None


class _Seen(BaseException):
    """The config has been looked at: Hydra is to do nothing more."""


def is_a_node(with_hydra: Callable[[], Any]) -> bool | None:
    """Tell whether the app is to start ranks here, as one of several nodes, by its config.

    Args:
        with_hydra: starts Hydra.

    Returns:
        None where the app runs nothing at all (--help), and has said what it had to.
    """
    seen: list[bool] = []

    def look(_: Callable[..., Any], **arguments: Any) -> None:
        with suppress(Exception):  # the run will say what is wrong
            config = arguments["hydra"].compose_config(
                config_name=arguments["config_name"],
                overrides=list(arguments["overrides"]),
                run_mode=RunMode.RUN,
                with_log_configuration=False,
            )
            is_ours = OmegaConf.select(config, "hydra.launcher._target_") == TorchrunConf._target_
            seen.append(is_ours and settings.read(config, os.environ).nodes is not None)
        raise _Seen

    try:
        with _in_place_of_hydras_run(look):
            with_hydra()
    except _Seen:
        return any(seen)
    finally:
        GlobalHydra.instance().clear()
    return None


class _Rank:
    """What the two kinds of ranks have in common."""

    def __init__(self, place: Place, meeting: Meeting) -> None:
        self._place = place
        self._meeting = meeting
        self._kept = Kept()
        self._has_composed = False

    def run_task(self, task_function: TaskFunction, config: Any) -> Ended:
        """Run the task function; leave word of its failure where torchrun looks for it."""
        if not self._has_composed:
            sys.stderr.write(_NO_RERUN)
            raise SystemExit(1)
        try:
            return Ended(task_function(config))
        except Exception as error:  # noqa: BLE001 - raised again, without the frames of ours
            recording.write_error_file(recording.describe(error), self._kept.error_file)
            if self._place.rank > 0 or not hydra_logs_failures():
                log_to_files(logging.ERROR, f"Rank {self._place.rank} failed", error)
            return Ended(error=error)

    def on_run_start(self, config: Any) -> None:
        """Start no ranks: this is one."""

    def on_job_end(self, job_return: Any) -> None:
        """Nothing is left to do."""


class _Leader(_Rank):
    """Rank 0."""

    _told = False

    def run(self, with_hydra: Callable[[], Any]) -> Any:
        """Start Hydra; the others leave as this rank leaves if it comes to no task."""
        try:
            with _in_place_of_hydras_run(self._run_app):
                result = with_hydra()
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)
        return result

    def _end(self, error: BaseException | None) -> None:
        """Let the others end as this rank does, if they wait for a job still."""
        if self._told:
            return
        status = _status(error)
        self._told = True
        with suppress(StartError):
            self._meeting.tell({"leave": status})
        if status and isinstance(error, SystemExit | Exception):  # else somebody is in a hurry
            _insist_on(status)
            self._meeting.wait_until_gone(_LEAVE_S)

    def _run_app(self, original: Callable[..., Any], **arguments: Any) -> None:
        if arguments["multirun"] or arguments["mode"] is RunMode.MULTIRUN:
            by, count = self._place.by, self._place.world_size
            sys.stderr.write(_NO_SWEEP.format(by=by, count=count))
            raise SystemExit(1)
        kept = self._kept.read()
        if kept:
            quoted = QuotedString(kept["output_dir"], Quote.single).with_quotes()
            arguments["overrides"].append(f"hydra.run.dir={quoted}")
        self._has_composed = True
        original(**arguments)

    def run_task(self, task_function: TaskFunction, config: Any) -> Ended:
        """Tell the others all that the task sees here, and run it when they are ready."""
        if not self._has_composed:
            return super().run_task(task_function, config)
        hydra = HydraConfig.get()
        # Its interpolations are resolved in the whole config, whose cache is not HydraConfig's.
        configs = (config, hydra._get_root())  # type: ignore[attr-defined] # noqa: SLF001
        published.set_caches(configs, self._kept.read().get("caches", ()))
        job = published.publish(configs, hydra, os.getcwd(), os.environ)
        caches = published.caches_of(configs)
        self._told = True
        self._meeting.tell({"job": job})
        self._kept.write(str(hydra.runtime.output_dir), caches)
        self._await_others()
        return super().run_task(task_function, config)

    def _await_others(self) -> None:
        """Wait until the others are ready; leave if one cannot be."""
        try:
            problems = {rank: text for rank, text in self._meeting.hear_all().items() if text}
            said = [f"rank {rank}: {text}" for rank, text in problems.items()]
        except StartError as error:
            said = [str(error)]
        with suppress(StartError):  # of one that is gone, too
            self._meeting.tell(not said)
        if said:
            sys.stderr.write("".join(f"{line}\n" for line in said))
            raise SystemExit(1)


class _Follower(_Rank):
    """Any other rank."""

    _job: str

    def run(self, with_hydra: Callable[[], Any]) -> Any:
        """Wait for rank 0's word; leave as it leaves, or run the task with its config."""
        word = self._meeting.hear()
        if "leave" in word:
            return _leave(word["leave"])
        self._job = word["job"]
        with _in_place_of_hydras_run(self._run_app):
            return with_hydra()

    def _run_app(self, _: Callable[..., Any], **arguments: Any) -> None:
        with ExitStack() as stack:
            problem = ""
            try:
                config = self._compose(arguments["hydra"], arguments["config_name"], stack)
            except Exception as error:  # noqa: BLE001 - said by rank 0
                problem = printable(str(error)) or type(error).__name__
            self._meeting.tell(problem)
            if not self._meeting.hear():
                raise SystemExit(1)
            self._has_composed = True
            self._run_and_leave(arguments["task_function"], config)

    def _compose(self, hydra: Any, config_name: str | None, stack: ExitStack) -> Any:
        """Make all that the task sees as rank 0 sees it, until the stack is unwound."""
        job = tagged.loads(self._job)
        setup_globals()
        config = hydra.compose_config(
            config_name=config_name,
            overrides=list(job["overrides"]),
            run_mode=RunMode.RUN,
            with_log_configuration=False,
        )
        task_config, _ = published.lay(job, config, stack)
        self._enter_job(job, stack)
        return task_config

    def _enter_job(self, job: dict[str, Any], stack: ExitStack) -> None:
        """Set directory, variables and logging as Hydra does around a task."""
        hydra = HydraConfig.get()
        output_dir = str(hydra.runtime.output_dir)
        working_dir = published.enter_directory(job, output_dir)
        if os.environ.get("LOCAL_RANK") == "0":
            self._kept.write(output_dir, job["resolvers"])
        if working_dir is not None:
            stack.callback(_change_back, os.getcwd())
            os.chdir(working_dir)
        stack.enter_context(env_override({**hydra.job.env_set, **job["env_set"]}))
        whitelist = rank_logging.active_whitelist()
        rank_logging.configure(HydraConfig.instance().cfg, (self._place.rank, ""), whitelist)

    def _run_and_leave(self, task_function: TaskFunction, config: Any) -> None:
        try:
            task_function(config)
        except Exception as error:  # noqa: BLE001 - shown as Hydra shows rank 0's
            trace = recording.describe(error)["traceback"]
            recording.say(f"Error executing job in rank {self._place.rank}\n{trace}")
            raise SystemExit(1) from None


def _change_back(directory: str) -> None:
    with suppress(OSError):  # the task may have removed it
        os.chdir(directory)


def _leave(status: int | None) -> None:
    """Leave as rank 0 does; go on after `main` as it does if there is no status."""
    if status:
        _insist_on(status)
    if status is not None:
        raise SystemExit(status)


def _insist_on(status: int) -> None:
    """Leave with this status, also when torchrun ends the ranks because one has left with it."""
    with suppress(ValueError):  # no handlers outside the main thread
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
        # The interpreter's end, which takes a while, drops handlers.
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)


def _status(error: BaseException | None) -> int | None:
    """Return the status with which rank 0 leaves; None where it goes on after `main`."""
    if error is None:
        return None
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


@contextmanager
def _in_place_of_hydras_run(run_app: Callable[..., Any]) -> Iterator[None]:
    """Have Hydra call this where it would run the app: the command line is parsed then, and the
    config not yet composed for good. test_seams.py fails if the name moves.
    """
    utils: Any = importlib.import_module("hydra._internal.utils")
    original = utils._run_app  # noqa: SLF001

    def called(**arguments: Any) -> None:
        run_app(original, **arguments)

    utils._run_app = called  # noqa: SLF001
    try:
        yield
    finally:
        utils._run_app = original  # noqa: SLF001
