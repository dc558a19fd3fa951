"""A follower's link: it finds the leader and stays connected to it (a process of its own)."""

from __future__ import annotations

import hmac
import secrets
import socket
from contextlib import suppress
from typing import Any, NoReturn

from hydra_torchrun_launcher.errors import one_line
from hydra_torchrun_launcher.lines import Line
from hydra_torchrun_launcher.link import (
    BROKEN,
    LONGEST_REASON,
    PROTOCOL,
    SECRET,
    Link,
    Peer,
    be,
    proof,
)
from hydra_torchrun_launcher.processes import Deadline
from hydra_torchrun_launcher.wire import wait_readable

_ANSWER_S = 3
"""How long a try to reach the leader waits for it."""
_AGAIN_S = 0.2
"""How long until the next."""


def main(fd: int, settings: dict[str, Any]) -> NoReturn:
    """Be a follower's link."""
    be(Spoke, fd, settings)


class Spoke(Link):
    """Tries until the leader takes it in, and passes words on.

    To the launching process it says: trying (and why it was in vain so far), joined, refused, word,
    over, left (the leader, and why). It obeys: `word`.
    """

    def __init__(self, own: Line, settings: dict[str, Any]) -> None:
        """Start without a leader; see `Link`."""
        super().__init__(own, settings)
        self._said = ""
        self._early: list[Any] = []
        """What came together with the leader's welcome."""
        self._has_begun = False

    def run(self) -> None:
        """Find the leader, and work until all is over."""
        while True:
            leader = self._find()
            if leader is None:
                return
            why = self._follow(leader)
            leader.line.close()
            if not why:
                return
            if self._has_begun:
                self.tell({"op": "left", "why": why})
                self.flush_own()
                return
            self._say_trying(why)  # it may be started again, before any job

    def _say_trying(self, why: str, *, is_refused: bool = False) -> None:
        if why != self._said:
            self._said = why
            self.tell({"op": "trying", "why": why, "is_refused": is_refused})

    def _find(self) -> Peer | None:
        """Return the leader, or None if it does not want this node."""
        while True:
            try:
                leader = self._greet()
            except (OSError, UnicodeError) as error:  # a name may be no name at all
                leader, why = None, getattr(error, "strerror", None) or str(error)
                is_refused = isinstance(error, ConnectionRefusedError)
                self._say_trying(f"{why}", is_refused=is_refused)
            if leader is not None:
                return leader if leader.number else None
            ready = self.wait([], [_AGAIN_S])
            if self._own.fileno() in ready:
                self.hear_own()  # raises Closed when there is nobody any more

    def _greet(self) -> Peer | None:
        """Try once to reach the leader; the peer has a number if this node is taken in."""
        sock = socket.create_connection((self._host, self._port), _ANSWER_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        leader = Peer(Line(sock))
        limit = Deadline(_ANSWER_S)
        nonce = secrets.token_hex()
        with suppress(*BROKEN):
            while wait_readable([leader.line], limit.remaining_s) and not limit.passed:
                self._early += leader.line.receive()
                while self._early:
                    message = self._early.pop(0)
                    if message.get("word") == PROTOCOL:
                        made = proof(message["nonce"], self._facts)
                        greeting = {"facts": self._facts, "nonce": nonce, "proof": made}
                        leader.line.send(greeting, _ANSWER_S)
                    elif self._is_answer(leader, message, nonce):
                        return leader
                    else:
                        leader.line.close()
                        self._early.clear()
                        return None
        leader.line.close()
        self._early.clear()
        self._say_trying("what answers there is not this run's leader")
        return None

    def _is_answer(self, leader: Peer, message: dict[str, Any], nonce: str) -> bool:
        """Take in whether the leader wants this node; return whether it is the leader who says."""
        if "later" in message:
            self._say_trying(one_line(str(message["later"]))[:LONGEST_REASON])
            return False
        if "refused" in message:
            why = one_line(str(message["refused"]))[:LONGEST_REASON]
            self.tell({"op": "refused", "why": why})
            self.flush_own()
            return True
        if not hmac.compare_digest(message["proof"], proof(nonce, message["welcome"])):
            self._say_trying(f"what answers there has another value of {SECRET}")
            return False
        self._join(leader, message["welcome"])
        return True

    def _join(self, leader: Peer, facts: dict[str, Any]) -> None:
        leader.number, leader.facts = 1, facts
        leader.lives(self._lost_after_s)
        met = {"own_address": leader.line.own_address}
        self.tell({"op": "joined", "facts": {**facts, **met}})

    def _follow(self, leader: Peer) -> str:
        """Work until all is over, or return why the leader is lost."""
        while True:
            try:
                while self._early:
                    leader.lives(self._lost_after_s)
                    if self._pass_on(leader, self._early.pop(0)):
                        return ""
                ready = self.wait([leader.line], [leader.time.remaining_s, self._beat.remaining_s])
                if leader.line.fileno() in ready:
                    self._early += leader.line.receive()
                if self._own.fileno() in ready:
                    for order in self.hear_own():
                        leader.line.put(order)
                self.beat([leader])
                leader.line.flush()
                if self._early:
                    continue
            except BROKEN:
                return "its connection was closed: its process has ended"
            if leader.time.passed:
                return f"nothing was heard of it for {self._lost_after_s:g} s"

    def _pass_on(self, leader: Peer, message: dict[str, Any]) -> bool:
        """Tell the launching process what the leader says; return whether all is over."""
        if "over" in message:
            self.tell({"op": "over", **message["over"]})
            self.flush_own()
            leader.line.put({"over": True})
            leader.line.flush()
            return True
        if "word" in message:
            self._has_begun = True
            self.tell({"op": "word", "word": message["word"]})
        return False
