"""What nodes say to each other before they trust each other: real link processes, on loopback."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from conftest import HANG_S

from hydra_torchrun_launcher.hub import MUST_AGREE
from hydra_torchrun_launcher.lines import Line
from hydra_torchrun_launcher.link import PROTOCOL, proof
from hydra_torchrun_launcher.node_settings import Nodes
from hydra_torchrun_launcher.nodes import Follower, Leader, _order, facts_of, meet
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.wire import Closed, wait_readable

LOST_S = 2


def nodes(*, leads: bool, port: int = 0, count: int = 2) -> Nodes:
    """Return what the settings of a node on loopback would be."""
    if not port:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
    return Nodes(
        least=count, most=count, rank=None, leads=leads, host="127.0.0.1", port=port,
        join_timeout_s=HANG_S, last_call_s=0, lost_after_s=LOST_S, run_id="", local_addr=None,
    )  # fmt: skip


def facts(settings: Nodes) -> dict[str, Any]:
    """Return what a node says of itself."""
    return facts_of(settings, "app", "a sweep")


@pytest.fixture
def watch() -> Iterator[SignalWatch]:
    """A watch over no signal."""
    with closing(SignalWatch([])) as watch:
        yield watch


@pytest.fixture
def leader(watch: SignalWatch) -> Iterator[Leader]:
    """A leader that listens, and waits for two others."""
    settings = nodes(leads=True, count=3)
    leader = meet(settings, facts(settings), watch)
    assert isinstance(leader, Leader)
    yield leader
    leader.close(0, "")


def heard(line: Line) -> dict[str, Any]:
    """Return the next word of the other side that is no beat."""
    while wait_readable([line], HANG_S):
        for message in line.receive():
            if message:
                return message  # type: ignore[no-any-return]
    pytest.fail("nothing was said")


def is_dropped(line: Line, timeout_s: float = HANG_S) -> bool:
    """Tell whether the other side closes the connection, without another word."""
    try:
        while wait_readable([line], timeout_s):
            if any(line.receive()):
                return False
    except (Closed, OSError):
        return True
    return False


Guest = Callable[..., tuple[Line, Callable[[], None]]]


@pytest.fixture
def guest(leader: Leader) -> Iterator[Guest]:
    """Connects to the leader; returns the connection, and what makes a node of the guest."""
    settings = leader.settings

    def come(**changed: Any) -> tuple[Line, Callable[[], None]]:
        sock = stack.enter_context(
            closing(socket.create_connection((settings.host, settings.port), HANG_S))
        )
        line = Line(sock)
        hello = heard(line)
        assert hello["word"] == PROTOCOL

        def prove() -> None:
            said = {**facts(settings), "host": "guest", **changed}
            made = proof(hello["nonce"], said)
            line.send({"facts": said, "nonce": secrets.token_hex(), "proof": made}, HANG_S)

        return line, prove

    with ExitStack() as stack:
        yield come


def test_guest_that_is_a_node(guest: Guest) -> None:
    """It is taken in."""
    line, prove = guest()
    prove()
    assert "welcome" in heard(line)


def test_guest_that_says_nothing(guest: Guest) -> None:
    """It is dropped after a time."""
    line, _ = guest()
    assert is_dropped(line)


def test_too_many_guests(guest: Guest) -> None:
    """The oldest is dropped for one more, so that a crowd keeps no node out."""
    crowd = [guest() for _ in range(80)]
    line, prove = guest()
    prove()
    assert "welcome" in heard(line)
    assert is_dropped(crowd[0][0], 1), "it was not before its time"
    assert not is_dropped(crowd[-1][0], 0)


def test_guest_that_says_too_much(guest: Guest) -> None:
    """A greeting that fills the memory is not read."""
    line, prove = guest(padding="x" * 100_000)
    prove()
    assert is_dropped(line)


def test_node_that_falls_silent(guest: Guest, leader: Leader, watch: SignalWatch) -> None:
    """A node of which nothing is heard is lost."""
    take_in(leader, guest, watch)
    (lost,) = leader._link.hear(watch, HANG_S)
    assert lost == {"op": "left", "node": 1, "why": f"nothing was heard of it for {LOST_S} s"}


@pytest.mark.parametrize("fact", ["host", "torch"])
def test_odd_words(guest: Guest, leader: Leader, watch: SignalWatch, fact: str) -> None:
    """What a stranger says of itself disturbs no terminal."""
    line, prove = guest(**{fact: "\x1b[31m\n" + "x" * 10_000})
    prove()
    refused = heard(line)["refused"]
    (said,) = leader._link.hear(watch, HANG_S)
    assert said["op"] == "turned away"
    assert said["host"] == "guest" or said["host"].startswith("\\u001b[31m\\nx")
    assert len(said["host"]) < 300
    assert said["why"] == refused
    assert said["why"].isprintable()
    assert len(said["why"]) < 5000


@pytest.mark.parametrize("fact", ["host", "nodes", "node_rank", *MUST_AGREE])
@pytest.mark.parametrize("value", [None, [], {}, -1, "x" * 1000, "\x1b[31m\n", 1e400])
def test_odd_guests(guest: Guest, fact: str, value: object) -> None:
    """Whatever a guest says of itself, the leader lives and takes in the next."""
    line, prove = guest(**{fact: value})
    prove()
    is_fine = fact == "node_rank" and value is None
    assert ("welcome" if is_fine else "refused") in heard(line)
    other, prove = guest()
    prove()
    assert "welcome" in heard(other)


def take_in(leader: Leader, guest: Guest, watch: SignalWatch) -> Line:
    """Make a node of a guest; return its connection."""
    line, prove = guest()
    prove()
    heard(line)
    while len(leader._here) == 1:
        for message in leader._link.hear(watch, HANG_S):
            leader._take_in(message)
    return line


def test_confirmation(guest: Guest, leader: Leader, watch: SignalWatch) -> None:
    """The leader waits until a node has heard of the end."""
    line = take_in(leader, guest, watch)
    if not (pid := os.fork()):
        with suppress(BaseException):
            assert heard(line) == {"over": {"status": 3, "why": "x"}}
            line.send({"over": True}, HANG_S)
        os._exit(0)
    assert leader.close(3, "x")
    os.waitpid(pid, 0)


def test_silent_node(
    guest: Guest, leader: Leader, watch: SignalWatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that says nothing more is not waited for at the end, but named."""
    take_in(leader, guest, watch)
    assert not leader.close(0, "")
    assert "guest was not heard to take the end of the sweep" in caplog.text


OTHER_SECRET = "what answers there has another value of HYDRA_TORCHRUN_SECRET"
NO_LEADER = "what answers there is not this run's leader"


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("no hello", OTHER_SECRET),
        ("other protocol", NO_LEADER),
        ("no proof", OTHER_SECRET),
        ("no words", NO_LEADER),
        ("null", NO_LEADER),
    ],
)
def test_leader_that_cannot_prove_itself(watch: SignalWatch, answer: str, why: str) -> None:
    """A node follows nobody who does not know the secret, or speaks otherwise."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        server.settimeout(HANG_S)
        settings = nodes(leads=False, port=server.getsockname()[1])
        follower = stack.enter_context(closing(meet(settings, facts(settings), watch)))
        assert isinstance(follower, Follower)
        sock, _ = server.accept()
        line = stack.enter_context(closing(Line(sock)))
        words: dict[str, Any] = {
            "no hello": {"welcome": {"host": "x"}, "proof": "x"},
            "other protocol": {"word": f"{PROTOCOL}0", "nonce": "x"},
            "no proof": {"word": PROTOCOL, "nonce": "x"},
            "no words": {"word": PROTOCOL, "nonce": None},
            "null": None,
        }
        line.send(words[answer], HANG_S)
        if answer == "no proof":
            heard(line)
            line.send({"welcome": {"host": "x"}, "proof": "x"}, HANG_S)
        (said,) = follower._link.hear(watch, HANG_S)
        assert said == {"op": "trying", "why": why, "is_refused": False}


def test_long_words(guest: Guest, leader: Leader, watch: SignalWatch) -> None:
    """A config of many megabytes comes through whole, to a node that reads slowly."""
    lines = []
    for name in ("a", "b"):
        line, prove = guest(host=name)
        prove()
        heard(line)
        lines.append(line)
    leader.gather(watch)
    text = json.dumps("x" * 20_000_000)
    leader.tell(1, {"job": text})
    assert heard(lines[0])["word"]["begin"]["node"]["label"] == 1
    assert heard(lines[0])["word"] == {"job": text}


def test_order_of_hosts() -> None:
    """Ranks are given in the order in which people count hosts."""
    names = ["node10", "node2", "a10b2", "a10b10", "a9", "node", "b", ""]
    ordered = sorted(names, key=lambda name: _order({"host": name}))
    assert ordered == ["", "a9", "a10b2", "a10b10", "b", "node", "node2", "node10"]
