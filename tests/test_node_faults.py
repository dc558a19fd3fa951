"""What goes wrong between nodes, with real processes in network namespaces: every node ends, in
bounded time, with a message that names node and cause, and none succeeds where another fails.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import Sweep, send
from hosts import PORT, Hosts, make_hosts, wait_for
from test_nodes import notes, said, statuses

SOON = "hydra.launcher.node_timeout_s=4"


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two hosts."""
    yield from make_hosts(tmp_path_factory.mktemp("network"), 2)


@pytest.fixture
def hosts(network: Hosts) -> Iterator[Hosts]:
    """The hosts, with whole links, of whose apps nothing may be left at the end of the test."""
    yield network
    for host in (1, 2):
        network.do("heal", host)
    network.end()


def hold(hosts: Hosts, folder: Path, *overrides: str) -> list[Sweep]:
    """Start a sweep of two jobs, and wait until both ranks of the first are at work."""
    apps = hosts.start_all(f"records={folder}", "what=hold", "x=1,2", SOON, *overrides)
    wait_for(lambda: len(notes(folder)) == 2, "both ranks at work", apps)
    return apps


def go(folder: Path) -> None:
    """Let ranks that are held go on."""
    (folder / "go").touch()


def test_follower_without_leader(hosts: Hosts, tmp_path: Path) -> None:
    """A node that finds no leader says where it looked, and fails in time."""
    app = hosts.start(2, f"records={tmp_path}", "hydra.launcher.rdzv_timeout=2")
    assert statuses([app]) == [1]
    assert (
        "no leader was found at host1:29400 within 2 s (hydra.launcher.rdzv_timeout)" in app.output
    )
    assert "Connection refused" in app.output
    assert not notes(tmp_path)


def test_leader_without_followers(hosts: Hosts, tmp_path: Path) -> None:
    """Two nodes were asked for and one was started: it trains nothing, and says who is missing."""
    app = hosts.start(1, f"records={tmp_path}", "hydra.launcher.rdzv_timeout=2")
    assert statuses([app]) == [1]
    assert "Waiting at host1:29400 for the other nodes: 1 of 2 are here (host1)" in app.output
    assert "1 of 2 nodes did not come to host1:29400 within 2 s" in app.output
    assert not notes(tmp_path)


def test_name_that_does_not_resolve(hosts: Hosts, tmp_path: Path) -> None:
    """An endpoint that nobody knows is said with the reason."""
    app = hosts.start(
        2, f"records={tmp_path}", "hydra.launcher.rdzv_timeout=2", endpoint="nowhere:29400"
    )
    assert statuses([app]) == [1]
    assert "no leader was found at nowhere:29400" in app.output
    assert "resol" in app.output or "not known" in app.output


def test_port_that_is_taken(hosts: Hosts, tmp_path: Path) -> None:
    """A leader whose port another program has fails at once, and so do those who find that one."""
    other = hosts.run_code(
        1,
        "import socket; s = socket.create_server(('', 29400)); print('on', flush=True)\n"
        "while True: s.accept()[0].sendall(b'220 mail')",
    )
    other.await_text("on")
    apps = hosts.start_all(f"records={tmp_path}", "hydra.launcher.rdzv_timeout=3")
    ends = statuses(apps)
    other.kill()
    assert ends == [1, 1], said(apps)
    assert "something else listens at host1:29400: choose another port" in apps[0].output
    assert "what answers there is not this run's leader" in apps[1].output


def test_explicit_leader_whose_port_is_taken(hosts: Hosts, tmp_path: Path) -> None:
    """Said by whom and what to do."""
    other = hosts.run_code(
        1,
        "import socket; s = socket.create_server(('', 29400)); print('on', flush=True); s.accept()",
    )
    other.await_text("on")
    app = hosts.start(1, f"records={tmp_path}", "hydra.launcher.node_rank=0")
    ends = statuses([app])
    other.kill()
    assert ends == [1]
    assert "host1 leads and cannot listen at port 29400 (Address already in use)" in app.output


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"FAKE_PACKAGE": "9.9"}, "host2 has hydra-torchrun-launcher 9.9"),
        ({"FAKE_TORCH": "2.99.0"}, "host2 has torch 2.99.0"),
        ({"HYDRA_TORCHRUN_SECRET": "x"}, "HYDRA_TORCHRUN_SECRET has another value"),
    ],
    ids=["package", "torch", "secret"],
)
def test_nodes_that_differ(
    hosts: Hosts, tmp_path: Path, environ: dict[str, str], words: str
) -> None:
    """A node with other versions is turned away; both say why."""
    path = (str(Path(__file__).parent / "fakes/versions"), os.environ.get("PYTHONPATH", ""))
    fakes = {"PYTHONPATH": os.pathsep.join(path)}
    apps = [
        hosts.start(1, f"records={tmp_path}", "hydra.launcher.rdzv_timeout=8"),
        hosts.start(2, f"records={tmp_path}", environ={**fakes, **environ}),
    ]
    assert statuses(apps) == [1, 1], said(apps)
    assert words in apps[0].output, said(apps)
    assert words in apps[1].output, said(apps)
    assert "host2 was turned away" in apps[0].output


def test_another_config_schema(hosts: Hosts, tmp_path: Path) -> None:
    """An app whose config has other keys on a node fails the job on both, naming the keys."""
    apps = [
        hosts.start(1, f"records={tmp_path}"),
        hosts.start(2, f"records={tmp_path}", environ={"OTHER_SCHEMA": "1"}),
    ]
    assert statuses(apps) == [1, 1], said(apps)
    for app in apps:
        assert "momentum is only in this" in app.output, said(apps)
    assert "node 1 (host2)" in apps[0].output
    assert not notes(tmp_path)


@pytest.mark.parametrize("victim", [1, 2], ids=["leader", "follower"])
def test_host_that_dies(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    """A node whose processes are all killed is missed at once; the sweep ends on the other."""
    apps = hold(hosts, tmp_path)
    hosts.do("crash", victim)
    other = apps[2 - victim]
    assert other.wait(30).status == 1, said(apps)
    lost = "node 1 (host2) is lost" if victim == 2 else "the leader host1 is lost"
    assert f"{lost}: its connection was closed: its process has ended" in other.output
    apps[victim - 1].wait()
    assert {note["x"] for note in notes(tmp_path)} == {1}


@pytest.mark.parametrize("victim", [1, 2], ids=["leader", "follower"])
def test_launching_process_that_dies(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    """So is one whose launching process is; nothing of it lives on."""
    apps = hold(hosts, tmp_path)
    send(apps[victim - 1].popen)
    other = apps[2 - victim]
    assert other.wait(30).status == 1, said(apps)
    apps[victim - 1].wait()


@pytest.mark.parametrize("victim", [1, 2], ids=["leader", "follower"])
def test_node_that_is_stopped_by_a_signal(hosts: Hosts, tmp_path: Path, victim: int) -> None:
    """SIGTERM on one node ends the sweep on both."""
    apps = hold(hosts, tmp_path)
    send(apps[victim - 1].popen, signal.SIGTERM)
    ends = statuses(apps)
    assert ends[victim - 1] == -signal.SIGTERM, said(apps)
    assert ends[2 - victim] == (128 + signal.SIGTERM if victim == 1 else 1), said(apps)
    if victim == 2:
        assert "node 1 (host2) is lost: it was stopped by SIGTERM" in apps[0].output


def test_job_longer_than_the_silence_that_is_borne(hosts: Hosts, tmp_path: Path) -> None:
    """Nodes that have nothing to say for long are not lost."""
    apps = hold(hosts, tmp_path)
    time.sleep(6)  # what is tested is this time
    go(tmp_path)
    assert statuses(apps) == [0, 0], said(apps)


@pytest.mark.parametrize("when", ["before the first job", "in training"])
def test_link_that_is_cut_for_ever(hosts: Hosts, tmp_path: Path, when: str) -> None:
    """Each side misses the other after node_timeout_s, ends its ranks and says so."""
    if when == "in training":
        apps = hold(hosts, tmp_path)
    else:
        slow = "hydra.launcher.preload=[slow_to_load]"
        apps = hosts.start_all(f"records={tmp_path}", SOON, slow)
        wait_for(lambda: "All 2 nodes are here" in apps[0].read_output(), "all here", apps)
    hosts.do("cut", 2)
    assert [app.wait(60).status for app in apps] == [1, 1], said(apps)
    assert "node 1 (host2) is lost: nothing was heard of it for 4 s" in apps[0].output, said(apps)
    assert "the leader host1 is lost: nothing was heard of it for 4 s" in apps[1].output


def test_link_that_is_cut_for_two_seconds(hosts: Hosts, tmp_path: Path) -> None:
    """That is survived."""
    apps = hold(hosts, tmp_path, "hydra.launcher.node_timeout_s=20")
    hosts.do("cut", 2)
    time.sleep(2)  # what is tested is this time
    hosts.do("heal", 2)
    go(tmp_path)
    assert statuses(apps) == [0, 0], said(apps)


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [20, 60, 100])
def test_link_that_is_cut_for_long(hosts: Hosts, tmp_path: Path, seconds: int) -> None:
    """By default a cut of 20 s is survived, and one of 100 s on no node; in between both agree."""
    apps = hosts.start_all(f"records={tmp_path}", "what=hold")
    wait_for(lambda: len(notes(tmp_path)) == 2, "both ranks at work", apps)
    hosts.do("cut", 2)
    time.sleep(seconds)  # what is tested is this time
    hosts.do("heal", 2)
    go(tmp_path)
    ends = statuses(apps)
    assert ends in ([0, 0], [1, 1]), said(apps)
    if seconds != 60:
        assert ends == ([0, 0] if seconds == 20 else [1, 1]), said(apps)


def test_link_that_is_cut_at_the_verdict(hosts: Hosts, tmp_path: Path) -> None:
    """Neither side calls a job completed of whose end it did not hear on the other."""
    apps = hold(hosts, tmp_path)
    hosts.do("cut", 2)
    go(tmp_path)
    assert [app.wait(60).status for app in apps] == [1, 1], said(apps)
    for app in apps:
        assert "has completed" not in app.output
        assert "completed in" not in app.output


def test_full_disk_on_the_follower(hosts: Hosts, tmp_path: Path) -> None:
    """The job fails on both; the leader names the node and what it lacks."""
    own = tmp_path / "own"
    own.mkdir()
    small = f"mount -t tmpfs -o size=64k tmpfs {own}; "
    overrides = (
        f"records={tmp_path}", "what=write", f"hydra.sweep.dir={own}/out",
        "hydra.launcher.redirects='3'",
    )  # fmt: skip
    apps = [hosts.start(1, *overrides, private=own), hosts.start(2, *overrides, before=small)]
    assert statuses(apps) == [1, 1], said(apps)
    for app in apps:
        assert "rank 1 (local rank 0 on host2, attempt 0)" in app.output, said(apps)
        assert "No space left on device" in app.output


def test_directory_that_the_follower_cannot_make(hosts: Hosts, tmp_path: Path) -> None:
    """The job fails on both before any rank starts; the leader names the node and why."""
    own = tmp_path / "own"
    own.mkdir()
    no_room = f"mount -t tmpfs -o size=4k,nr_inodes=1 tmpfs {own}; "
    overrides = (f"records={tmp_path}", f"hydra.sweep.dir={own}/out/a", "hydra.run.dir=.")
    apps = [hosts.start(1, *overrides), hosts.start(2, *overrides, before=no_room)]
    assert statuses(apps) == [1, 1], said(apps)
    for app in apps:
        assert "No space left on device" in app.output, said(apps)
    assert not notes(tmp_path)


def test_strangers(hosts: Hosts, tmp_path: Path) -> None:
    """Whoever connects and writes garbage, or nothing, or speaks like a node, disturbs nobody."""
    apps = [hosts.start(1, f"records={tmp_path}", environ={"HYDRA_TORCHRUN_SECRET": "ours"})]
    wait_for(lambda: "Waiting at host1" in apps[0].read_output(), "the leader waits", apps)
    strangers = []
    facts = {"facts": {"host": "x"}, "nonce": "n", "proof": "p"}
    for garbage in (
        b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100_000, b"\0" * 8, b"\x02\0\0\0\0\0\0\0{}",
        (text := str(facts).replace("'", '"').encode()) and len(text).to_bytes(8, "little") + text,
        b"\x04\0\0\0\0\0\0\0null", b"\x03\0\0\0\0\0\0\0[[[",
    ):  # fmt: skip
        sock = socket.create_connection((hosts.address(1), PORT), 5)
        sock.sendall(garbage)
        strangers.append(sock)
    apps.append(hosts.start(2, f"records={tmp_path}", environ={"HYDRA_TORCHRUN_SECRET": "ours"}))
    assert statuses(apps) == [0, 0], said(apps)
    for sock in strangers:
        sock.close()
    assert len(notes(tmp_path)) == 2


def test_link_process_that_dies(hosts: Hosts, tmp_path: Path) -> None:
    """A node that loses its connections' process ends the sweep, on all nodes."""
    apps = hold(hosts, tmp_path)
    links = [
        child
        for child in psutil.Process(apps[1].popen.pid).children()
        if "launcher.spoke" in str(child.cmdline())
    ]
    send(links[0])
    assert statuses(apps) == [1, 1], said(apps)
    assert "the process that holds this node's connections to the others" in apps[1].output
    assert "node 1 (host2) is lost" in apps[0].output


def test_link_process_that_is_stopped(hosts: Hosts, tmp_path: Path) -> None:
    """One that is stopped is as good as a cut link."""
    apps = hold(hosts, tmp_path)
    links = [
        child
        for child in psutil.Process(apps[1].popen.pid).children()
        if "launcher.spoke" in str(child.cmdline())
    ]
    send(links[0], signal.SIGSTOP)
    assert apps[0].wait(60).status == 1, said(apps)
    assert "node 1 (host2) is lost: nothing was heard of it for 4 s" in apps[0].output
    send(links[0], signal.SIGCONT)
    assert apps[1].wait(60).status == 1, said(apps)
