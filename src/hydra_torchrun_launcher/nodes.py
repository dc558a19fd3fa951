"""The other nodes of a sweep, as this node's launching process knows them.

Node and number: nodes have ranks from 0, one of them leads and has the sweep. What nodes say to
each other goes by a process of its own, the link.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hydra_torchrun_launcher import processes
from hydra_torchrun_launcher.errors import JobStoppedError, NodeLostError, StartError
from hydra_torchrun_launcher.lines import line_pair
from hydra_torchrun_launcher.node_settings import Nodes, is_own_address
from hydra_torchrun_launcher.processes import Deadline
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.wire import Closed, Readable, wait_readable

log = logging.getLogger(__name__)

_LINK_ANSWERS_S = 60
"""Bound on the start of a link and on its end, beyond what it waits for itself."""
_SAY_EVERY_S = 30
"""How often it is said for whom a node waits."""
_START_THEM = "the same command has to be started on every node"


def facts_of(nodes: Nodes, app: str, kind: str) -> dict[str, Any]:
    """Return what the others have to know of this node.

    Args:
        nodes: what the settings say.
        app: the app's name.
        kind: a sweep or a single run.
    """
    return {
        "package": importlib.metadata.version("hydra-torchrun-launcher"),
        "torch": importlib.metadata.version("torch"),
        "python": "{}.{}".format(*sys.version_info),
        "hydra": importlib.metadata.version("hydra-core"),
        "nodes": nodes.count,
        "run": nodes.run_id,
        "app": app,
        "kind": kind,
        "host": socket.gethostname(),
        "node_rank": nodes.rank,
        "local_addr": nodes.local_addr,
    }


class _Link:
    """The link process of this node."""

    def __init__(self, module: str, nodes: Nodes, facts: dict[str, Any]) -> None:
        self._line, theirs = line_pair()
        settings = {
            "facts": facts,
            "host": nodes.host,
            "port": nodes.port,
            "lost_after_s": nodes.lost_after_s,
            "parent": os.getpid(),
            "bound": threading.current_thread() is threading.main_thread(),
        }
        command = processes.python_command(
            processes.path_entries(),
            f"hydra_torchrun_launcher.{module}",
            "main",
            theirs.fileno(),
            settings,
        )
        self._popen = subprocess.Popen(  # noqa: S603 - our own interpreter
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C is the launching process's to answer
        )
        theirs.close()

    def fileno(self) -> int:
        return self._line.fileno()

    def tell(self, message: dict[str, Any]) -> None:
        try:
            self._line.send(message, _LINK_ANSWERS_S)
        except OSError:
            raise self._lost() from None

    def hear(self, watch: SignalWatch | None, timeout_s: float | None) -> list[dict[str, Any]]:
        """Return what it says within a time; nothing when a signal comes first."""
        sources: list[Readable] = [self._line, *([watch] if watch else [])]
        ready = wait_readable(sources, timeout_s)
        if watch is not None and watch in ready:
            watch.drain()
        return self.receive() if self._line in ready else []

    def receive(self) -> list[dict[str, Any]]:
        """Return what it has said."""
        try:
            return self._line.receive()
        except (Closed, OSError, ValueError):
            raise self._lost() from None

    def close(self) -> None:
        self._line.close()
        try:
            self._popen.wait(_LINK_ANSWERS_S)
        except subprocess.TimeoutExpired:  # stopped: it holds nothing that others need
            self._popen.send_signal(signal.SIGKILL)
            self._popen.wait(_LINK_ANSWERS_S)

    def _lost(self) -> NodeLostError:
        self._line.close()  # else its end would be there to be read again and again
        problem = (
            f"the process that holds this node's connections to the others (pid {self._popen.pid}) "
            "was lost"
        )
        return NodeLostError(problem)


def meet(nodes: Nodes, facts: dict[str, Any], watch: SignalWatch) -> Leader | Follower:
    """Begin to lead or to follow.

    Raises:
        StartError: this node is to lead and cannot listen.
        JobStoppedError: a signal came.
    """
    leads = is_own_address(nodes.host) if nodes.leads is None else nodes.leads
    if not leads:
        return Follower(nodes, facts)
    link = _Link("hub", nodes, facts)
    try:
        said = _await(link, watch, Deadline(_LINK_ANSWERS_S))
        if said["op"] == "listening":
            return Leader(nodes, facts, link)
    except BaseException:
        link.close()
        raise
    link.close()
    if said["errno"] == errno.EADDRINUSE and nodes.leads is None:
        return Follower(nodes, facts, is_on_leaders_machine=True)
    problem = (
        f"{facts['host']} leads and cannot listen at port {nodes.port} ({said['message']}): choose "
        "another in hydra.launcher.rdzv_endpoint, the same on all nodes"
    )
    raise StartError(problem)


def _await(link: _Link, watch: SignalWatch, limit: Deadline) -> dict[str, Any]:
    while not limit.passed:
        for message in link.hear(watch, limit.remaining_s):
            return message
        if watch.received is not None:
            raise JobStoppedError(watch.received)
    problem = f"the process that holds a node's connections has not started in {_LINK_ANSWERS_S} s"
    raise StartError(problem)


class Leader:
    """The others, where this node leads."""

    def __init__(self, nodes: Nodes, facts: dict[str, Any], link: _Link) -> None:
        """Wait for nobody yet.

        Args:
            nodes: what the settings say.
            facts: what the others know of this node.
            link: listens already.
        """
        self._nodes = nodes
        self._facts = facts
        self._link = link
        self._limit = Deadline(nodes.join_timeout_s)
        self._here: dict[int, dict[str, Any]] = {}
        self._turned_away: dict[str, str] = {}
        self._ranks: dict[int, int] = {}
        self._is_closed = False
        self.rank = 0
        """This node's rank, once all are there."""
        self.hosts: list[str] = []
        """The nodes' host names by rank, once all are there."""
        self.addresses: list[str] = []
        """Their addresses for each other."""
        self.listeners: dict[int, Callable[[int, dict[str, Any]], None]] = {}
        """Who takes in what a node says of a job, by the job's key."""
        self.gone: set[int] = set()
        """The nodes that are lost, by their ranks."""
        self.lost: NodeLostError | None = None
        """Why the sweep cannot go on."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `hear`."""
        return self._link.fileno()

    def name(self, rank: int) -> str:
        """Return what messages call a node."""
        return f"node {rank} ({self.hosts[rank]})"

    def node(self) -> dict[str, Any]:
        """Return what this node's agents have to know of it."""
        address = self.addresses[self.rank]
        return {"rank": self.rank, "address": address, "count": len(self.hosts)}

    def gather(self, watch: SignalWatch) -> None:
        """Wait until all nodes are there.

        Raises:
            StartError: they are not within the time.
            JobStoppedError: a signal came.
        """
        say = Deadline(0)
        while len(self._here) < self._nodes.count - 1:
            if self._limit.passed:
                raise StartError(self._missing())
            if say.passed:
                names = ", ".join([self._facts["host"], *(f["host"] for f in self._here.values())])
                log.info(
                    "Waiting at %s for the other nodes: %d of %d are here (%s); %s",
                    self._nodes.endpoint, len(self._here) + 1, self._nodes.count, names,
                    _START_THEM,
                )  # fmt: skip
                say = Deadline(_SAY_EVERY_S)
            waits = [
                each for each in (self._limit.remaining_s, say.remaining_s) if each is not None
            ]
            for message in self._link.hear(watch, min(waits)):
                self._take_in(message)
            if watch.received is not None:
                raise JobStoppedError(watch.received)
        if not self.hosts:
            self._begin()

    def _missing(self) -> str:
        names = ", ".join([self._facts["host"], *(each["host"] for each in self._here.values())])
        away = "".join(
            f"; {host} was turned away: {why}" for host, why in self._turned_away.items()
        )
        return (
            f"{self._nodes.count - 1 - len(self._here)} of {self._nodes.count} nodes did not come "
            f"to {self._nodes.endpoint} within {self._nodes.join_timeout_s:g} s "
            f"(hydra.launcher.rdzv_timeout); here: {names}{away}; {_START_THEM}"
        )

    def _begin(self) -> None:
        """Give every node its rank, and tell it."""
        everybody = {0: self._facts, **self._here}
        free = sorted(
            set(range(self._nodes.count)) - {each["node_rank"] for each in everybody.values()}
        )
        for number, facts in sorted(
            everybody.items(), key=lambda each: (each[0] > 0, *_order(each[1]))
        ):
            self._ranks[number] = free.pop(0) if facts["node_rank"] is None else facts["node_rank"]
        by_rank = sorted((rank, everybody[number]) for number, rank in self._ranks.items())
        self.rank = self._ranks[0]
        self.hosts = [str(facts["host"]) for _, facts in by_rank]
        met = [facts["leader_address"] for facts in self._here.values()]
        own = next((each for each in met if not each.startswith("127.") and each != "::1"), met[0])
        self.addresses = [
            str(facts["local_addr"] or facts.get("address", own)) for _, facts in by_rank
        ]
        log.info("All %d nodes are here: %s", self._nodes.count, ", ".join(self.hosts))
        for number, rank in self._ranks.items():
            if number:
                begin = {"rank": rank, "hosts": self.hosts, "address": self.addresses[rank]}
                self._link.tell({"to": [number], "word": {"begin": begin}})

    def tell(self, rank: int, word: dict[str, Any]) -> None:
        """Tell a node something."""
        numbers = [number for number, its in self._ranks.items() if its == rank]
        try:
            self._link.tell({"to": numbers, "word": word})
        except NodeLostError as error:
            self._lose_all(error)

    def hear(self) -> None:
        """Take in what the others say; it is there to be read."""
        try:
            for message in self._link.receive():
                self._take_in(message)
        except NodeLostError as error:
            self._lose_all(error)

    def _take_in(self, message: dict[str, Any]) -> None:
        operation, number = message["op"], message.get("node", 0)
        if operation == "joined":
            self._here[number] = message["facts"]
            log.info("%s has joined (%s)", message["facts"]["host"], message["facts"]["address"])
        elif operation == "turned away":
            self._turned_away[message["host"]] = message["why"]
            log.warning("%s was turned away: %s", message["host"], message["why"])
        elif operation == "left" and not self.hosts:
            host = self._here.pop(number)["host"]
            log.warning("%s has left before the first job: %s", host, message["why"])
        elif operation == "left":
            self.give_up(self._ranks[number], message["why"])
        elif operation == "word" and "leaving" in message["word"]:
            if self.hosts:
                self.give_up(self._ranks[number], message["word"]["leaving"])
        elif operation == "word":
            listener = self.listeners.get(message["word"]["key"])
            if listener is not None:
                listener(self._ranks[number], message["word"]["says"])

    def give_up(self, rank: int, why: str) -> None:
        """Count a node as lost."""
        self.gone.add(rank)
        self._lose(NodeLostError(f"{self.name(rank)} is lost: {why}"))

    def _lose(self, error: NodeLostError) -> None:
        if self.lost is None and not self._is_closed:
            self.lost = error
            log.error("%s", error)

    def check(self) -> None:
        """Take in what the others have said meanwhile.

        Raises:
            NodeLostError: one of them is lost.
        """
        try:
            for message in self._link.hear(None, 0):
                self._take_in(message)
        except NodeLostError as error:
            self._lose_all(error)
        if self.lost is not None:
            raise self.lost

    def _lose_all(self, error: NodeLostError) -> None:
        self.gone.update(range(self._nodes.count))
        self._lose(error)

    def close(self, status: int, why: str) -> bool:
        """Tell the others that all is over, and with which status; say whether all have heard it.

        Args:
            status: the sweep's exit status, which is theirs.
            why: what they say of it; empty where there is nothing to say.
        """
        if self._is_closed:
            return True
        self._is_closed = True
        unconfirmed: list[int] = []
        try:
            self._link.tell({"to": [], "over": {"status": status, "why": why}})
            limit = Deadline(self._nodes.lost_after_s + _LINK_ANSWERS_S)
            is_over = False
            while not is_over and not limit.passed:
                for message in self._link.hear(None, limit.remaining_s):
                    if message["op"] == "joined":  # and not heard until now
                        self._here[message["node"]] = message["facts"]
                    if message["op"] == "left":  # lost at the last moment
                        unconfirmed.append(message["node"])
                    if message["op"] == "over":
                        is_over, unconfirmed = True, unconfirmed + message["unconfirmed"]
        except NodeLostError:
            unconfirmed = list(self._here)
        self._link.close()
        for number in unconfirmed:
            rank = self._ranks.get(number)
            name = self._here[number]["host"] if rank is None else self.name(rank)
            log.error("%s was not heard to take the end of the sweep", name)
        return not unconfirmed


def _order(facts: Mapping[str, Any]) -> tuple[Any, ...]:
    """Order hosts as people count them: node2 before node10."""
    parts = re.split(r"(\d+)", str(facts["host"]))
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)


class Follower:
    """The leader, where this node follows."""

    def __init__(
        self, nodes: Nodes, facts: dict[str, Any], *, is_on_leaders_machine: bool = False
    ) -> None:
        """Look for it.

        Args:
            nodes: what the settings say.
            facts: what the leader is to know of this node.
            is_on_leaders_machine: whether something listens there already.
        """
        self._nodes = nodes
        self._link = _Link("spoke", nodes, facts)
        self._limit = Deadline(nodes.join_timeout_s)
        self._why = "nothing answered"
        self._is_near = is_on_leaders_machine
        self.leader = ""
        """The leader's host name."""
        self.rank = 0
        """This node's rank, once all are there."""
        self.hosts: list[str] = []
        """The nodes' host names by rank, once all are there."""
        self.address = ""
        """This node's address for the others."""
        self.over: dict[str, Any] | None = None
        """With which status the sweep is over, and why."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `hear`."""
        return self._link.fileno()

    def node(self) -> dict[str, Any]:
        """Return what this node's agents have to know of it."""
        return {"rank": self.rank, "address": self.address, "count": len(self.hosts)}

    def find(self, watch: SignalWatch) -> None:
        """Wait until the leader has all nodes, or has ended.

        Raises:
            StartError: it is not found within the time, or does not want this node.
            JobStoppedError: a signal came.
        """
        say = Deadline(0)
        while not self.hosts and self.over is None:
            if self._limit.passed:
                problem = (
                    f"no leader was found at {self._nodes.endpoint} within "
                    f"{self._nodes.join_timeout_s:g} s (hydra.launcher.rdzv_timeout): {self._why}; "
                    f"{_START_THEM}"
                )
                raise StartError(problem)
            waits = [
                each for each in (self._limit.remaining_s, say.remaining_s) if each is not None
            ]
            for message in self._link.hear(watch, min(waits, default=None)):
                self._take_in_early(message)
            if say.passed:
                what = f"for the others; {self.leader} leads" if self.leader else f"({self._why})"
                log.info("Waiting at %s %s", self._nodes.endpoint, what)
                say = Deadline(_SAY_EVERY_S)
            if watch.received is not None:
                self.leave(f"it was stopped by {signal.Signals(watch.received).name}")
                raise JobStoppedError(watch.received)

    def _take_in_early(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "trying":
            self._why, self.leader = str(message["why"]), ""
            if self._is_near and "not this run's leader" in self._why:
                problem = (
                    f"something else listens at {self._nodes.endpoint}: choose another port in "
                    "hydra.launcher.rdzv_endpoint, the same on all nodes"
                )
                raise StartError(problem)
            if not self._limit.remaining_s:
                self._limit = Deadline(self._nodes.join_timeout_s)
        elif operation == "joined":
            self.leader = str(message["facts"]["host"])
            self._limit.clear()  # it knows how long to wait for the others
        elif operation == "refused":
            problem = (
                f"the leader at {self._nodes.endpoint} has turned this node away: {message['why']}"
            )
            raise StartError(problem)
        elif operation == "word":
            begin = message["word"]["begin"]
            self.rank, self.hosts = begin["rank"], begin["hosts"]
            self.address = begin["address"]
            log.info(
                "This is node %d of %d (%s); %s leads",
                self.rank, len(self.hosts), ", ".join(self.hosts), self.leader,
            )  # fmt: skip
        else:
            self._end(message)

    def hear(self) -> list[dict[str, Any]]:
        """Return the leader's words; there are none when all is over."""
        words = []
        for message in self._link.receive():
            if message["op"] == "word":
                words.append(message["word"])
            else:
                self._end(message)
        return words

    def _end(self, message: dict[str, Any]) -> None:
        if message["op"] == "left":
            problem = f"the leader {self.leader} is lost: {message['why']}"
            raise NodeLostError(problem)
        self.over = message

    def tell(self, word: dict[str, Any]) -> None:
        """Tell the leader something."""
        self._link.tell({"word": word})

    def leave(self, why: str) -> None:
        """Tell the leader that this node leaves before the end."""
        if self.leader:
            self.tell({"leaving": why})

    def close(self) -> None:
        """Leave."""
        self._link.close()
