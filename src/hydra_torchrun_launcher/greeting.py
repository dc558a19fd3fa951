"""How ranks that Slurm started find rank 0, where nobody has chosen a port (in such ranks).

Ports to try follow from the job's id. Whoever listens at one of them must know the start's token,
and says at which port the store is, which the system has chosen: no port is taken from anybody.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress

from hydra_torchrun_launcher.errors import StartError
from hydra_torchrun_launcher.launched import Place

_ANSWER_S = 3
_LONGEST = 1000


def greet(place: Place, store_port: int, limit_s: float) -> list[int]:
    """Tell every other rank the store's port; return the ranks that did not come in time.

    Raises:
        StartError: every port to try is taken.
    """
    missing = set(range(1, place.world_size))
    deadline = time.monotonic() + limit_s
    with _listen(place) as server:
        while missing and (left_s := deadline - time.monotonic()) > 0:
            server.settimeout(left_s)
            with suppress(OSError, ValueError, KeyError, TypeError):  # not one of ours, or gone
                missing.discard(_answer(server, place.token, store_port))
    return sorted(missing)


def _answer(server: socket.socket, token: str, store_port: int) -> int:
    connection, _ = server.accept()
    with connection:
        connection.settimeout(_ANSWER_S)
        word = json.loads(connection.recv(_LONGEST))
        rank = int(word["rank"]) if word["token"] == token else 0
        connection.sendall(json.dumps({"token": token, "port": store_port}).encode())
        return rank


def _listen(place: Place) -> socket.socket:
    host = place.host if place.host == "127.0.0.1" else ""
    for port in place.candidates:
        with suppress(OSError):
            return socket.create_server((host, port), backlog=1024)
    ports = ", ".join(map(str, place.candidates))
    problem = f"rank 0 can listen at none of the ports {ports}; set MASTER_PORT to a free one"
    raise StartError(problem)


def find(place: Place) -> int | None:
    """Return the store's port, or None if rank 0 is not there yet."""
    for port in place.candidates:
        with suppress(OSError, ValueError, KeyError, TypeError):
            with socket.create_connection((place.host, port), _ANSWER_S) as connection:
                word = {"token": place.token, "rank": place.rank}
                connection.sendall(json.dumps(word).encode())
                answer = json.loads(connection.recv(_LONGEST))
            if answer["token"] == place.token:
                return int(answer["port"])
    return None
