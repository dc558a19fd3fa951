"""Ranks that torchrun or Slurm started: one config and one output directory for all of them.

Rank 0 runs Hydra as if it were alone and tells the others what it has composed, or with which
status it leaves. The others compose without side effects, take rank 0's values, and run the task.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import env_override, setup_globals
from hydra.types import RunMode, TaskFunction
from omegaconf import OmegaConf, open_dict, read_write

from hydra_torchrun_launcher import guard, overlay, payload, rank_logging, recording, tagged
from hydra_torchrun_launcher.errors import LauncherError, StartError, printable
from hydra_torchrun_launcher.hydra_job import hydra_logs_failures, log_to_files
from hydra_torchrun_launcher.launched import MARK, Place
from hydra_torchrun_launcher.meeting import Meeting
from hydra_torchrun_launcher.outcomes import Ended

_JOB, _READY, _GO, _LEFT = "job", "ready", "go", "left"
_LEAVE_S = 30
"""How long rank 0 waits for others to hear that it leaves, where they can hear it later too."""
_NO_SWEEP = (
    "{by} has started this app as a job's ranks (WORLD_SIZE={count}), and each would run the whole "
    "sweep (-m, or hydra.mode=MULTIRUN): start it once, without {by}, and with "
    "hydra/launcher=torchrun, which starts the ranks of every job\n"
)
_KEPT = "hydra_job_{}.json"
"""Files in torchrun's own log folder, one for each call of `main`, by which restarted ranks meet
the output directory again, and the values that an earlier attempt's ranks shared."""
_calls = itertools.count()


def run(place: Place, with_hydra: Callable[[], Any]) -> Any:
    """Run the app in this rank.

    Args:
        place: which rank this is.
        with_hydra: starts Hydra.
    """
    os.environ.update({**place.variables, MARK: place.mark})
    try:
        meeting = Meeting(place)
        os.environ.setdefault("MASTER_PORT", str(meeting.port))
        rank = (_Leader if place.rank == 0 else _Follower)(place, meeting)
        guard.in_charge = rank
        return rank.run(with_hydra)
    except LauncherError as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(1) from None
    finally:
        guard.in_charge = None


class _Rank:
    """What the two kinds of ranks have in common."""

    def __init__(self, place: Place, meeting: Meeting) -> None:
        self._place = place
        self._meeting = meeting
        # The task may run in another directory.
        error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
        self._error_file = os.path.abspath(error_file) if error_file else ""
        self._kept_name = _KEPT.format(next(_calls))

    @property
    def _torchruns_folder(self) -> Path | None:
        """Torchrun's folder for this start; the error file is in its attempt_<n>/<local rank>/.

        It is there as long as torchrun's logs are, and no two starts have the same.
        """
        folders = Path(self._error_file).parents
        is_known = len(folders) > 2 and folders[1].name.startswith("attempt_")  # noqa: PLR2004
        return folders[2] if is_known else None

    def _keep(self, output_dir: str, caches: list[Any]) -> None:
        """Write down what ranks that torchrun starts again must find as it was."""
        folder = self._torchruns_folder
        if folder is not None:
            with suppress(OSError):  # then they get a directory of their own
                unfinished = folder / f"{self._kept_name}.{self._place.rank}"
                unfinished.write_text(tagged.dumps({"output_dir": output_dir, "caches": caches}))
                unfinished.replace(folder / self._kept_name)

    def _kept(self) -> dict[str, Any]:
        folder = self._torchruns_folder
        if folder is None or not (folder / self._kept_name).exists():
            return {}
        return dict(tagged.loads((folder / self._kept_name).read_text()))

    def run_task(self, task_function: TaskFunction, config: Any) -> Ended:
        """Run the task function; leave word of its failure where torchrun looks for it."""
        try:
            return Ended(task_function(config))
        except Exception as error:  # noqa: BLE001 - raised again, without the frames of ours
            recording.write_error_file(recording.describe(error), self._error_file)
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
        self._tell({"leave": status})
        if error is None or isinstance(error, SystemExit | Exception):  # nobody is in a hurry
            _insist_on(status)
            with suppress(StartError):
                self._meeting.hear_all(_LEFT, _LEAVE_S if self._place.shares_store else None)

    def _run_app(self, original: Callable[..., Any], **arguments: Any) -> None:
        if arguments["multirun"] or arguments["mode"] is RunMode.MULTIRUN:
            by, count = self._place.by, self._place.world_size
            sys.stderr.write(_NO_SWEEP.format(by=by, count=count))
            raise SystemExit(1)
        kept = self._kept()
        if kept:
            quoted = QuotedString(kept["output_dir"], Quote.single).with_quotes()
            arguments["overrides"].append(f"hydra.run.dir={quoted}")
        original(**arguments)

    def run_task(self, task_function: TaskFunction, config: Any) -> Ended:
        """Tell the others all that the task sees here, and run it when they are ready."""
        hydra_config: Any = HydraConfig.instance().cfg
        configs = (config, hydra_config)
        for each, cache in zip(configs, self._kept().get("caches", ()), strict=False):
            _set_cache(each, cache)
        for each in configs:
            payload.evaluate_cached_resolvers(each)
        hydra = hydra_config.hydra
        caches = [OmegaConf.get_cache(each) for each in configs]
        self._keep(hydra.runtime.output_dir, caches)
        self._tell({
            "config": overlay.raw(config),
            "hydra": overlay.raw(hydra),
            "caches": caches,
            "overrides": [*hydra.overrides.hydra, *hydra.overrides.task],
            "working_dir": os.getcwd(),
            "env_set": _shared_variables(overlay.raw(hydra.job.env_set)),
        })  # fmt: skip
        problems = {rank: text for rank, text in self._meeting.hear_all(_READY).items() if text}
        self._meeting.tell(_GO, "no" if problems else "")
        if problems:
            for rank, text in problems.items():
                sys.stderr.write(f"rank {rank}: {text}\n")
            raise SystemExit(1)
        return super().run_task(task_function, config)

    def _tell(self, job: dict[str, Any]) -> None:
        self._meeting.tell(_JOB, tagged.dumps(job))
        self._told = True


class _Follower(_Rank):
    """Any other rank."""

    _job: dict[str, Any]

    def run(self, with_hydra: Callable[[], Any]) -> Any:
        """Wait for rank 0's word; leave as it leaves, or run the task with its config."""
        self._job = tagged.loads(self._meeting.hear(_JOB))
        if "leave" in self._job:
            return self._leave(self._job["leave"])
        with _in_place_of_hydras_run(self._run_app):
            return with_hydra()

    def _leave(self, status: int | None) -> None:
        """Leave as rank 0 does."""
        _insist_on(status)
        self._meeting.tell(f"{_LEFT}/{self._place.rank}")
        if status is not None:
            raise SystemExit(status)

    def _run_app(self, _: Callable[..., Any], **arguments: Any) -> None:
        hydra, config_name = arguments["hydra"], arguments["config_name"]
        problem = ""
        try:
            setup_globals()
            config = hydra.compose_config(
                config_name=config_name,
                overrides=list(self._job["overrides"]),
                run_mode=RunMode.RUN,
                with_log_configuration=False,
            )
            task_config = self._become_rank_0s(config)
        except Exception as error:  # noqa: BLE001 - said by rank 0
            problem = str(error) or type(error).__name__
        self._meeting.tell(f"{_READY}/{self._place.rank}", printable(problem))
        if self._meeting.hear(_GO):
            raise SystemExit(1)
        with self._surroundings():
            self._run_and_leave(arguments["task_function"], task_config)

    def _run_and_leave(self, task_function: TaskFunction, config: Any) -> None:
        try:
            task_function(config)
        except Exception as error:  # noqa: BLE001 - shown as Hydra shows rank 0's
            trace = recording.describe(error)["traceback"]
            recording.say(f"Error executing job in rank {self._place.rank}\n{trace}")
            raise SystemExit(1) from None

    def _become_rank_0s(self, config: Any) -> Any:
        """Set Hydra's state as it is in rank 0; return the task's config."""
        overlay.lay({**self._job["config"], "hydra": self._job["hydra"]}, config)
        HydraConfig.instance().set_config(config)
        task_config = copy.deepcopy(config)
        with read_write(task_config), open_dict(task_config):
            del task_config["hydra"]
        hydra_config: Any = HydraConfig.instance().cfg
        for each, cache in zip((task_config, hydra_config), self._job["caches"], strict=True):
            _set_cache(each, cache)
        return task_config

    @contextmanager
    def _surroundings(self) -> Iterator[None]:
        """Set directory, variables and logging as Hydra does around a task, and undo it."""
        directory = os.getcwd()
        hydra = HydraConfig.get()
        output_dir = Path(hydra.runtime.output_dir)
        output_dir.mkdir(parents=True, exist_ok=True)
        if os.environ.get("LOCAL_RANK") == "0":
            self._keep(str(output_dir), self._job["caches"])
        if self._job["working_dir"] == os.path.realpath(output_dir):
            os.chdir(output_dir)
        with env_override({**hydra.job.env_set, **self._job["env_set"]}):
            whitelist = rank_logging.active_whitelist()
            rank_logging.configure(HydraConfig.instance().cfg, (self._place.rank, ""), whitelist)
            try:
                yield
            finally:
                HydraConfig.instance().cfg = None
                os.chdir(directory)


def _insist_on(status: int | None) -> None:
    """Leave with this status, although torchrun ends the others when one rank has left with it."""
    if status:
        with suppress(ValueError):  # no handlers outside the main thread
            signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _status(error: BaseException | None) -> int | None:
    """Return the status with which rank 0 leaves; None where it goes on after `main`."""
    if error is None:
        return None
    if not isinstance(error, SystemExit):
        return 1
    return error.code if isinstance(error.code, int) else int(error.code is not None)


def _set_cache(config: Any, cache: dict[str, Any]) -> None:
    # OmegaConf adds what is not there yet, by resolver.
    OmegaConf.set_cache(config, defaultdict(dict, cache))


def _shared_variables(env_set: dict[str, Any]) -> dict[str, str]:
    """Return what the job has set that all ranks must see alike: Hydra keeps it nowhere else."""
    mark = payload.cached_resolvers_mark()
    return {
        name: os.environ[name]
        for name, value in env_set.items()
        if isinstance(value, str) and mark.search(value)
    }


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
