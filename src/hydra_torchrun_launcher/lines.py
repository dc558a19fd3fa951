"""Connections for whole messages between processes, over a network or not: a length, then JSON.

Nothing that comes by them is anything but data.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

from hydra_torchrun_launcher.wire import Closed

_LENGTH = struct.Struct("<Q")
_LONGEST = 1 << 30
"""A message has a whole config in it, or a task's value; what claims to be longer is garbage."""
_READ_AT_ONCE = 1 << 20


class Line:
    """A stream socket for whole messages."""

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock`."""
        self.rank: int | None = None
        """Whose it is, once that is known."""
        self._sock = sock
        self._read = bytearray()
        self._unsent = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, or -1 once closed."""
        return self._sock.fileno()

    def close(self) -> None:
        """Close the connection; closing twice is harmless."""
        self._sock.close()

    @property
    def peer(self) -> str:
        """The other side's address."""
        try:
            return _unmapped(self._sock.getpeername()[0])
        except OSError:
            return "an address that is gone"

    @property
    def own_address(self) -> str:
        """The address at which the other side has reached this one."""
        return _unmapped(self._sock.getsockname()[0])

    @property
    def has_unsent(self) -> bool:
        """Whether something that was put waits to be flushed."""
        return bool(self._unsent)

    def send(self, message: Any, limit_s: float) -> None:
        """Send a message whole; an OSError if it takes longer than the limit."""
        self._sock.settimeout(limit_s)
        self._sock.sendall(_framed(message))

    def put(self, message: Any) -> None:
        """Leave a message for `flush`."""
        self._unsent += _framed(message)

    def flush(self) -> None:
        """Send as much as goes without waiting.

        Raises:
            OSError: the other side is gone.
        """
        while self._unsent:
            try:
                sent = self._sock.send(self._unsent, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            del self._unsent[:sent]

    def receive(self, longest: int = _LONGEST) -> list[Any]:
        """Read what is there without waiting; return the messages that are whole.

        Raises:
            Closed: the other side is gone.
            OSError: the connection is broken.
            ValueError: that is no message of ours, or longer than allowed.
        """
        try:
            data = self._sock.recv(_READ_AT_ONCE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise Closed
        self._read += data
        messages = []
        while len(self._read) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._read)
            if length > longest:
                problem = f"a message of {length} bytes"
                raise ValueError(problem)
            end = _LENGTH.size + length
            if len(self._read) < end:
                break
            messages.append(json.loads(self._read[_LENGTH.size : end]))
            del self._read[:end]
        return messages


def _unmapped(address: object) -> str:
    """Return an IPv4 address as such where a socket for both kinds shows it."""
    return str(address).removeprefix("::ffff:")


def _framed(message: Any) -> bytes:
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def line_pair() -> tuple[Line, socket.socket]:
    """Return a line and the socket at its other end, for a process that is to be started."""
    ours, theirs = socket.socketpair()
    return Line(ours), theirs


def listen_everywhere(port: int) -> socket.socket:
    """Return a socket that listens on every interface, for IPv4 and IPv6 where there is both."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=dual)
