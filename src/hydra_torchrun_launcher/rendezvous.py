"""The rendezvous of a job, on one node or on several (in its agents).

Torch's own for several nodes keeps its state in a store that all of them reach, and unpickles what
it finds there. Here nodes meet in the launching process of the one that leads, which agents ask.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

BACKEND = "hydra_torchrun"
"""Its name in torch elastic's registry of rendezvous backends."""

_LIBUV_TAKES_A_SOCKET = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
"""Before, torch's libuv store refuses a socket that it did not open; its older store takes one."""


_STORE_TIMEOUT = timedelta(seconds=300)
"""torch's."""


def _open_store(address: str) -> tuple[TCPStore, int]:
    """Return a new store that listens at an address of this node only, and its port.

    TCPStore by itself listens on every interface; a socket handed to it keeps it to one, and
    binding port 0 leaves no moment in which another process can take the port.
    """
    family = socket.AF_INET
    with suppress(OSError):
        family = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]
    try:
        listener = socket.create_server((address, 0), family=family, backlog=1024)
    except OSError:  # one that others know it by (NAT) and that none of its interfaces has
        address = ""
        listener = socket.create_server((address, 0), family=family, backlog=1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        address or "localhost",
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
        use_libuv=_LIBUV_TAKES_A_SOCKET,
    )
    return store, port


class OneNode(RendezvousHandler):
    """Rendezvous of one node with itself: a new store for every attempt, on loopback only.

    A store must not outlive an attempt: ranks put no attempt into their keys, so that gloo would
    read a dead rank's address. And c10d's rendezvous sleeps up to 0.3 s before its first round.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        """Take the run id from elastic's parameters."""
        self._run_id = parameters.run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name in the registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Tell ranks to use the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open a new store; the node is its only member."""
        self._store = None
        self._store, port = _open_store("127.0.0.1")
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        """Never closed: nobody else could join."""
        return False

    def set_closed(self) -> None:
        """Do nothing: nobody else could join."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nobody else could join."""
        return 0

    def get_run_id(self) -> str:
        """Return the job's run id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


class NoMoreRoundsError(Exception):
    """The job has failed as often as it may."""


class SeveralNodes(RendezvousHandler):
    """Rendezvous of several nodes: the leader forms a round once every agent is ready for it.

    Each round has a store of its own, on the node of rank 0.
    """

    def __init__(
        self, run_id: str, node: dict[str, Any], ask: Callable[[int | None], dict[str, Any]]
    ) -> None:
        """Wait for the first round.

        Args:
            run_id: the job's id for torch elastic.
            node: this node's `address`, and whether it `has_store`.
            ask: tells the leader that this agent is ready, and where its store listens; returns
                the round.
        """
        self._run_id = run_id
        self._node = node
        self._ask = ask
        self._store: TCPStore | None = None
        self.others_wait = False
        """Whether another node is ready for the next round, so that this one has to restart."""

    def get_backend(self) -> str:
        """Return the name in the registry."""
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Tell ranks to use the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the next round.

        Raises:
            NoMoreRoundsError: there is none.
        """
        self._store, port = None, None
        if self._node["has_store"]:
            self._store, port = _open_store(self._node["address"])
        found = self._ask(port)
        self.others_wait = False
        if found["op"] == "refuse":
            raise NoMoreRoundsError
        if self._store is None:
            self._store = TCPStore(
                found["host"],
                found["port"],
                is_master=False,
                wait_for_workers=False,
                timeout=_STORE_TIMEOUT,
            )
        where = RendezvousStoreInfo(found["host"], found["port"])
        return RendezvousInfo(self._store, found["rank"], found["count"], where)

    def is_closed(self) -> bool:
        """Never closed: the leader says when there is no more."""
        return False

    def set_closed(self) -> None:
        """Do nothing: the leader knows."""

    def num_nodes_waiting(self) -> int:
        """Return 1 if another node is ready for the next round, else 0."""
        return int(self.others_wait)

    def get_run_id(self) -> str:
        """Return the job's run id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True
