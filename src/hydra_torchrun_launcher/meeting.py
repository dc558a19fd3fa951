"""Where ranks that others started meet before their task: a connection from each of them to rank 0.

Every wait for another rank ends at a limit, at its death, or by a signal. Torch's own store would
do none of that: it is only asked for rank 0's address, where torchrun has one.
"""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hydra_torchrun_launcher.errors import StartError
from hydra_torchrun_launcher.launched import Place
from hydra_torchrun_launcher.lines import Line, listen_everywhere
from hydra_torchrun_launcher.processes import Deadline
from hydra_torchrun_launcher.wire import Closed, Readable, wait_readable

LIMIT = "HYDRA_TORCHRUN_MEETING_S"
"""Variable with the seconds that ranks wait for each other; 600 by default."""
_SET_IT = f"(the variable {LIMIT} sets the limit)"
_LONGEST_S = 86_400
_LOOK_S = 0.02
"""How often a rank looks whether rank 0 is there: until then there is nothing to wait on."""
_ANSWER_S = 3
"""How long what listens at a port has to prove that it is rank 0."""
_NONE_OF_OURS = (Closed, OSError, ValueError, KeyError, TypeError)
"""What reading from a stranger may raise, or from somebody who is gone."""
_LONGEST_GREETING = 1000
_ADDRESS = "hydra_torchrun_launcher/rank_0"
"""Key of rank 0's address in torchrun's store."""


_met: dict[str, Meeting] = {}
"""A script may run several task functions: the connections stay for the next."""


def meet(place: Place) -> Meeting:
    """Return this process's connections to the others, made when it is asked for them first.

    Raises:
        StartError: as `Meeting` does.
    """
    if place.mark not in _met:
        _met[place.mark] = Meeting(place)
    return _met[place.mark]


class Meeting:
    """The connections of this rank: to all others in rank 0, to rank 0 in the others."""

    def __init__(self, place: Place) -> None:
        """Wait until all ranks have come.

        Raises:
            StartError: they have not within the limit, or rank 0 can listen nowhere.
        """
        self._place = place
        self._limit_s = _limit_s()
        self.port = 0
        """The port at which rank 0 listened; it is free again."""
        self._lines: dict[int, Line] = {}
        if place.rank == 0:
            self._gather()
        else:
            self._find_rank_0()

    def tell(self, message: Any) -> None:
        """Send a message to each of the others that this rank is connected to.

        Raises:
            StartError: one of them is gone, or takes nothing within the limit.
        """
        for rank, line in self._lines.items():
            try:
                line.send(message, self._limit_s)
            except (Closed, OSError):
                raise self._lost(rank) from None

    def hear(self) -> Any:
        """Wait for rank 0's next message."""
        return self.hear_all()[0]

    def hear_all(self) -> dict[int, Any]:
        """Wait for the next message of each of the others; return them by rank.

        Raises:
            StartError: one of them is gone, or says nothing within the limit.
        """
        limit = Deadline(self._limit_s)
        heard: dict[int, Any] = {}
        while silent := {rank: line for rank, line in self._lines.items() if rank not in heard}:
            if limit.passed:
                raise StartError(_missing("no answer", self._limit_s, silent))
            ready = wait_readable(silent.values(), limit.remaining_s)
            for rank, line in silent.items():
                if line in ready:
                    try:
                        for message in line.receive():
                            heard[rank] = message
                    except (Closed, OSError, ValueError):
                        raise self._lost(rank) from None
        return heard

    def wait_until_gone(self, limit_s: float) -> None:
        """Wait until the processes of the others have ended."""
        limit = Deadline(limit_s)
        there = list(self._lines.values())
        while there and not limit.passed:
            for line in wait_readable(there, limit.remaining_s):
                try:
                    line.receive()
                except _NONE_OF_OURS:
                    there.remove(line)

    def _lost(self, rank: int) -> StartError:
        problem = f"rank {rank} was lost before the task function could start; see its output"
        return StartError(problem)

    def _gather(self) -> None:
        """Listen until each of the others has a connection."""
        limit = Deadline(self._limit_s)
        strangers: list[Line] = []
        with _listen(self._place) as server:
            self.port = server.getsockname()[1]
            token = _announce(self._place, self.port, self._limit_s)
            while len(self._lines) < self._place.world_size - 1:
                if limit.passed:
                    missing = set(range(1, self._place.world_size)) - self._lines.keys()
                    raise StartError(_missing("not all ranks came", self._limit_s, missing))
                sources: list[Readable] = [server, *strangers]
                ready = wait_readable(sources, limit.remaining_s)
                for line in [line for line in strangers if line in ready]:
                    if self._is_settled(line, token):
                        strangers.remove(line)
                if server in ready:
                    strangers.append(Line(server.accept()[0]))
        for line in strangers:
            line.close()

    def _is_settled(self, line: Line, token: str) -> bool:
        """Answer a connection's greeting; take it on once the rank has heard the answer."""
        try:
            for message in line.receive(_LONGEST_GREETING):
                if message == "here" and line.rank is not None:
                    self._lines[line.rank] = line
                    return True
                if message["token"] != token:
                    raise ValueError
                line.rank = int(message["rank"])
                line.send({"token": token}, _ANSWER_S)
        except _NONE_OF_OURS:
            line.close()
            return True
        return False

    def _find_rank_0(self) -> None:
        limit = Deadline(self._limit_s)
        addresses = _addresses(self._place, self._limit_s)
        while not limit.passed:
            for host, port, token in addresses():
                line = _greet(host, port, {"token": token, "rank": self._place.rank})
                if line is not None:
                    self.port = port
                    self._lines[0] = line
                    return
                if limit.passed:
                    break
            time.sleep(_LOOK_S)
        problem = (
            f"rank {self._place.rank} found no rank 0 at {self._place.host} within "
            f"{self._limit_s:g} s {_SET_IT}"
        )
        raise StartError(problem)


def _listen(place: Place) -> socket.socket:
    """Return a listening socket: at the first free port of those to try, or at any."""
    make = _loopback if place.is_on_one_node else listen_everywhere
    for port in place.candidates or (0,):
        with suppress(OSError):
            return make(port)
    ports = ", ".join(map(str, place.candidates))
    problem = f"rank 0 can listen at none of the ports {ports} on {socket.gethostname()}"
    raise StartError(problem)


def _loopback(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=1024)


def _announce(place: Place, port: int, limit_s: float) -> str:
    """Say in torchrun's store where rank 0 listens, if it has one; return the word that ranks know.

    That store keeps what ranks before a restart have written, and torchrun's number of restarts
    differs from node to node: a word that nobody has used before tells one start from another.
    """
    if not place.shares_store:
        return place.token
    token = uuid.uuid4().hex
    host = "127.0.0.1" if place.is_on_one_node else _own_address(place)
    address = {"host": host, "port": port, "token": token}
    _torchruns_store(place, limit_s).set(_ADDRESS, json.dumps(address))
    return token


def _own_address(place: Place) -> str:
    """Return this node's address as the store's node sees it; the store's, if that is this node."""
    with socket.create_connection((place.host, place.port)) as connection:
        address = str(connection.getsockname()[0])
    return place.host if ipaddress.ip_address(address.partition("%")[0]).is_loopback else address


def _addresses(place: Place, limit_s: float) -> Callable[[], Iterable[tuple[str, int, str]]]:
    """Return what tells where rank 0 may be now, and the word to greet it with."""
    if not place.shares_store:
        host = "127.0.0.1" if place.is_on_one_node else place.host
        return lambda: [(host, port, place.token) for port in place.candidates]
    store = _torchruns_store(place, limit_s)

    def announced() -> list[tuple[str, int, str]]:
        if not store.check([_ADDRESS]):
            return []
        address = json.loads(store.get(_ADDRESS))
        return [(address["host"], address["port"], address["token"])]

    return announced


def _torchruns_store(place: Place, limit_s: float) -> Any:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    timeout = timedelta(seconds=limit_s)
    return TCPStore(
        place.host, place.port or 0, is_master=False, timeout=timeout, wait_for_workers=False
    )


def _greet(host: str, port: int, greeting: dict[str, Any]) -> Line | None:
    """Return the connection to rank 0, if it listens there."""
    try:
        line = Line(socket.create_connection((host, port), _ANSWER_S))
    except OSError:
        return None
    limit = Deadline(_ANSWER_S)
    with suppress(*_NONE_OF_OURS):
        line.send(greeting, _ANSWER_S)
        while wait_readable([line], limit.remaining_s):
            for answer in line.receive(_LONGEST_GREETING):
                if answer["token"] == greeting["token"]:
                    line.send("here", _ANSWER_S)
                    return line
    line.close()
    return None


def _missing(complaint: str, limit_s: float, ranks: Iterable[int]) -> str:
    missing = ", ".join(map(str, sorted(ranks)))
    return f"{complaint} within {limit_s:g} s {_SET_IT}; missing: rank {missing}"


def _limit_s() -> float:
    text = os.environ.get(LIMIT, "600")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < _LONGEST_S:
        problem = f"{LIMIT}={text}: expected seconds, a number from 0 to {_LONGEST_S}"
        raise StartError(problem)
    return seconds
