"""A node that follows: it runs its part of each job that the leader gives it, and never sweeps (in
its launching process).
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobRuntime, setup_globals
from hydra.types import RunMode, TaskFunction

from hydra_torchrun_launcher import payload, published, rank_logging, tagged
from hydra_torchrun_launcher.errors import (
    JobStoppedError,
    LauncherError,
    NodeLostError,
    StartError,
    SweepEndedError,
    first_line,
    refused,
    signal_name,
)
from hydra_torchrun_launcher.nodes import Follower
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.plans import Begun
from hydra_torchrun_launcher.runner import JobRunner
from hydra_torchrun_launcher.settings import Settings
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.slots import Share
from hydra_torchrun_launcher.team import FollowersTeam, Role

log = logging.getLogger(__name__)

_NO_ROOM = "its accelerators or cores are taken by other jobs of the sweep"


class Following:
    """Does what the leader says until all is over."""

    def __init__(
        self, jobs: JobRunner, follower: Follower, loader: Any, task: TaskFunction, config: Any
    ) -> None:
        """Wait for the leader's first job.

        Args:
            jobs: runs this node's parts.
            follower: speaks to the leader.
            loader: composes configs, for their structure and types.
            task: the task function.
            config: this node's own config, of the sweep or the run.
        """
        self._jobs = jobs
        self._follower = follower
        self._loader = loader
        self._task = task
        self._config = config
        self._parts: dict[int, tuple[Begun, Share, FollowersTeam]] = {}
        self._orders: dict[int, dict[str, Any]] = {}
        self._roles: dict[Begun, Role] = {}
        self._watch: SignalWatch
        self._lost: NodeLostError | None = None

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `hear`."""
        return self._follower.fileno()

    def check(self) -> None:
        """Do nothing: `run` sees whether the leader is there."""

    def role(self, job: Begun, key: int, settings: Settings, watch: SignalWatch) -> Role:
        """Return this node's role in a job that the leader has given."""
        del key, settings, watch
        return self._roles.pop(job)

    def run(self) -> int:
        """Follow until all is over.

        Returns:
            The exit status of the sweep, or of the single run.

        Raises:
            LauncherError: the leader is not found, or lost; or a signal came.
        """
        setup_globals()
        self._jobs.nodes = self
        with closing(SignalWatch(self._jobs.signals)) as self._watch:
            try:
                self._follow_till_the_end()
            except JobStoppedError:
                pass
            finally:
                self._jobs.close()
                self._follower.close()
        if self._watch.received is not None:
            signal.raise_signal(self._watch.received)
            raise JobStoppedError(self._watch.received)
        if self._lost is not None:
            raise self._lost
        over = self._follower.over or {"status": 1, "why": ""}
        if over["why"]:
            log.error("%s", over["why"])
        return int(over["status"])

    def _follow_till_the_end(self) -> None:
        while True:
            self._follower.find(self._watch)
            self._follow()
            may_join_again = self._follower.settings.is_elastic and self._watch.received is None
            if self._lost is None or not may_join_again:
                return
            log.warning("%s; it is looked for again", self._lost)
            self._follower, self._lost = self._follower.again(self._lost), None

    def _follow(self) -> None:
        while True:
            for begun, ended in self._jobs.over(self._watch):
                self._end(begun, ended)
            if self._is_over and not self._parts:
                return
            self._jobs.follow(self._watch)

    @property
    def _is_over(self) -> bool:
        has_to_leave = self._watch.received is not None
        if has_to_leave and self._lost is None and self._follower.over is None:
            self._leave(f"it was stopped by {signal_name(self._watch.received or 0)}")
        return has_to_leave or self._lost is not None or self._follower.over is not None

    def _leave(self, why: str) -> None:
        if not self._parts:
            try:
                self._follower.leave(why)
            except NodeLostError as error:
                self._lost = error

    def hear(self) -> None:
        """Do what the leader says."""
        try:
            for word in self._follower.hear():
                self._obey(word)
        except NodeLostError as error:
            if self._follower.over is None:  # else the link has done, and left
                self._lose(error)
        if self._follower.over is not None:
            self._stop_all(SweepEndedError("stopped, as the sweep has ended on the leader"))

    def _lose(self, error: NodeLostError) -> None:
        if self._lost is None:
            self._lost = error
            self._stop_all(error)

    def _stop_all(self, error: Exception) -> None:
        for begun, _, _ in self._parts.values():
            self._jobs.stop(begun, error)

    def _obey(self, word: dict[str, Any]) -> None:
        if "job" in word:
            self._begin(word["job"], word)
        elif "order" in word and word["key"] in self._parts:
            self._parts[word["key"]][2].obey(word["order"])
        elif "verdict" in word:
            name = "Job" if word["number"] is None else f"Job #{word['number']}"
            if word["why"]:
                log.error("%s has failed: %s", name, word["why"])
            else:
                log.info("%s has completed", name)

    def _begin(self, key: int, word: dict[str, Any]) -> None:
        """Start this node's part of a job."""
        team = FollowersTeam(self._teller(key))
        try:
            with ExitStack() as stack:
                begun = self._compose(word, stack)
                lender = self._jobs.lender(self._watch)
                share = lender.take(self._jobs.ranks(begun.config, self._watch))
                if share is None:
                    raise StartError(_NO_ROOM)  # noqa: TRY301 - said as the others are
                self._roles[begun] = Role(team, word["run_id"], self._follower.node())
                ended = self._jobs.start(begun, share, self._watch)
        except (LauncherError, OSError) as problem:
            text = refused(problem) if isinstance(problem, OSError) else str(problem)
            log.error("The leader's job cannot start here: %s", text)  # noqa: TRY400 - no trace
            self._teller(key)({"op": "ended", "well": False, "why": text, "value": None})
            return
        except Exception as problem:  # of the user's config
            log.exception("The leader's job cannot be composed here")
            why = first_line(problem)
            self._teller(key)({"op": "ended", "well": False, "why": why, "value": None})
            return
        self._parts[key] = begun, share, team
        if ended is not None:
            self._end(begun, ended)

    def _teller(self, key: int) -> Callable[[dict[str, Any]], None]:
        def tell(says: dict[str, Any]) -> None:
            try:
                self._follower.tell({"key": key, "says": says})
            except NodeLostError as error:
                self._lose(error)

        return tell

    def _end(self, begun: Begun, ended: Ended) -> None:
        key = next(key for key, part in self._parts.items() if part[0] is begun)
        _, share, team = self._parts.pop(key)
        self._jobs.lender(self._watch).give_back(share)
        team.end(ended, has_rank_0=self._follower.has_rank_0)

    def _compose(self, word: dict[str, Any], stack: ExitStack) -> Begun:
        """Make of the leader's job what Hydra has begun here."""
        job = tagged.loads(word["text"])
        config = self._loader.load_configuration(
            config_name=self._config.hydra.job.config_name,
            overrides=list(job["overrides"]),
            run_mode=RunMode.RUN,
        )
        task_config, _ = published.lay(job, config, stack)
        hydra = HydraConfig.get()
        output_dir = str(hydra.runtime.output_dir)
        working_dir = published.enter_directory(job, output_dir) or os.getcwd()
        own = {str(name): str(value) for name, value in hydra.job.env_set.items()}
        whitelist = rank_logging.active_whitelist()
        work = payload.Work(
            task=self._task,
            config=task_config,
            hydra_config=HydraConfig.instance().cfg,
            job_name=str(JobRuntime.instance().get("name")),
            search_path=self._loader.get_search_path(),
            resolvers=payload.resolvers(),
            execution_whitelist=whitelist,
        )
        environ = {**os.environ, **own, **job["env_set"]}
        return Begun(word["number"], config, output_dir, environ, working_dir, work)
