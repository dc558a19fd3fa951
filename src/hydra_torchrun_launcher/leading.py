"""Jobs on several nodes, on the one that leads (in its launching process)."""

from __future__ import annotations

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

_PARTS_END_S = 90
"""How long a node has to end its part, beyond the ranks' time to leave: longer than its keeper."""


class LeadersTeam:
    """The team as the leader has it."""

    _part: Part

    def __init__(
        self,
        leader: Leader,
        job: tuple[int, int | None],
        max_restarts: int,
        grace_s: float,
        join_timeout_s: float,
    ) -> None:
        """Wait for the agents' first round.

        Args:
            leader: speaks to the other nodes.
            job: its key, which tells it from others, and its number in the sweep.
            max_restarts: how often the ranks may start again, all of them.
            grace_s: how long ranks have to leave once they were asked to.
            join_timeout_s: how long nodes wait for each other.
        """
        self._leader = leader
        self._key, self._number = job
        self._max_restarts = max_restarts
        self._grace_s = grace_s
        self._join_timeout_s = join_timeout_s
        self._count = len(leader.hosts)
        self._round = 0
        self._waiting: dict[int, dict[str, Any]] = {}
        self._started: dict[int, dict[str, Any]] = {}
        self._finished: set[int] = set()
        self._ended: dict[int, dict[str, Any]] = {}
        self._limit = Deadline()
        self._is_ending = False
        self._has_finished = False

    def join(self, part: Part) -> None:
        """Know this node's part, and listen to the others."""
        self._part = part
        self._leader.listeners[self._key] = self._hear

    def hear(self, message: dict[str, Any]) -> None:
        """Take in what this node's keeper says to all of them."""
        self._hear(self._leader.rank, message)

    def failed(self, failure: Failure) -> None:
        """Do nothing: this node's part has noted it."""

    def stands(self, rank: int, stood: str) -> None:
        """Do nothing: this node's part has noted it."""

    def _hear(self, node: int, message: dict[str, Any]) -> None:
        operations: dict[str, Callable[[int, dict[str, Any]], None]] = {
            "join": self._join_round,
            "ranks": self._note_start,
            "finished": self._finish,
            "failed": lambda _, said: self._part.note_failure(Failure.from_data(said["failure"])),
            "stands": lambda _, said: self._part.note_stand(said["rank"], said["stood"]),
            "ended": self._end,
            "completed": lambda *_: None,  # on one node; `finished` says that its ranks are gone
        }
        operations[message["op"]](node, message)

    def _order(self, node: int, order: dict[str, Any]) -> None:
        if node == self._leader.rank:
            self._part.order(order)
        else:
            self._leader.tell(node, {"key": self._key, "order": order})

    def _others(self) -> list[int]:
        """Return the other nodes that are not over."""
        gone = {self._leader.rank, *self._ended, *self._leader.gone}
        return [node for node in range(self._count) if node not in gone]

    def _join_round(self, node: int, message: dict[str, Any]) -> None:
        """Start the ranks on all nodes once each of them is ready to."""
        if self._is_ending or self._round > self._max_restarts:
            self._order(node, {"op": "refuse"})
            return
        self._waiting[node] = message
        if len(self._waiting) == self._count:
            self._form_round()
        elif len(self._waiting) == 1:
            self._limit.within(self._join_timeout_s)
            for other in range(self._count) if self._round else ():
                if other != node:
                    self._order(other, {"op": "regroup"})

    def _form_round(self) -> None:
        store = {"host": self._leader.addresses[0], "port": self._waiting[0]["port"]}
        self._limit.clear()
        self._waiting.clear()
        self._started.clear()
        self._finished.clear()
        for node in range(self._count):
            self._order(node, {"op": "round", "number": self._round, **store})
        self._round += 1

    def _note_start(self, node: int, message: dict[str, Any]) -> None:
        if message["attempt"] != self._round - 1:
            return
        self._started[node] = message
        if len(self._started) == self._count:
            by_node = [self._started[node] for node in range(self._count)]
            hosts = [
                host
                for host, part in zip(self._leader.hosts, by_node, strict=True)
                for _ in part["pids"]
            ]
            pids, folders = (
                [each for part in by_node for each in part[name]] for name in ("pids", "folders")
            )
            together = {"pids": pids, "folders": folders, "hosts": hosts}
            self._part.note_start({"attempt": message["attempt"], **together})

    def _finish(self, node: int, message: dict[str, Any]) -> None:
        """Decide that the job has completed once it has on all nodes; no restart comes after."""
        if message["attempt"] != self._round - 1 or self._is_ending:
            return
        self._finished.add(node)
        if len(self._finished) == self._count:
            self._has_finished = True
            self._part.note_completion()
            self._limit.within(self._grace_s + _PARTS_END_S)
            for each in range(self._count):
                self._order(each, {"op": "finish"})

    def _end(self, node: int, message: dict[str, Any]) -> None:
        self._ended[node] = message
        if not self._is_ending and not message["well"]:
            name = self._leader.name(node)
            self.pass_on(_stop(f"the job has failed on {name}"))
            self._part.end(StartError(f"{name}: {message['why']}"))

    def own_has_ended(self, *, well: bool) -> None:
        """Take in that this node's part is over; the others end with it if it has failed."""
        self._ended[self._leader.rank] = {"well": well, "why": "its part has failed"}
        if not well:
            self.pass_on(_stop(f"the job has failed on {self._leader.name(self._leader.rank)}"))

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
            self.pass_on(_stop(str(self._leader.lost)))
            self._part.end(self._leader.lost)
        if not self._limit.passed:
            return
        self._limit.clear()
        if self._waiting and not self._is_ending:
            names = ", ".join(
                self._leader.name(node) for node in range(self._count) if node not in self._waiting
            )
            problem = (
                f"{names} did not come to the job's rendezvous within {self._join_timeout_s:g} s "
                "(hydra.launcher.rdzv_timeout)"
            )
            self.pass_on(_stop(problem))
            self._part.end(StartError(problem))
        else:
            for node in self._others():
                self._leader.give_up(node, "it does not end its part of a job")

    def result(self, value: Any, error: BaseException | None) -> tuple[Any, BaseException | None]:
        """Return the job's result, from that of this node's part."""
        self._leader.listeners.pop(self._key, None)
        error = error or self._disagreement()
        if error is None and self._leader.rank != 0:
            value, error = _received(self._ended[0], self._leader.name(0))
        for node in self._others_of_all():
            why = "" if error is None else self._part.cause or first_line(error)
            self._leader.tell(node, {"verdict": self._key, "number": self._number, "why": why})
        return value, error

    def _disagreement(self) -> LauncherError | None:
        """Return why the job has not completed, or its value cannot be had, if this part has."""
        for node, ended in sorted(self._ended.items()):
            if not ended["well"]:
                kind = UnsendableValueError if self._has_finished else StartError
                return kind(f"{self._leader.name(node)}: {ended['why']}")
        if self._has_finished and len(self._ended) == self._count:
            return None
        return self._leader.lost or NodeLostError("the nodes did not agree that it completed")

    def _others_of_all(self) -> list[int]:
        return [node for node in range(self._count) if node != self._leader.rank]


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
        assert settings.nodes is not None  # noqa: S101 - else there is nobody to lead
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
            settings.nodes.join_timeout_s,
        )
        word = {"job": key, "number": job.number, "text": text, "run_id": run_id}
        return Role(team, run_id, self._leader.node(), self._teller(word))

    def _teller(self, word: dict[str, Any]) -> Callable[[], None]:
        def tell() -> None:
            for rank in range(len(self._leader.hosts)):
                if rank != self._leader.rank:
                    self._leader.tell(rank, word)

        return tell
