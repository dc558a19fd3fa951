"""The link: one process per node that holds the node's connections to the others.

The launching process runs the user's code between jobs, for minutes if it likes. This one never
does: it answers for the node, hears whether the others are there, and passes on what launching
processes say to each other. It knows nothing of jobs. Here is what the leader's link (`hub`) and a
follower's (`spoke`) have in common.
"""

from __future__ import annotations

import hmac
import json
import math
import os
import select
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from hydra_torchrun_launcher.lines import Line
from hydra_torchrun_launcher.processes import Deadline, die_with_parent
from hydra_torchrun_launcher.wire import Closed

SECRET = "HYDRA_TORCHRUN_SECRET"  # noqa: S105 - its name
"""Variable with a word that only the nodes of a run know; who does not know it is turned away."""
PROTOCOL = "hydra-torchrun nodes 1"
"""What the leader says first; the number changes with what is said after it."""
LONGEST_GREETING = 1 << 16
"""In bytes: more of a stranger is not read."""
LONGEST_REASON = 4096
"""In characters: more of why a node is not wanted is not said."""
BROKEN = (Closed, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""What reading from a stranger may raise, or from somebody who is gone."""
_BEATS = 6
"""How many beats there are in the time after which a node is lost."""
_LONGEST_BEAT_S = 5


@dataclass
class Peer:
    """A connection to another node, or to one that says to be one."""

    line: Line
    nonce: str = ""
    number: int = 0
    """Which node it is, in the order of coming; 0 until it has proved to be one."""
    facts: dict[str, Any] = field(default_factory=dict)
    time: Deadline = field(default_factory=Deadline)
    """When it is lost, unless it says something."""
    has_confirmed: bool = False
    """Whether it has heard that all is over."""

    def lives(self, lost_after_s: float) -> None:
        """Give it time to say something again."""
        self.time.clear()
        self.time.within(lost_after_s)


def proof(nonce: str, facts: dict[str, Any]) -> str:
    """Return what only a node that knows the secret can make of another's nonce."""
    text = f"{nonce} {json.dumps(facts, sort_keys=True)}"
    return hmac.new(os.environ.get(SECRET, "").encode(), text.encode(), "sha256").hexdigest()


class Link:
    """A loop over the connection to the launching process and those to other nodes."""

    def __init__(self, own: Line, settings: dict[str, Any]) -> None:
        """Start with no other node.

        Args:
            own: the connection to the launching process.
            settings: `facts` of this node, `host` and `port` of the leader, `lost_after_s`.
        """
        self._own = own
        self._facts: dict[str, Any] = settings["facts"]
        self._host, self._port = settings["host"], settings["port"]
        self._lost_after_s: float = settings["lost_after_s"]
        self._beat = Deadline()

    def run(self) -> None:
        """Work until all is over.

        Raises:
            Closed: the launching process is gone.
        """
        raise NotImplementedError

    def tell(self, message: dict[str, Any]) -> None:
        """Tell the launching process something, as soon as it takes it."""
        self._own.put(message)

    def wait(self, sources: Iterable[Any], timeouts_s: Iterable[float | None]) -> set[int]:
        """Wait for something to read, or for room for what is unsent; return what can be read.

        Args:
            sources: lines and a listening socket, beside the line to the launching process.
            timeouts_s: how long at most, the shortest of them; None: for ever.

        Raises:
            Closed: the launching process is gone.
        """
        poll = select.poll()
        for each in (self._own, *sources):
            wants = select.POLLOUT if isinstance(each, Line) and each.has_unsent else 0
            poll.register(each.fileno(), select.POLLIN | wants)
        shortest = min((each for each in timeouts_s if each is not None), default=None)
        found = poll.poll(None if shortest is None else math.ceil(shortest * 1000))
        self.flush_own()
        return {number for number, events in found if events & ~select.POLLOUT}

    def flush_own(self) -> None:
        """Send what waits for the launching process, as far as it takes it."""
        try:
            self._own.flush()
        except OSError as error:
            raise Closed from error

    def hear_own(self) -> list[Any]:
        """Return what the launching process has said."""
        try:
            return self._own.receive()
        except OSError as error:
            raise Closed from error

    def beat(self, peers: Iterable[Peer]) -> None:
        """Show the others that this node lives, if it is time to."""
        if self._beat.remaining_s is None or self._beat.passed:
            self._beat.clear()
            self._beat.within(min(_LONGEST_BEAT_S, self._lost_after_s / _BEATS))
            for peer in peers:
                if not peer.line.has_unsent:  # that says as much, when it gets through
                    peer.line.put({})


def be(kind: Callable[[Line, dict[str, Any]], Link], fd: int, settings: dict[str, Any]) -> NoReturn:
    """Be a link, until the launching process is gone or all is over."""
    if settings["bound"]:  # else it is a thread that may end before the process does
        die_with_parent(settings["parent"])
    with suppress(Closed):  # the others see it by the end of the connections
        kind(Line(socket.socket(fileno=fd)), settings).run()
    os._exit(0)
