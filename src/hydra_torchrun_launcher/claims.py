"""Which process runs a sweep in a directory: a file for each start of one, which stays (written in
the launching process, read by whoever looks).

It relies on no lock, which network file systems may not have, but on the creation of a file that
must not be there yet, which all of them do right.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra_torchrun_launcher.errors import StartError
from hydra_torchrun_launcher.processes import start_time

VERSION = 1
BEAT_S = 10
"""How often a process shows that it lives, for those on other machines."""
_SILENT_S = 30 * BEAT_S
"""After how long without a sign it counts as dead there."""
_PREFIX, _SUFFIX = "sweep.", ".json"


class Claim:
    """A sweep's hold of its directory, as long as this process lives."""

    def __init__(self, path: Path, facts: dict[str, Any]) -> None:
        """Hold what the file says."""
        self._path = path
        self._facts = facts
        self._owner = os.getpid()
        self._beaten = time.monotonic()

    @classmethod
    def take(cls, folder: Path, sweep_dir: str, facts: dict[str, Any]) -> Claim:
        """Claim a directory, for the first sweep in it or for one after another.

        Args:
            folder: where the files are.
            sweep_dir: the directory, for the message.
            facts: what else the file says, as JSON.

        Raises:
            StartError: a sweep that lives has it.
            OSError: the file cannot be written.
        """
        folder.mkdir(exist_ok=True)
        while True:
            number = last_number(folder)
            if number is not None:
                _refuse_if_alive(path_of(folder, number), sweep_dir)
            mine = 0 if number is None else number + 1
            path = path_of(folder, mine)
            own = {"v": VERSION, **identity(), "started": time.time(), "ended": None, **facts}
            try:
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            except FileExistsError:
                continue  # another was faster: it is refused, or has ended already
            try:
                with os.fdopen(fd, "w") as file:
                    file.write(json.dumps(own))
            except OSError:  # a full disk
                path.unlink()
                raise
            if last_number(folder) == mine:
                return cls(path, own)
            path.unlink()  # others came and went meanwhile; the last of them counts

    def beat(self) -> None:
        """Show that this process lives; what cannot be written costs nothing."""
        if time.monotonic() - self._beaten > BEAT_S:
            self._beaten = time.monotonic()
            with suppress(OSError):
                os.utime(self._path)

    @property
    def beats_in_s(self) -> float:
        """Seconds until the next `beat` has something to do."""
        return max(0.0, self._beaten + BEAT_S - time.monotonic())

    def withdraw(self) -> None:
        """Leave the directory as if no sweep had begun there: none has."""
        if self._owner == os.getpid():
            with suppress(OSError):
                self._path.unlink()

    def release(self) -> None:
        """Say that the sweep has ended."""
        if self._owner == os.getpid() and self._facts["ended"] is None:
            self._facts["ended"] = time.time()
            unfinished = self._path.with_suffix(".unfinished")
            with suppress(OSError):
                unfinished.write_text(json.dumps(self._facts))
                unfinished.rename(self._path)


def identity() -> dict[str, Any]:
    """Return what tells this process from all others, on any machine."""
    pid = os.getpid()
    return {"pid": pid, "host": socket.gethostname(), "start": start_time(pid), **_place()}


def _place() -> dict[str, Any]:
    """Return what is one for the processes whose numbers this one can look up."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    space = "/proc/self/ns/pid"
    known = {"boot": boot.read_text().strip()} if boot.exists() else {"boot": platform.node()}
    return {**known, "space": os.readlink(space) if os.path.exists(space) else ""}


def last_number(folder: Path) -> int | None:
    """Return the number of the last sweep's file, or None if there is none."""
    names = (name for name in os.listdir(folder) if name.startswith(_PREFIX))
    numbers = [name.removeprefix(_PREFIX).removesuffix(_SUFFIX) for name in names]
    return max((int(number) for number in numbers if number.isdecimal()), default=None)


def path_of(folder: Path, number: int) -> Path:
    """Return the name of a sweep's file."""
    return folder / f"{_PREFIX}{number}{_SUFFIX}"


def read(folder: Path | None) -> dict[str, Any]:
    """Return what the last sweep's file says; empty if there is none, or half a one."""
    if folder is None or not folder.is_dir():
        return {}
    number = last_number(folder)
    return {} if number is None else _read(path_of(folder, number))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):  # half a file: its writer was killed, or is at it
        return {}
    is_ours = isinstance(found, dict) and found.get("v") == VERSION and "host" in found
    return found if is_ours and type(found.get("pid")) is int else {}


def is_alive(facts: dict[str, Any], path: Path) -> bool:
    """Tell whether the process of a file lives, as far as can be known from here."""
    if facts.get("ended") is not None:
        return False
    if facts and all(facts.get(name) == value for name, value in _place().items()):
        return facts.get("start") is not None and start_time(facts["pid"]) == facts["start"]
    return _silent_s(path) < _SILENT_S


def _silent_s(path: Path) -> float:
    """Return how long ago a file was touched, by the clock of its file system.

    Where nothing can be written that clock is not to be had, and this machine's has to do.
    """
    try:
        touched = path.stat().st_mtime
    except OSError:
        return 0.0  # it cannot be known
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - touched
    except OSError:
        return time.time() - touched


def _refuse_if_alive(path: Path, sweep_dir: str) -> None:
    facts = _read(path)
    is_own = facts.get("pid") == os.getpid() and facts == {**facts, **identity()}
    if is_own or not is_alive(facts, path):
        return
    who = f"process {facts['pid']} on {facts['host']}" if facts else "another process"
    problem = (
        f"hydra.sweep.dir={sweep_dir}: {who} runs a sweep there ({path}): wait for its end, end "
        "it, or choose another directory"
    )
    raise StartError(problem)
