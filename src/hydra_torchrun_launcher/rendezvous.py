"""The rendezvous of a job that runs on one node (in its agent)."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

BACKEND = "hydra_torchrun_one_node"
"""Its name in torch elastic's registry of rendezvous backends."""

_LIBUV_TAKES_A_SOCKET = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
"""Before, torch's libuv store refuses a socket that it did not open; its older store takes one."""


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
        # TCPStore by itself listens on every interface; a socket handed to it keeps it local, and
        # binding port 0 leaves no moment in which another process can take the port.
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=300),
            master_listen_fd=listener.detach(),
            use_libuv=_LIBUV_TAKES_A_SOCKET,
        )
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
