"""Where ranks that others started meet before their task: a store of torch's, which their process
group will use too (in such ranks).

Every wait ends at a limit, and a signal ends it.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from hydra_torchrun_launcher import greeting
from hydra_torchrun_launcher.errors import StartError
from hydra_torchrun_launcher.launched import Place

LIMIT = "HYDRA_TORCHRUN_MEETING_S"
"""Variable with the seconds that ranks wait for each other; 600 by default."""
_SET_IT = f"(the variable {LIMIT} sets the limit)"
_NOT_COME = f"not all ranks came within {{limit:g}} s {_SET_IT}; missing: {{ranks}}"
_PREFIX = "hydra_torchrun_launcher"
_LOOK_S = 0.02
_LONGEST_S = 86_400

T = TypeVar("T")

_kept: list[Any] = []
"""The store, which the process group will use too, lives as long as the rank."""


class Meeting:
    """The store as one of the ranks sees it."""

    def __init__(self, place: Place) -> None:
        """Open the store in rank 0, or find it there.

        Raises:
            StartError: there is none within the limit, or rank 0 can open none.
        """
        self._place = place
        self._limit_s = _limit_s()
        self.port = place.port or 0
        hosts = place.rank == 0 and not place.shares_store
        store = self._open() if hosts else self._find()
        _kept.append(store)
        self._store = PrefixStore(_PREFIX, store)
        meet = self._gather if place.rank == 0 else self._come
        self._store = PrefixStore(f"{_PREFIX}/{meet()}", store)

    def _gather(self) -> str:
        """Wait for the others, and name this meeting.

        Torchrun's store keeps what ranks before a restart have written, and its number of restarts
        differs from node to node: only words that nobody has used before tell ranks of one start.
        """
        name = uuid.uuid4().hex
        asked = {f"ask/{rank}": "" for rank in range(1, self._place.world_size)}
        missing = {f"here/{name}/{rank}": rank for rank in range(1, self._place.world_size)}

        def answer() -> bool:
            for key, answered in asked.items():
                if self._store.check([key]):
                    word = bytes(self._store.get(key)).decode()
                    if word != answered:
                        asked[key] = word
                        self._store.set(f"answer/{word}", name)
            for key in [key for key in missing if self._store.check([key])]:
                del missing[key]
            return not missing

        if not self._guarded(lambda: _comes_true(answer, self._limit_s)):
            ranks = ", ".join(map(str, missing.values()))
            raise StartError(_NOT_COME.format(ranks=ranks, limit=self._limit_s))
        return name

    def _come(self) -> str:
        """Tell rank 0 that this rank is there, and learn the meeting's name."""
        word = uuid.uuid4().hex
        self.tell(f"ask/{self._place.rank}", word)
        name = self.hear(f"answer/{word}")
        self.tell(f"here/{name}/{self._place.rank}")
        return name

    def tell(self, key: str, text: str = "") -> None:
        """Set a key for the others."""
        self._guarded(lambda: self._store.set(key, text))

    def hear(self, key: str) -> str:
        """Wait for a key and return its text."""
        return self._wait_for([key], "rank 0 has not answered")[0]

    def hear_all(self, key: str, limit_s: float | None = None) -> dict[int, str]:
        """Wait for a key from every other rank and return the texts by rank."""
        others = range(1, self._place.world_size)
        names = [f"{key}/{rank}" for rank in others]
        texts = self._wait_for(names, "not all ranks have answered", limit_s)
        return dict(zip(others, texts, strict=True))

    def _wait_for(
        self, keys: Sequence[str], complaint: str, limit_s: float | None = None
    ) -> list[str]:
        limit_s = self._limit_s if limit_s is None else limit_s

        def listen() -> list[str] | None:
            if _comes_true(lambda: self._store.check(list(keys)), limit_s):
                return [bytes(self._store.get(key)).decode() for key in keys]
            return None

        heard = self._guarded(listen)
        if heard is None:
            problem = f"{complaint} within {limit_s:g} s {_SET_IT}"
            raise StartError(problem)
        return heard

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except RuntimeError as error:
            problem = "rank 0 was lost before the task function could start; see its output"
            raise StartError(problem) from error

    def _open(self) -> Any:
        try:
            # Multi-tenant: the process group of this rank will open one at the same port.
            store = self._make(is_master=True, multi_tenant=True)
        except RuntimeError as error:
            problem = (
                f"rank 0 cannot listen at port {self.port} (MASTER_PORT): {_first_line(error)}"
            )
            raise StartError(problem) from None
        if self._place.port is None:
            self.port = store.port
            missing = greeting.greet(self._place, self.port, self._limit_s)
            if missing:
                ranks = ", ".join(map(str, missing))
                raise StartError(_NOT_COME.format(ranks=ranks, limit=self._limit_s))
        return store

    def _find(self) -> Any:
        found = _comes_true(self._is_there, self._limit_s)
        if not found:
            problem = (
                f"rank {self._place.rank} found no rank 0 at {self._place.host} within "
                f"{self._limit_s:g} s {_SET_IT}"
            )
            raise StartError(problem)
        try:
            return self._make(is_master=False)
        except RuntimeError as error:
            problem = f"rank 0's store at {self._place.host}:{self.port}: {_first_line(error)}"
            raise StartError(problem) from None

    def _is_there(self) -> bool:
        if self._place.port is None:
            self.port = greeting.find(self._place) or 0
            return bool(self.port)
        try:
            socket.create_connection((self._place.host, self.port), self._limit_s).close()
        except OSError:
            return False
        return True

    def _make(self, **settings: Any) -> Any:
        # Torch waits for ever for an answer from whatever else may listen there.
        faulthandler.dump_traceback_later(self._limit_s, exit=True)
        try:
            return TCPStore(
                self._place.host, self.port, None, timeout=timedelta(seconds=self._limit_s),
                wait_for_workers=False, **settings,
            )  # fmt: skip
        finally:
            faulthandler.cancel_dump_traceback_later()


def _comes_true(condition: Callable[[], bool], limit_s: float) -> bool:
    """Look again and again: torch's own waits cannot be interrupted, and warn when they end."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_S)
    return True


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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
