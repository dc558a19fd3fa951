"""Sockets, descriptors and anonymous files that join our processes (used in all of them).

Nothing here has a name in a file system: a process that is killed leaves nothing to remove.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import mmap
import os
import select
import socket
import tempfile
import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

_MAX_MESSAGE = 1 << 18
_MAX_FDS = 8
_LONGEST_WAIT_S = 86_400
"""The kernel's own limit is some weeks; whoever waits longer waits again."""

# Every descriptor of ours in this process. A forked child closes all that it was not given:
# one stray copy of a socket hides the end-of-file by which the other side sees a death.
_open: weakref.WeakSet[Fd] = weakref.WeakSet()


class Fd:
    """One descriptor with one owner."""

    def __init__(self, fd: int) -> None:
        """Own `fd` from now on."""
        self._fd = fd
        _open.add(self)

    def fileno(self) -> int:
        """Return the number, or -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Close it; closing twice is harmless."""
        fd = self.release()
        if fd >= 0:
            os.close(fd)

    def release(self) -> int:
        """Give the descriptor up without closing it, and return its number."""
        fd, self._fd = self._fd, -1
        return fd

    __del__ = close


class Readable(Protocol):
    """What a descriptor tells about."""

    def fileno(self) -> int:
        """Return its number, or -1 once closed."""


class Closed(Exception):  # noqa: N818 - a state of the peer, not a mistake
    """The other end is gone."""


class Channel(Fd):
    """A local socket for whole messages: a JSON object and some descriptors each.

    SOCK_SEQPACKET keeps messages whole, so a signal handler that raises between two of them
    cannot leave half a message behind.
    """

    def __init__(self, sock: socket.socket) -> None:
        """Take over `sock`."""
        self._sock = sock
        super().__init__(sock.fileno())

    def close(self) -> None:
        """Close the socket; closing twice is harmless."""
        self._fd = -1
        self._sock.close()

    __del__ = close

    def hang_up(self) -> None:
        """Close the connection itself, whoever else holds a copy of this end (a forked child)."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)
        self.close()

    def is_hung_up(self) -> bool:
        """Whether the other end is gone, whatever is still to be read."""
        if self._fd < 0:
            return True
        poll = select.poll()
        poll.register(self._fd, 0)
        return any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll(0))

    def send(self, message: dict[str, Any], fds: Iterable[int] = ()) -> None:
        """Send one message.

        Raises:
            Closed: one of the ends is gone.
        """
        if self._fd < 0:
            raise Closed
        try:
            socket.send_fds(self._sock, [json.dumps(message).encode()], list(fds))
        except (BrokenPipeError, ConnectionError) as error:
            raise Closed from error

    def receive(self) -> tuple[dict[str, Any], list[Fd]]:
        """Wait for one message and the descriptors that came with it.

        Raises:
            Closed: this end is, or the other end is and all it sent has been read.
        """
        if self._fd < 0:
            raise Closed
        try:
            data, fds, flags, _ = socket.recv_fds(self._sock, _MAX_MESSAGE, _MAX_FDS)
        except ConnectionError as error:
            raise Closed from error
        if not data:
            raise Closed
        for fd in fds:
            os.set_inheritable(fd, False)
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return json.loads(data), [Fd(fd) for fd in fds]


_Source = TypeVar("_Source", bound=Readable)


def wait_readable(sources: Iterable[_Source], timeout_s: float | None) -> list[_Source]:
    """Return the sources in which there is something to read, or an end-of-file.

    It needs no descriptor of its own: it works where there are none left.

    Args:
        sources: what to wait for; those that are closed are left out.
        timeout_s: how long at most, in seconds; None: until something happens (or a day).
    """
    poll = select.poll()
    by_number = {source.fileno(): source for source in sources if source.fileno() >= 0}
    for number in by_number:
        poll.register(number, select.POLLIN)
    longest_s = _LONGEST_WAIT_S if timeout_s is None else min(timeout_s, _LONGEST_WAIT_S)
    found = poll.poll(math.ceil(longest_s * 1000))
    return [by_number[number] for number, _ in found]


def channel_pair() -> tuple[Channel, Channel]:
    """Return two joined channels."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return Channel(left), Channel(right)


def channel_from(fd: int) -> Channel:
    """Return the channel with descriptor `fd`, inherited or received, and own it."""
    os.set_inheritable(fd, False)
    return Channel(socket.socket(fileno=fd))


class _Forking(threading.local):
    """Whether this thread forks a process of ours, which picks what it keeps itself."""

    ours = False


_forking = _Forking()


def fork() -> int:
    """Fork a process of ours: its first act is to close what it was not given."""
    _forking.ours = True
    try:
        return os.fork()
    finally:
        _forking.ours = False


def _leave_connections() -> None:
    """Leave the connections to the parent in a child that the user's code forked.

    It may outlive the parent, and with a copy of the parent's end of a connection it would hide
    the parent's death from the other end.
    """
    if not _forking.ours:
        for fd in list(_open):
            if isinstance(fd, Channel):
                fd.close()


os.register_at_fork(after_in_child=_leave_connections)


def close_all_but(keep: Iterable[Fd]) -> None:
    """Close what a forked child inherited from its parent's connections, except `keep`."""
    kept = set(keep)
    for fd in list(_open):
        if fd not in kept:
            fd.close()


def anonymous_file(label: str) -> Fd:
    """Return an empty file without a name; `label` shows in /proc only."""
    if hasattr(os, "memfd_create"):
        return Fd(os.memfd_create(f"hydra_torchrun_{label}", os.MFD_CLOEXEC))
    with tempfile.TemporaryFile() as file:  # macOS has no memfd
        return Fd(os.dup(file.fileno()))


def write_document(fd: int, header: dict[str, Any], body: bytes = b"") -> None:
    """Write a JSON header and an opaque body into the anonymous file `fd`."""
    head = json.dumps(header).encode()
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    for part in (len(head).to_bytes(8, "little"), head, body):
        view = memoryview(part)
        while view:
            view = view[os.write(fd, view) :]


def read_document(fd: int) -> tuple[dict[str, Any], bytes]:
    """Read what `write_document` wrote; the body is a copy."""
    size = os.fstat(fd).st_size
    with mmap.mmap(fd, size, access=mmap.ACCESS_READ) as view:
        end = 8 + int.from_bytes(view[:8], "little")
        return json.loads(view[8:end]), view[end:]
