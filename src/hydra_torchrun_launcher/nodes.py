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
from collections.abc import Mapping
from typing import Any, Protocol

from hydra_torchrun_launcher import processes
from hydra_torchrun_launcher.errors import JobStoppedError, NodeLostError, StartError
from hydra_torchrun_launcher.lines import line_pair
from hydra_torchrun_launcher.node_settings import Nodes, is_own_address, own_address
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
        "most": nodes.most,
        "is_elastic": nodes.is_elastic,
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


class Listener(Protocol):
    """What a job makes of what happens to nodes."""

    def heard(self, node: int, says: dict[str, Any]) -> None:
        """Take in what a node says of the job."""

    def has_come(self, node: int) -> None:
        """Take in that a node has joined."""

    def has_gone(self, node: int, why: str) -> None:
        """Take in that a node is lost."""


class Leader:
    """The others, where this node leads. Nodes have numbers in the order of coming; 0 leads."""

    def __init__(self, nodes: Nodes, facts: dict[str, Any], link: _Link) -> None:
        """Wait for nobody yet.

        Args:
            nodes: what the settings say.
            facts: what the others know of this node.
            link: listens already.
        """
        self.settings = nodes
        self._facts = facts
        self._link = link
        self._limit = Deadline(nodes.join_timeout_s)
        self._last_call = Deadline()
        self._here: dict[int, dict[str, Any]] = {0: facts}
        self._turned_away: dict[str, str] = {}
        self._labels: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._hosts: dict[int, str] = {}
        self._has_begun = False
        self._is_closed = False
        self.addresses: dict[int, str] = {}
        """The nodes' addresses for each other; empty where the own one is not known yet."""
        self.listeners: dict[int, Listener] = {}
        """What jobs make of what happens, by their keys."""
        self.lost: NodeLostError | None = None
        """Why the sweep cannot go on."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `hear`."""
        return self._link.fileno()

    def name(self, node: int) -> str:
        """Return what messages call a node."""
        return self._names[node]

    def host(self, node: int) -> str:
        """Return a node's host name."""
        return self._hosts[node]

    @property
    def here(self) -> list[int]:
        """The nodes that are here, in the order of their ranks."""
        if self.settings.is_elastic:
            return sorted(self._here, key=lambda node: (node > 0, *_order(self._here[node]), node))
        return sorted(self._here, key=lambda node: self._labels[node])

    def node(self) -> dict[str, Any]:
        """Return what this node's agents have to know of it."""
        return self._node(0)

    def _node(self, node: int) -> dict[str, Any]:
        return {
            "label": self._labels[node],
            "address": self.addresses[node],
            "has_store": node == 0 if self.settings.is_elastic else self._labels[node] == 0,
        }

    def gather(self, watch: SignalWatch) -> None:
        """Wait until there are enough nodes.

        Raises:
            StartError: there are not within the time.
            JobStoppedError: a signal came.
        """
        say = Deadline(0)
        while not self._are_enough():
            if self._limit.passed:
                raise StartError(self._missing())
            if say.passed:
                log.info(
                    "Waiting at %s for the other nodes: %d of %s are here (%s); %s",
                    self.settings.endpoint, len(self._here), self.settings.count,
                    self._names_here(), _START_THEM,
                )  # fmt: skip
                say = Deadline(_SAY_EVERY_S)
            limits = (self._limit, say, self._last_call)
            waits = [each.remaining_s for each in limits if each.remaining_s is not None]
            for message in self._link.hear(watch, min(waits)):
                self._take_in(message)
            if watch.received is not None:
                raise JobStoppedError(watch.received)
        if not self._has_begun:
            self._begin()

    def _are_enough(self) -> bool:
        """Tell whether there are as many as there may be, or enough and no more come for now."""
        count, nodes = len(self._here), self.settings
        if count < nodes.least:
            self._last_call.clear()
            if self._has_begun and self._limit.remaining_s is None:
                self._limit.within(nodes.join_timeout_s)
            return False
        if count < nodes.most and not self._has_begun:
            if self._last_call.remaining_s is None:
                self._last_call.within(nodes.last_call_s)
            return self._last_call.passed
        self._limit.clear()
        return True

    def _names_here(self) -> str:
        return ", ".join(str(each["host"]) for each in self._here.values())

    def _missing(self) -> str:
        away = "".join(
            f"; {host} was turned away: {why}" for host, why in self._turned_away.items()
        )
        nodes = self.settings
        return (
            f"{nodes.least - len(self._here)} of {nodes.least} nodes did not come to "
            f"{nodes.endpoint} within {nodes.join_timeout_s:g} s (hydra.launcher.rdzv_timeout); "
            f"here: {self._names_here()}{away}; {_START_THEM}"
        )

    def _begin(self) -> None:
        """Give every node its rank, and tell it."""
        self._has_begun = True
        taken = {each["node_rank"] for each in self._here.values()}
        free = [rank for rank in range(self.settings.most) if rank not in taken]
        for node, facts in sorted(
            self._here.items(), key=lambda each: (each[0] > 0, *_order(each[1]))
        ):
            given = node if self.settings.is_elastic else facts["node_rank"]
            self._labels[node] = free.pop(0) if given is None else given
        for node in self._here:
            self._know(node)
        names = ", ".join(map(self.host, self.here))
        if self.settings.is_elastic:
            log.info("%d of %s nodes are here: %s", len(self.here), self.settings.count, names)
        else:
            log.info("All %s nodes are here: %s", self.settings.count, names)
        for node in self._here:
            self._welcome(node)

    def _know(self, node: int) -> None:
        """Name a node, and note its address, and what it knows of the leader's."""
        facts = self._here[node]
        self._hosts[node] = str(facts["host"])
        self._names[node] = f"node {self._labels[node]} ({facts['host']})"
        self.addresses[node] = str(facts["local_addr"] or facts.get("address", ""))
        if not self.addresses[0]:
            met = [each["leader_address"] for each in self._here.values() if "address" in each]
            real = [each for each in met if not each.startswith("127.") and each != "::1"]
            self.addresses[0] = next(iter([*real, *met]), own_address(self.settings.host))

    def _welcome(self, node: int) -> None:
        if node:
            hosts = [self.host(each) for each in self.here]
            self.tell(node, {"begin": {"node": self._node(node), "hosts": hosts}})

    def tell(self, node: int, word: dict[str, Any]) -> None:
        """Tell a node something."""
        self._tell_link({"to": [node], "word": word})

    def _tell_link(self, order: dict[str, Any]) -> None:
        try:
            self._link.tell(order)
        except NodeLostError as error:
            self.give_all_up(error)

    def hear(self) -> None:
        """Take in what the others say; it is there to be read."""
        try:
            for message in self._link.receive():
                self._take_in(message)
        except NodeLostError as error:
            self.give_all_up(error)

    def _take_in(self, message: dict[str, Any]) -> None:
        operation, node = message["op"], message.get("node", 0)
        if operation == "joined":
            self._admit(node, message["facts"])
        elif operation == "turned away":
            self._turned_away[message["host"]] = message["why"]
            log.warning("%s was turned away: %s", message["host"], message["why"])
        elif operation == "left" and not self._has_begun:
            host = self._here.pop(node)["host"]
            log.warning("%s has left before the first job: %s", host, message["why"])
        elif operation == "left":
            self.give_up(node, message["why"])
        elif operation == "word" and "leaving" in message["word"]:
            if self._has_begun:
                self.give_up(node, message["word"]["leaving"])
        elif operation == "word" and node in self._here:
            listener = self.listeners.get(message["word"]["key"])
            if listener is not None:
                listener.heard(node, message["word"]["says"])

    def _admit(self, node: int, facts: dict[str, Any]) -> None:
        self._here[node] = facts
        log.info("%s has joined (%s)", facts["host"], facts["address"])
        if self._has_begun and self.settings.is_elastic:
            self._labels[node] = node
            self._know(node)
            self._welcome(node)
            for listener in [*self.listeners.values()]:
                listener.has_come(node)

    def give_up(self, node: int, why: str) -> None:
        """Count a node as lost."""
        if self._here.pop(node, None) is None or self._is_closed:
            return
        if not self.settings.is_elastic:
            self.end_for(NodeLostError(f"{self.name(node)} is lost: {why}"))
        else:
            log.warning("%s is lost: %s", self.name(node), why)
            self._tell_link({"to": [], "word": None, "drop": node})
        for listener in [*self.listeners.values()]:
            listener.has_gone(node, why)

    def end_for(self, error: NodeLostError) -> None:
        """Let no more jobs run."""
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
            self.give_all_up(error)
        if self.lost is not None:
            raise self.lost

    def give_all_up(self, error: NodeLostError) -> None:
        """Count all other nodes as lost, as nothing can be heard of them."""
        self.end_for(error)
        for node in [*self._here]:
            if node:
                self._here.pop(node)
                for listener in [*self.listeners.values()]:
                    listener.has_gone(node, str(error))

    def close(self, status: int, why: str) -> bool:
        """Tell the others that all is over, and with which status; say whether all have heard it.

        Args:
            status: the sweep's exit status, which is theirs.
            why: what they say of it; empty where there is nothing to say.
        """
        if self._is_closed:
            return True
        self._is_closed = True
        hosts = {node: str(facts["host"]) for node, facts in self._here.items()}
        unconfirmed: list[int] = []
        try:
            self._link.tell({"to": [], "over": {"status": status, "why": why}})
            limit = Deadline(self.settings.lost_after_s + _LINK_ANSWERS_S)
            is_over = False
            while not is_over and not limit.passed:
                for message in self._link.hear(None, limit.remaining_s):
                    if message["op"] == "joined":  # and not heard until now
                        hosts[message["node"]] = message["facts"]["host"]
                    if message["op"] == "left":  # lost at the last moment
                        unconfirmed.append(message["node"])
                    if message["op"] == "over":
                        is_over, unconfirmed = True, unconfirmed + message["unconfirmed"]
        except NodeLostError:
            unconfirmed = [node for node in hosts if node]
        self._link.close()
        for node in unconfirmed:
            name = self._names.get(node, hosts.get(node, ""))
            log.error("%s was not heard to take the end of the sweep", name)
        return not unconfirmed or self.settings.is_elastic


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
        self.settings = nodes
        self._facts = facts
        self._link = _Link("spoke", nodes, facts)
        self._limit = Deadline(nodes.join_timeout_s)
        self._why = "nothing answered"
        self._is_near = is_on_leaders_machine
        self._lost: NodeLostError | None = None
        self._node: dict[str, Any] = {}
        self.leader = ""
        """The leader's host name."""
        self.over: dict[str, Any] | None = None
        """With which status the sweep is over, and why."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when there is something to `hear`."""
        return self._link.fileno()

    def node(self) -> dict[str, Any]:
        """Return what this node's agents have to know of it."""
        return self._node

    @property
    def has_rank_0(self) -> bool:
        """Whether rank 0 of jobs runs here."""
        return bool(self._node["has_store"])

    def again(self, lost: NodeLostError) -> Follower:
        """Return one that looks for the leader again, which may have been out of reach only.

        Args:
            lost: why it is to be looked for.
        """
        self.close()
        found = Follower(self.settings, self._facts)
        found._lost = lost
        return found

    def find(self, watch: SignalWatch) -> None:
        """Wait until the leader has all nodes, or has ended.

        Raises:
            StartError: it is not found within the time, or does not want this node.
            JobStoppedError: a signal came.
        """
        say = Deadline(0)
        while not self._node and self.over is None:
            if self._limit.passed:
                problem = (
                    f"no leader was found at {self.settings.endpoint} within "
                    f"{self.settings.join_timeout_s:g} s (hydra.launcher.rdzv_timeout): "
                    f"{self._why}; {_START_THEM}"
                )
                raise StartError(problem)
            waits = [
                each for each in (self._limit.remaining_s, say.remaining_s) if each is not None
            ]
            for message in self._link.hear(watch, min(waits, default=None)):
                self._take_in_early(message)
            if say.passed:
                what = f"for the others; {self.leader} leads" if self.leader else f"({self._why})"
                log.info("Waiting at %s %s", self.settings.endpoint, what)
                say = Deadline(_SAY_EVERY_S)
            if watch.received is not None:
                self.leave(f"it was stopped by {signal.Signals(watch.received).name}")
                raise JobStoppedError(watch.received)

    def _take_in_early(self, message: dict[str, Any]) -> None:
        operation = message["op"]
        if operation == "trying":
            self._why, self.leader = str(message["why"]), ""
            if self._lost is not None and message.get("is_refused"):
                raise self._lost  # its machine is there, and it is not
            if self._is_near and "not this run's leader" in self._why:
                problem = (
                    f"something else listens at {self.settings.endpoint}: choose another port in "
                    "hydra.launcher.rdzv_endpoint, the same on all nodes"
                )
                raise StartError(problem)
            if not self._limit.remaining_s:
                self._limit = Deadline(self.settings.join_timeout_s)
        elif operation == "joined":
            self.leader = str(message["facts"]["host"])
            self._limit.clear()  # it knows how long to wait for the others
        elif operation == "refused":
            away = f"the leader at {self.settings.endpoint} has turned this node away"
            problem = f"{away}: {message['why']}"
            raise StartError(problem)
        elif operation == "word":
            begin = message["word"]["begin"]
            self._node = begin["node"]
            log.info(
                "This is node %d of %s (%s); %s leads",
                self._node["label"], self.settings.count, ", ".join(begin["hosts"]), self.leader,
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
