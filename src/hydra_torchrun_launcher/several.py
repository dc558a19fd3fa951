"""A sweep or a single run on several nodes: this one leads or follows (launching process)."""

from __future__ import annotations

import signal
from contextlib import closing
from typing import Any

from hydra.types import TaskFunction

from hydra_torchrun_launcher.errors import JobStoppedError
from hydra_torchrun_launcher.following import Following
from hydra_torchrun_launcher.leading import Leading
from hydra_torchrun_launcher.nodes import Follower, Leader, facts_of, meet
from hydra_torchrun_launcher.runner import JobRunner
from hydra_torchrun_launcher.signals import SignalWatch

_FAILED = "the {kind} has failed on the leader: see its output there"
_BY_SIGNAL = 128
"""Added to a signal's number in the exit status of what it has ended, as shells do."""


class Company:
    """The other nodes of a sweep or a single run, on the one that leads."""

    def __init__(self, leader: Leader, kind: str) -> None:
        """Take over the connection to them.

        Args:
            leader: holds it.
            kind: what runs on them.
        """
        self._leader = leader
        self._kind = kind

    def gather(self, watch: SignalWatch) -> None:
        """Wait until all nodes are there.

        Raises:
            StartError: they are not within the time.
            JobStoppedError: a signal came.
        """
        self._leader.gather(watch)

    def end(self, status: int, signum: int | None = None) -> bool:
        """Have the others leave, the first time; return whether all of them have heard it.

        Args:
            status: the exit status, which is theirs.
            signum: the signal that has ended it, if one has.
        """
        if signum is not None:
            status = _BY_SIGNAL + signum
        why = _FAILED.format(kind=self._kind) if status else ""
        return self._leader.close(status, why)


def in_company(
    jobs: JobRunner, kind: str, loader: Any, task: TaskFunction, config: Any
) -> Company | None:
    """Begin to lead the other nodes if there are any; on a node that follows, follow and leave.

    Args:
        jobs: runs this node's parts of jobs.
        kind: what runs, a sweep or a single run.
        loader: composes configs.
        task: the task function.
        config: the sweep's or the run's own config.

    Raises:
        SystemExit: this node has followed; the status is the leader's.
        LauncherError: it has not found its leader or has lost it, or cannot lead.
    """
    nodes = jobs.settings_of_nodes
    if nodes is None or jobs.is_dry:
        return None
    facts = facts_of(nodes, str(config.hydra.job.name), kind)
    try:
        with closing(SignalWatch(jobs.signals)) as watch:
            found = meet(nodes, facts, watch)
    except JobStoppedError as stopped:
        signal.raise_signal(stopped.signum)
        raise
    if isinstance(found, Follower):
        jobs.follows = True
        raise SystemExit(Following(jobs, found, loader, task, config).run())
    jobs.nodes = Leading(found)
    return Company(found, kind)
