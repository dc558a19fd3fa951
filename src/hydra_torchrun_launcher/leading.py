"""Jobs on several nodes, on the one that leads (in its launching process)."""

from __future__ import annotations

import logging
import signal
import uuid
from collections.abc import Callable
from typing import Any

from hydra_torchrun_launcher import published, tagged
from hydra_torchrun_launcher.errors import (
    LauncherError,
    NodeLostError,
    StartError,
    TransportError,
    UnsendableValueError,
    first_line,
)
from hydra_torchrun_launcher.nodes import Leader
from hydra_torchrun_launcher.outcomes import Failure
from hydra_torchrun_launcher.plans import Begun
from hydra_torchrun_launcher.processes import Deadline
from hydra_torchrun_launcher.settings import Settings
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.team import Part, Role

log = logging.getLogger(__name__)

_PARTS_END_S = 90
"""How long a node has to end its part, beyond the ranks' time to leave: longer than its keeper."""


class LeadersTeam:
    """The team as the leader has it. Nodes have their leader's numbers; 0 is the leader itself."""

    _part: Part

    def __init__(
        self,
        leader: Leader,
        job: tuple[int, int | None],
        max_restarts: int,
        grace_s: float,
        word: dict[str, Any],
    ) -> None:
        """Wait for the agents' first round.

        Args:
            leader: speaks to the other nodes.
            job: its key, which tells it from others, and its number in the sweep.
            max_restarts: how often the ranks may start again after a failure or a node's loss.
            grace_s: how long ranks have to leave once they were asked to.
            word: gives another node its part of the job.
        """
        self._leader = leader
        self._key, self._number = job
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._word = word
        self._is_elastic = leader.settings.is_elastic
        self._parts = leader.here
        self._expected = set(self._parts)
        self._members: list[int] = []
        self._round = 0
        self._restarts = 0
        self._is_round_over = True
        self._waiting: dict[int, dict[str, Any]] = {}
        self._started: dict[int, dict[str, Any]] = {}
        self._finished: set[int] = set()
        self._leaving: dict[int, str] = {}
        self._ended: dict[int, dict[str, Any]] = {}
        self._limit = Deadline()
        self._is_ending = False
        self._has_finished = False
        self.expects_failures = False
        """Whether ranks are about to fail only because nodes have come or gone."""

    def begin(self) -> None:
        """Give the other nodes their parts."""
        for node in [*self._parts]:
            self._invite(node)

    def _invite(self, node: int) -> None:
        if node:
            self._leader.tell(node, self._word)

    def join(self, part: Part) -> None:
        """Know this node's part, and listen to the others."""
        self._part = part
        self._leader.listeners[self._key] = self

    def hear(self, message: dict[str, Any]) -> None:
        """Take in what this node's keeper says to all of them."""
        self.heard(0, message)

    def failed(self, failure: Failure) -> None:
        """Do nothing: this node's part has noted it."""

    def stands(self, rank: int, stood: str) -> None:
        """Do nothing: this node's part has noted it."""

    def heard(self, node: int, says: dict[str, Any]) -> None:
        """Take in what a node says of the job."""
        operations: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "join": self._join_round,
            "ranks": self._note_start,
            "finished": self._finish,
            "failed": lambda _, said: self._part.note_failure(Failure.from_data(said["failure"])),
            "stands": lambda _, said: self._part.note_stand(said["rank"], said["stood"]),
            "leaves": self._note_leaving,
            "ended": self._end,
            "completed": lambda *_: None,  # on one node; `finished` says that its ranks are gone
        }
        operations[says["op"]](node, says)

    def has_come(self, node: int) -> None:
        """Have a node that has joined take part, if the job goes on."""
        if not self._is_ending and not self._has_finished:
            self._parts.append(node)
            self._invite(node)

    def has_gone(self, node: int, why: str) -> None:
        """Go on without a node that is lost, if that is allowed."""
        if node not in self._parts:
            return
        self._parts.remove(node)
        self._expected.discard(node)
        self._waiting.pop(node, None)
        if not self._is_elastic or self._is_ending:
            return
        if node in self._members and node not in self._finished:
            lost = f"{self._leader.name(node)} is lost: {why}"
            self._end_round(self._leaving.get(node, lost), counts=True)
        self._try_round()

    @property
    def last_attempt(self) -> int:
        """The number of the attempt whose failure is the job's."""
        return max(0, self._round - 1) + self._max_restarts - self._restarts

    def _order(self, node: int, order: dict[str, Any]) -> None:
        if node == 0:
            self._part.order(order)
        else:
            self._leader.tell(node, {"key": self._key, "order": order})

    def _others(self) -> list[int]:
        """Return the other nodes that are not over."""
        return [node for node in self._parts if node and node not in self._ended]

    def _join_round(self, node: int, message: dict[str, Any]) -> None:
        """Start the ranks on all nodes once each of them is ready to."""
        if self._is_ending:
            self._order(node, {"op": "refuse"})
            return
        is_member = node in self._members
        if not self._is_round_over:
            if is_member:
                self._end_round(self._why_left(), counts=True)
            elif self._finished:
                return  # it completes, most likely; if not, the node takes part in the next round
        if is_member and self._restarts > self._max_restarts:
            self._order(node, {"op": "refuse"})
            return
        self._waiting[node] = message
        if not self._is_round_over:
            self._end_round(f"{self._leader.name(node)} has joined", counts=False)
        self._try_round()
        if self._waiting:
            self._limit.within(self._leader.settings.join_timeout_s)

    def _end_round(self, why: str, *, counts: bool) -> None:
        """Have all ranks start again, if that is allowed.

        Args:
            why: which node has come or gone; empty where a rank has failed.
            counts: whether that uses one of the restarts.
        """
        if self._is_round_over:
            return
        self._restarts += counts
        self._is_round_over = True
        self.expects_failures = bool(why)
        self._limit.clear()
        self._limit.within(self._leader.settings.join_timeout_s)
        if self._restarts > self._max_restarts:
            if why:
                used = f"no restart is left (hydra.launcher.max_restarts={self._max_restarts})"
                self._fail(NodeLostError(f"{why}; {used}"))
            return
        if why:
            number = f" (restart {self._restarts} of {self._max_restarts})" if counts else ""
            self._part.note_regrouping(f"{why}; its ranks start again{number}")
        for node in self._members:
            if node in self._parts and node not in self._waiting:
                self._order(node, {"op": "regroup", "fallout": bool(why)})

    def _try_round(self) -> None:
        """Start the ranks if all are ready that are waited for."""
        is_ready = self._expected <= self._waiting.keys()
        is_enough = len(self._waiting) >= self._leader.settings.least
        if self._waiting and is_ready and is_enough and self._is_round_over:
            self._form_round()

    def _form_round(self) -> None:
        self._members = [node for node in self._leader.here if node in self._waiting]
        first = self._members[0]
        store = {
            "host": self._leader.addresses[first] or "localhost",
            "port": self._waiting[first]["port"],
        }
        self._expected = set(self._members)
        self._limit.clear()
        self._waiting.clear()
        self._started.clear()
        self._finished.clear()
        self._leaving.clear()
        self._is_round_over = self.expects_failures = False
        self._round += 1
        round_ = {"op": "round", "number": self._round - 1, "last": self.last_attempt, **store}
        for rank, node in enumerate(self._members):
            self._order(node, {**round_, "rank": rank, "count": len(self._members)})

    def _note_start(self, node: int, message: dict[str, Any]) -> None:
        if message["attempt"] != self._round - 1:
            return
        self._started[node] = message
        if self._started.keys() >= set(self._members):
            by_node = [self._started[node] for node in self._members]
            names = [self._leader.host(node) for node in self._members]
            hosts = [host for host, part in zip(names, by_node, strict=True) for _ in part["pids"]]
            pids, folders = (
                [each for part in by_node for each in part[name]] for name in ("pids", "folders")
            )
            together = {"pids": pids, "folders": folders, "hosts": hosts, "nodes": names}
            self._part.note_start({"attempt": message["attempt"], **together})

    def _finish(self, node: int, message: dict[str, Any]) -> None:
        """Decide that the job has completed once it has on all nodes; no restart comes after."""
        if message["attempt"] != self._round - 1 or self._is_ending or self._is_round_over:
            return
        if node in self._leaving:
            return  # its ranks have left, which is no end of their work
        self._finished.add(node)
        if self._leaving and self._finished | self._leaving.keys() >= set(self._members):
            # They may all have agreed to leave, with half of the work done.
            self._end_round(self._why_left(), counts=True)
        elif self._finished >= set(self._members):
            self._has_finished = True
            self._part.note_completion()
            self._limit.clear()
            self._limit.within(self._grace_s + _PARTS_END_S)
            for each in [*self._parts]:
                is_member = each in self._members
                late = _stop("the job has completed before this node could take part")
                self._order(each, {"op": "finish"} if is_member else late)

    def _note_leaving(self, node: int, message: dict[str, Any]) -> None:
        """Expect that a node's ranks leave, and that others fail for lack of them."""
        is_at_work = node in self._members and node not in self._finished
        if self._is_elastic and is_at_work and not self._is_ending and not self._is_round_over:
            self._leaving[node] = f"{self._leader.name(node)} leaves: {message['why']}"
            self.expects_failures = True

    def _why_left(self) -> str:
        return "; ".join(self._leaving.values())

    def _end(self, node: int, message: dict[str, Any]) -> None:
        self._ended[node] = message
        if self._is_ending or message["well"] or (self._has_finished and node not in self._members):
            return
        name = self._leader.name(node)
        if self._is_elastic and not self._has_finished and message.get("leaves"):
            self.has_gone(node, message["why"])
        elif self._is_elastic and self._members and node not in self._members:
            log.warning("%s cannot take part in the job: %s", name, message["why"])
            self.has_gone(node, message["why"])
        else:
            self._fail(StartError(f"{name}: {message['why']}"), f"the job has failed on {name}")

    def _fail(self, error: Exception, why: str = "") -> None:
        """End the job on all nodes."""
        self.pass_on(_stop(why or str(error)))
        self._part.end(error)

    def own_has_ended(self, *, well: bool) -> None:
        """Take in that this node's part is over; the others end with it if it has failed."""
        self._ended[0] = {"well": well, "why": "its part has failed"}
        if not well:
            self.pass_on(_stop(f"the job has failed on {self._leader.name(0)}"))

    def leaves(self, why: str) -> None:
        """Do nothing: the others are stopped too."""

    def pass_on(self, order: dict[str, Any]) -> None:
        """Have the others do what this node's part does."""
        if order["op"] == "stop" and self._is_ending:
            return
        self._is_ending = True
        self._limit.clear()
        self._limit.within(self._grace_s + _PARTS_END_S)
        for node in self._others():
            self._order(node, order)

    @property
    def is_over(self) -> bool:
        """Whether the others are over."""
        return not self._others()

    @property
    def wait_s(self) -> float | None:
        """Seconds until `keep_time` has something to do; None: never."""
        return self._limit.remaining_s

    def keep_time(self) -> None:
        """Act on limits that have passed, and on a node's loss."""
        if self._leader.lost is not None and not self._is_ending:
            self._fail(self._leader.lost)
        if not self._limit.passed:
            return
        self._limit.clear()
        if self._is_ending or self._has_finished:
            for node in self._others():
                self._leader.give_up(node, "it does not end its part of a job")
        elif self._is_round_over:
            self._miss()

    def _miss(self) -> None:
        """Go on without those who did not come, or fail."""
        within = f"within {self._leader.settings.join_timeout_s:g} s (hydra.launcher.rdzv_timeout)"
        missing = sorted(self._expected - self._waiting.keys())
        if self._is_elastic and missing and 0 not in missing:
            for node in missing:
                self._leader.give_up(node, f"it did not come to the job's rendezvous {within}")
            if not self._is_round_over:
                return
        if missing and (not self._is_elastic or 0 in missing):
            names = ", ".join(map(self._leader.name, missing))
            self._fail(StartError(f"{names} did not come to the job's rendezvous {within}"))
        elif self._waiting:
            least, count = self._leader.settings.least, len(self._waiting)
            problem = f"{count} of at least {least} nodes were there {within}"
            self._leader.end_for(NodeLostError(problem))
            self.keep_time()

    def result(self, value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
        """Return the job's result, from that of this node's part."""
        self._leader.listeners.pop(self._key, None)
        error = error or self._disagreement()
        if error is None and self._members[0]:
            first = self._members[0]
            value, error = _received(self._ended[first], self._leader.name(first))
        for node in self._parts:
            why = "" if error is None else self._part.cause or first_line(error)
            if node:
                verdict = {"verdict": self._key, "number": self._number, "why": why}
                self._leader.tell(node, verdict)
        return value, error

    def _disagreement(self) -> LauncherError | None:
        """Return why the job has not completed, or its value cannot be had, if this part has."""
        there = [node for node in self._members if node in self._parts or not self._is_elastic]
        for node in there:
            ended = self._ended.get(node)
            if ended is not None and not ended["well"]:
                kind = UnsendableValueError if self._has_finished else StartError
                return kind(f"{self._leader.name(node)}: {ended['why']}")
        if self._has_finished and self._ended.keys() >= set(there):
            return None
        return self._leader.lost or NodeLostError("the nodes did not agree that it completed")


def _stop(why: str) -> dict[str, Any]:
    return {"op": "stop", "signal": int(signal.SIGTERM), "why": why}


def _received(ended: dict[str, Any], name: str) -> tuple[Any, UnsendableValueError | None]:
    """Return rank 0's value, which it had on another node, or why it cannot be had here."""
    try:
        return tagged.loads(ended["value"]), None
    except TransportError as problem:
        text = f"The task function's return value has come from {name}, but {problem}"
        return None, UnsendableValueError(text)


class Leading:
    """Gives each job its parts on the other nodes."""

    def __init__(self, leader: Leader) -> None:
        """Take over the connection to them."""
        self._leader = leader

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `hear`."""
        return self._leader.fileno()

    def hear(self) -> None:
        """Take in what they say."""
        self._leader.hear()

    def check(self) -> None:
        """See that they are there.

        Raises:
            NodeLostError: one of them is not.
        """
        self._leader.check()

    def role(self, job: Begun, key: int, settings: Settings, watch: SignalWatch) -> Role:
        """Return this node's role in a job.

        Raises:
            NodeLostError: another node was there, and is not any more.
            TransportError: the job's config is no plain data.
        """
        del watch
        self._leader.check()
        hydra = job.work.hydra_config.hydra
        environ = {**job.environ}
        text = published.publish((job.work.config, job.config), hydra, job.working_dir, environ)
        run_id = settings.run_id or uuid.uuid4().hex
        team = LeadersTeam(
            self._leader,
            (key, job.number),
            settings.max_restarts,
            settings.shutdown_timeout_s,
            {"job": key, "number": job.number, "text": text, "run_id": run_id},
        )
        return Role(team, run_id, self._leader.node(), team.begin)
