"""One job on several nodes: what its parts agree on (in the launching processes).

Each node has a part of the job: a keeper, an agent, ranks. The leader forms the rounds in which
agents start their ranks, decides that all have finished, and has every part end when one fails. The
agents of torch elastic agree on nothing by themselves: left alone, one may report success while
another has failed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from hydra_torchrun_launcher import tagged
from hydra_torchrun_launcher.errors import (
    JobStoppedError,
    LauncherError,
    SweepEndedError,
    TransportError,
    first_line,
)
from hydra_torchrun_launcher.outcomes import Ended, Failure


class Part(Protocol):
    """This node's part of a job."""

    @property
    def cause(self) -> str:
        """Which rank failed first, and how, in a line; empty where none did."""

    def order(self, order: dict[str, Any]) -> None:
        """Tell its keeper something."""

    def note_regrouping(self, why: str) -> None:
        """Take in that its ranks start again as nodes come or go."""

    def note_start(self, message: dict[str, Any]) -> None:
        """Take in that the ranks of an attempt are there."""

    def note_failure(self, failure: Failure) -> None:
        """Take in that a rank has failed."""

    def note_stand(self, rank: int, stood: str) -> None:
        """Take in where a rank stood when the time was up."""

    def note_completion(self) -> None:
        """Take in that the whole job has completed."""

    def end(self, error: Exception) -> None:
        """End it, with this error as its result unless it has another."""


class Team(Protocol):
    """The other parts, as this node's part sees them."""

    def join(self, part: Part) -> None:
        """Know this node's part."""

    def hear(self, message: dict[str, Any]) -> None:
        """Take in what this node's keeper says to all of them."""

    def failed(self, failure: Failure) -> None:
        """Take in that a rank of this node has failed."""

    def stands(self, rank: int, stood: str) -> None:
        """Take in where a rank of this node stood when the time was up."""

    def leaves(self, why: str) -> None:
        """Take in that this node's ranks were asked to leave, by a signal to this node."""

    def pass_on(self, order: dict[str, Any]) -> None:
        """Have the others do what this node's part does."""

    def own_has_ended(self, *, well: bool) -> None:
        """Take in that this node's part is over."""

    @property
    def is_over(self) -> bool:
        """Whether the others are over."""

    @property
    def last_attempt(self) -> int:
        """The number of the attempt whose failure is the job's."""

    @property
    def expects_failures(self) -> bool:
        """Whether ranks are about to fail only because nodes have come or gone."""

    @property
    def wait_s(self) -> float | None:
        """Seconds until `keep_time` has something to do; None: never."""

    def keep_time(self) -> None:
        """Act on limits that have passed."""

    def result(self, value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
        """Return the job's result, from that of this node's part."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Role:
    """What a node is in a job.

    Attributes:
        team: the job's other parts.
        run_id: the job's id for torch elastic, or None for a new one.
        node: this node's `label` for its files, its `address` for the others, and whether it
            `has_store`; None for one node.
        begin: has the other parts begin.
    """

    team: Team
    run_id: str | None
    node: dict[str, Any] | None
    begin: Callable[[], None] = _nothing


class Alone:
    """The team of a job on one node."""

    is_over = True
    wait_s = None
    expects_failures = False

    def __init__(self, max_restarts: int) -> None:
        """Wait for the job's part.

        Args:
            max_restarts: how often its ranks may start again.
        """
        self.last_attempt = max_restarts

    def join(self, part: Part) -> None:
        """Know this node's part."""
        self._part = part

    def hear(self, message: dict[str, Any]) -> None:
        """Hand back what goes to all parts on several nodes."""
        if message["op"] == "ranks":
            self._part.note_start(message)
        elif message["op"] == "completed":
            self._part.note_completion()

    def failed(self, failure: Failure) -> None:
        """Do nothing: there is nobody to tell."""

    def stands(self, rank: int, stood: str) -> None:
        """Do nothing: there is nobody to tell."""

    def leaves(self, why: str) -> None:
        """Do nothing: there is nobody to tell."""

    def pass_on(self, order: dict[str, Any]) -> None:
        """Do nothing: there is nobody to tell."""

    def own_has_ended(self, *, well: bool) -> None:
        """Do nothing: there is nobody to tell."""

    def keep_time(self) -> None:
        """Do nothing: there is nobody to wait for."""

    def result(self, value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
        """Return what they are."""
        return value, error


class FollowersTeam:
    """The team as a follower has it: all is told to the leader, which decides."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        """Tell nothing yet.

        Args:
            tell: sends the leader a word about the job.
        """
        self._tell = tell
        self._part: Part | None = None
        self.last_attempt = 0
        self.expects_failures = False

    def join(self, part: Part) -> None:
        """Know this node's part."""
        self._part = part

    def obey(self, order: dict[str, Any]) -> None:
        """Do what the leader wants of this node's part."""
        if self._part is None:
            return
        if order["op"] == "stop":
            self._part.end(SweepEndedError(f"stopped: {order.get('why', 'the leader wants it')}"))
            return
        if order["op"] == "finish":
            self._part.note_completion()
        elif order["op"] == "round":
            self.last_attempt, self.expects_failures = order["last"], False
        elif order["op"] == "regroup":
            self.expects_failures = order["fallout"]
        self._part.order(order)

    def hear(self, message: dict[str, Any]) -> None:
        """Tell the leader what this node's keeper says."""
        if message["op"] != "completed":
            self._tell(message)

    def failed(self, failure: Failure) -> None:
        """Tell the leader of it."""
        self._tell({"op": "failed", "failure": failure.as_data()})

    def stands(self, rank: int, stood: str) -> None:
        """Tell the leader of it."""
        self._tell({"op": "stands", "rank": rank, "stood": stood})

    def end(self, ended: Ended, *, has_rank_0: bool) -> None:
        """Tell the leader how this node's part has ended."""
        value, error = None, ended.error
        if error is None and has_rank_0:
            try:
                value = tagged.dumps(ended.value, "The task function's return value")
            except TransportError as problem:
                error = problem
        well = error is None
        why = str(error) if isinstance(error, LauncherError) else first_line(error) if error else ""
        leaves = isinstance(error, JobStoppedError)
        self._tell({"op": "ended", "well": well, "why": why, "value": value, "leaves": leaves})

    def leaves(self, why: str) -> None:
        """Tell the leader of it, before its ranks are gone and others fail for lack of them."""
        self._tell({"op": "leaves", "why": why})

    def pass_on(self, order: dict[str, Any]) -> None:
        """Do nothing: the leader does."""

    def own_has_ended(self, *, well: bool) -> None:
        """Do nothing: `end` tells more."""

    is_over = True
    wait_s = None

    def keep_time(self) -> None:
        """Do nothing: the leader has the limits."""

    def result(self, value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
        """Return this node's part of it."""
        return value, error
