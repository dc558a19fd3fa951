"""Messages, descriptors and anonymous files between our processes."""

from __future__ import annotations

import os

import pytest

from hydra_torchrun_launcher.wire import (
    Closed,
    Fd,
    anonymous_file,
    channel_pair,
    close_all_but,
    read_document,
    wait_readable,
    write_document,
)


def test_message_and_descriptors_arrive_whole() -> None:
    """Messages stay apart, and a descriptor that came with one can be read."""
    left, right = channel_pair()
    file = anonymous_file("test")
    write_document(file.fileno(), {"a": "\udc80"}, b"body" * 1000)
    left.send({"n": 1}, [file.fileno()])
    left.send({"n": 2, "text": "x" * 100_000})
    message, (received,) = right.receive()
    assert message == {"n": 1}
    assert read_document(received.fileno()) == ({"a": "\udc80"}, b"body" * 1000)
    assert not os.get_inheritable(received.fileno())
    assert right.receive()[0]["n"] == 2
    assert not wait_readable([right], 0)


def test_end_of_the_other_side() -> None:
    """What was sent is read before the end is said; afterwards nothing can be sent."""
    left, right = channel_pair()
    left.send({"n": 1})
    left.close()
    assert right.receive()[0] == {"n": 1}
    for use in (right.receive, lambda: right.send({}), left.receive, lambda: left.send({})):
        with pytest.raises(Closed):
            use()


def test_child_closes_what_it_was_not_given() -> None:
    """A forked child keeps only the descriptors it names."""
    left, right = channel_pair()
    kept, other = Fd(os.dup(1)), Fd(os.dup(1))
    number = other.fileno()
    pid = os.fork()
    if pid == 0:
        close_all_but([kept])
        good = [left.fileno(), right.fileno(), other.fileno()] == [
            -1,
            -1,
            -1,
        ] and kept.fileno() >= 0
        try:
            os.fstat(number)
        except OSError:
            os._exit(0 if good else 1)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert right.fileno() >= 0
