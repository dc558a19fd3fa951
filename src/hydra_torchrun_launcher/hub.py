"""The leader's link: all other nodes connect to it (a process of its own)."""

from __future__ import annotations

import hmac
import os
import secrets
import socket
from contextlib import suppress
from typing import Any, NoReturn

from hydra_torchrun_launcher.errors import one_line
from hydra_torchrun_launcher.lines import Line, listen_everywhere
from hydra_torchrun_launcher.link import (
    BROKEN,
    LONGEST_GREETING,
    LONGEST_REASON,
    PROTOCOL,
    SECRET,
    Link,
    Peer,
    be,
    proof,
)
from hydra_torchrun_launcher.processes import Deadline

_GREETING_S = 10
"""How long a connection has to prove that it is a node."""
_LONGEST_NAME = 255
_MOST_GUESTS = 64
"""Connections that have not: one more drops the oldest."""

MUST_AGREE = {
    "package": "hydra-torchrun-launcher {}",
    "torch": "torch {}",
    "python": "Python {}",
    "hydra": "hydra-core {}",
    "nodes": "nnodes={}",
    "run": "rdzv_id={}",
    "app": "the app {}",
    "kind": "{}",
}
"""Facts in which all nodes are alike, and how they are said."""


def main(fd: int, settings: dict[str, Any]) -> NoReturn:
    """Be the leader's link."""
    be(Hub, fd, settings)


class Hub(Link):
    """Takes in those who prove to be nodes of this run, and passes words on to them and from them.

    To the launching process it says: listening, broken (it cannot listen), joined, turned away,
    word (of a node), left (a node, and why), over. It obeys: `to` and `word`; `over`, after which
    it waits until every node has heard that.
    """

    def __init__(self, own: Line, settings: dict[str, Any]) -> None:
        """Start with no other node; see `Link`."""
        super().__init__(own, settings)
        self._guests: list[Peer] = []
        self._nodes: dict[int, Peer] = {}
        self._came = 0
        self._ending: Deadline | None = None

    def run(self) -> None:
        """Listen, and work until all is over."""
        try:
            server = self._listen()
        except OSError as error:
            self.tell(
                {"op": "broken", "errno": error.errno, "message": os.strerror(error.errno or 0)}
            )
            self.flush_own()
            return
        self.tell({"op": "listening"})
        while not self._is_over():
            peers = [*self._guests, *self._nodes.values()]
            lefts = [each.time.remaining_s for each in peers] + [self._beat.remaining_s]
            lefts.append(None if self._ending is None else self._ending.remaining_s)
            ready = self.wait([server, *(each.line for each in peers)], lefts)
            for peer in peers:
                self._attend(peer, is_ready=peer.line.fileno() in ready)
            if server.fileno() in ready:
                self._admit(server)
            if self._own.fileno() in ready:
                for order in self.hear_own():
                    self._obey(order)
            self.beat(self._nodes.values())
            for peer in [*self._guests, *self._nodes.values()]:
                self._flush(peer)
        self.flush_own()

    def _listen(self) -> socket.socket:
        """Listen on loopback where the others are to come by it, else on every interface.

        A name does not tell the interface: `/etc/hosts` often has 127.0.1.1 for the own one.
        """
        if self._host in ("localhost", "::1") or self._host.startswith("127."):
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            return socket.create_server((self._host, self._port), family=family, backlog=1024)
        return listen_everywhere(self._port)

    def _is_over(self) -> bool:
        if self._ending is None:
            return False
        silent = [node.number for node in self._nodes.values() if not node.has_confirmed]
        if silent and not self._ending.passed:
            return False
        self.tell({"op": "over", "unconfirmed": silent})
        return True

    def _obey(self, order: dict[str, Any]) -> None:
        for number in order["to"]:
            if number in self._nodes:
                self._nodes[number].line.put({"word": order["word"]})
        if order.get("drop") in self._nodes:
            self._nodes.pop(order["drop"]).line.close()
        if "over" in order:
            self._ending = Deadline(self._lost_after_s)
            for node in self._nodes.values():
                node.line.put({"over": order["over"]})

    def _admit(self, server: socket.socket) -> None:
        try:
            sock, _ = server.accept()
        except OSError:  # gone again, or there are no descriptors now
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        guest = Peer(Line(sock), secrets.token_hex())
        guest.lives(_GREETING_S)
        guest.line.put({"word": PROTOCOL, "nonce": guest.nonce})
        self._guests.append(guest)
        if len(self._guests) > _MOST_GUESTS:
            self._lose(self._guests[0], "")

    def _attend(self, peer: Peer, *, is_ready: bool) -> None:
        """Hear a peer, or note that it is silent for too long."""
        try:
            longest = () if peer.number else (LONGEST_GREETING,)
            for message in peer.line.receive(*longest) if is_ready else ():
                self._take_in(peer, message)
        except BROKEN:
            self._lose(peer, "its connection was closed: its process has ended")
        if peer.time.passed:
            self._lose(peer, f"nothing was heard of it for {self._lost_after_s:g} s")

    def _flush(self, peer: Peer) -> None:
        try:
            peer.line.flush()
        except OSError:
            self._lose(peer, "its connection is broken")

    def _lose(self, peer: Peer, why: str) -> None:
        peer.line.close()
        peer.time.clear()
        if peer in self._guests:
            self._guests.remove(peer)
        elif self._nodes.pop(peer.number, None) is not None and not peer.has_confirmed:
            self.tell({"op": "left", "node": peer.number, "why": why})

    def _take_in(self, peer: Peer, message: dict[str, Any]) -> None:
        if not peer.number:
            self._judge(peer, message)
            return
        peer.lives(self._lost_after_s)
        if "word" in message:
            self.tell({"op": "word", "node": peer.number, "word": message["word"]})
        peer.has_confirmed = peer.has_confirmed or "over" in message

    def _judge(self, guest: Peer, greeting: dict[str, Any]) -> None:
        """Take a guest as a node, or turn it away."""
        facts = greeting["facts"]
        host = one_line(str(facts["host"]))[:_LONGEST_NAME]
        if not hmac.compare_digest(greeting["proof"], proof(guest.nonce, facts)):
            why = f"the variable {SECRET} has another value on {self._facts['host']} and on {host}"
        else:
            why = self.objection(facts)
        if not why and len(self._nodes) + 1 == self._facts["most"]:
            guest.line.put({"later": self._full()})
            self._dismiss(guest)
            return
        if why:
            why = one_line(why)[:LONGEST_REASON]
            self.tell({"op": "turned away", "host": host, "why": why})
            guest.line.put({"refused": why})
            self._dismiss(guest)
            return
        self._came += 1
        guest.number, guest.facts = self._came, facts
        self._guests.remove(guest)
        self._nodes[guest.number] = guest
        guest.lives(self._lost_after_s)
        answer = {"host": self._facts["host"]}
        guest.line.put({"welcome": answer, "proof": proof(greeting["nonce"], answer)})
        met = {"address": guest.line.peer, "leader_address": guest.line.own_address}
        self.tell({"op": "joined", "node": guest.number, "facts": {**facts, **met}})

    def _dismiss(self, guest: Peer) -> None:
        with suppress(OSError):
            guest.line.flush()
        self._lose(guest, "")

    def _full(self) -> str:
        there = [self._facts, *(node.facts for node in self._nodes.values())]
        names = ", ".join(str(each["host"]) for each in there)
        return f"nnodes={self._facts['nodes']}, and all of them are there: {names}"

    def objection(self, facts: dict[str, Any]) -> str:
        """Say why a node cannot be one of this run; nothing if it can."""
        own, host, rank = self._facts, facts["host"], facts["node_rank"]
        is_name = isinstance(host, str) and host == one_line(host)[:_LONGEST_NAME]
        is_rank = rank is None or (type(rank) is int and 0 <= rank < own["most"])
        if not is_name or not is_rank:
            return f"host={host!r}, node_rank={rank!r}: that is no node"
        differences = [
            f"{own['host']} has {words.format(own[fact])}, {host} has {words.format(facts[fact])}"
            for fact, words in MUST_AGREE.items()
            if facts[fact] != own[fact]
        ]
        if differences:
            return "all nodes need the same: " + "; ".join(differences)
        there = [own, *(node.facts for node in self._nodes.values())]
        if own["is_elastic"]:  # who is one too many waits; ranks are given by the leader
            return ""
        if len(there) == own["most"]:
            return self._full()
        rivals = [str(each["host"]) for each in there if each["node_rank"] == rank is not None]
        return f"node_rank={rank} is {rivals[0]}'s" if rivals else ""
