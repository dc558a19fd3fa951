"""The launching process's side of the servers: starts them, picks one for a job, ends them."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn

import psutil

from hydra_torchrun_launcher import processes
from hydra_torchrun_launcher.errors import JobStoppedError, StartError
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.wire import (
    Channel,
    Closed,
    Readable,
    channel_from,
    channel_pair,
    close_all_but,
    fork,
    wait_readable,
)

_LOAD_TIME = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "GOTO_", "LD_", "PYTHON", "TORCH_",
)  # fmt: skip
"""Prefixes of variables that are read while libraries load: they select a server."""
_START_S = 600
"""Bound on a server's start. It imports torch, which takes minutes on a cold network disk."""
_END_S = 10
_MAX_SERVERS = 2


def boot(fd: int, parent_pid: int, preload: list[str], bound: bool, debug: bool) -> NoReturn:  # noqa: FBT001
    """Be a server that is an interpreter of its own.

    Args:
        fd: the inherited end of the channel to the launching process.
        parent_pid: the launching process.
        preload: modules to import besides torch.
        bound: end when the thread that started this process ends. Until the imports are done
            nobody reads the channel, whose end-of-file says the same later.
        debug: a rank is to have the terminal, and its Ctrl-C.
    """
    if debug:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if bound:
        processes.die_with_parent(parent_pid)
    _serve(channel_from(fd), preload)


def _serve(channel: Channel, preload: list[str]) -> NoReturn:
    name = "hydra_torchrun_launcher.server"
    try:
        server = importlib.import_module(name)
        for name in (
            "hydra_torchrun_launcher.payload",
            "hydra_torchrun_launcher.rank_logging",
            *preload,
        ):
            importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001 - reported where the user looks
        source = "hydra.launcher.preload: " if name in preload else ""
        problem = f"{source}importing {name} raised {type(error).__name__}: {error}"
        channel.send({"op": "broken", "message": problem})
        os._exit(1)
    # What is alive now stays: a collection in a forked process would copy every page of it.
    gc.collect()
    gc.freeze()
    server.serve(channel)
    os._exit(1)  # never reached: the checker does not know what was imported


class Server:
    """One server and what is known of it."""

    def __init__(self, channel: Channel, pid: int, popen: subprocess.Popen[bytes] | None) -> None:
        """Know a started server by its channel and pid."""
        self.channel = channel
        self.pid = pid
        self.dead = False
        self.ready = False
        self.patience_s: float = _END_S
        self.listeners: dict[int, Callable[[dict[str, Any]], None]] = {}
        """Who takes in what the server says of a job, by the job's key."""
        self._popen = popen
        self._start = processes.Deadline()
        self._start.within(_START_S)
        self._owner = os.getpid()

    @classmethod
    def start(cls, environ: Mapping[str, str], preload: tuple[str, ...], *, debug: bool) -> Server:
        """Start an interpreter that imports torch; returns at once.

        Args:
            environ: its environment.
            preload: modules to import besides torch.
            debug: a rank is to have the terminal: it must be of the terminal's session.
        """
        ours, theirs = channel_pair()
        in_main_thread = threading.current_thread() is threading.main_thread()
        command = processes.python_command(
            processes.path_entries(),
            __name__,
            "boot",
            theirs.fileno(),
            os.getpid(),
            list(preload),
            in_main_thread,
            debug,
        )
        popen = subprocess.Popen(  # noqa: S603 - our own interpreter
            command,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=not debug,  # a Ctrl-C is the launching process's to answer
        )
        theirs.close()
        return cls(ours, popen.pid, popen)

    @classmethod
    def fork(cls, in_child: Callable[[], None], *, debug: bool) -> Server:
        """Fork a server from this process, whose memory the ranks will see.

        Args:
            in_child: called there first.
            debug: as for `start`.
        """
        ours, theirs = channel_pair()
        parent = os.getpid()
        pid = fork()
        if pid == 0:
            try:
                in_child()
                close_all_but([theirs])
                if debug:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                else:
                    os.setsid()
                processes.die_with_parent(parent)
                _serve(theirs, [])
            finally:
                os._exit(1)
        theirs.close()
        return cls(ours, pid, None)

    def hear(self) -> dict[str, Any] | None:
        """Take in the server's next message and return it, or None when it is dead.

        Raises:
            StartError: it could not import what it needs.
        """
        try:
            message, _ = self.channel.receive()
        except Closed:
            self.dead = True
            self.channel.close()
            return None
        if message["op"] == "ready":
            self.ready = True
            self._start.clear()
        if message["op"] == "broken":
            self.close()
            problem = f"The launcher's server cannot start: {message['message']}"
            raise StartError(problem)
        if message.get("job") in self.listeners:
            self.listeners[message["job"]](message)
        return message

    def is_ready(self) -> bool:
        """Tell whether it has started, by all it has said so far."""
        with suppress(StartError):  # it cannot: it is dead now
            while not self.ready and not self.dead and wait_readable([self.channel], 0):
                self.hear()
        return self.ready

    @property
    def start_s_left(self) -> float | None:
        """Seconds that the server's start may still take; None once it has started."""
        return self._start.remaining_s

    def give_up(self) -> NoReturn:
        """End a server that did not start in time.

        Raises:
            StartError: always.
        """
        self.close()
        problem = (
            f"The launcher's server (pid {self.pid}) has not imported torch within {_START_S} s"
        )
        raise StartError(problem)

    def ask(self, operation: str, watch: SignalWatch) -> dict[str, Any]:
        """Send a question and wait for the answer, whatever the server says of jobs meanwhile.

        Raises:
            StartError: there is no answer.
            JobStoppedError: a signal came first.
        """
        deadline = processes.Deadline()
        deadline.within(_START_S)
        with suppress(Closed):  # it is dead: said below
            self.channel.send({"op": operation})
        while not self.dead and not deadline.passed:
            sources: list[Readable] = [watch, self.channel]
            ready = wait_readable(sources, deadline.remaining_s)
            if watch in ready:
                watch.drain()
            if watch.received is not None:
                self.close()
                raise JobStoppedError(watch.received)
            message = self.hear() if self.channel in ready else None
            if message is None or message["op"] == "ready" or "job" in message:
                continue
            if message["op"] == "refused":
                raise StartError(message["message"])
            return message
        problem = f"The launcher's server (pid {self.pid}) did not answer"
        raise StartError(problem)

    def close(self) -> None:
        """Let the server leave, and wait until it has; kill it if it does not.

        One that has keepers at work leaves after them: `patience_s` says how long that may take.
        """
        if self._owner != os.getpid():
            return
        is_ready = self.is_ready()
        self.dead = True
        self.channel.hang_up()
        if not is_ready:
            processes.kill(self.pid, signal.SIGKILL)  # it is importing and has started nothing
        left = False
        try:
            left = _wait(self.pid, self._popen, self.patience_s)
        finally:  # an impatient Ctrl-C interrupts the wait, and ends the server all the same
            if not left:
                processes.kill(self.pid, signal.SIGKILL)
                _wait(self.pid, self._popen, _END_S)


def _wait(pid: int, popen: subprocess.Popen[bytes] | None, timeout_s: float) -> bool:
    try:
        _ = psutil.Process(pid).wait(timeout_s) if popen is None else popen.wait(timeout_s)
    except psutil.NoSuchProcess:
        return True
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        return False
    return True


class Pool:
    """The servers of a sweep, one for each set of load-time variables; two at most are kept."""

    def __init__(self, *, debug: bool) -> None:
        """Start none.

        Args:
            debug: as for `Server.start`.
        """
        self._debug = debug
        self._servers: dict[tuple[Any, ...], Server] = {}

    def get(
        self,
        environ: Mapping[str, str],
        preload: tuple[str, ...],
        preload_env: tuple[str, ...],
    ) -> Server:
        """Return a living server for jobs with this environment, starting one if need be.

        Args:
            environ: the job's environment.
            preload: modules to import besides torch.
            preload_env: variables that they read while they load.
        """
        read = {k for k in environ if k.startswith(_LOAD_TIME) or k in preload_env}
        key = (preload, *sorted((name, environ[name]) for name in read))
        server = self._servers.pop(key, None)
        if server is None or server.dead or server.channel.is_hung_up():
            if server is not None:
                server.close()
            self._end_idle(_MAX_SERVERS - 1)
            server = Server.start(environ, preload, debug=self._debug)
        self._servers[key] = server  # the last used is the last to go
        return server

    def _end_idle(self, keep: int) -> None:
        """End the servers that were used longest ago and have no job, down to a number."""
        idle = [key for key, server in self._servers.items() if not server.listeners]
        for key in idle[: max(0, len(self._servers) - keep)]:
            self._servers.pop(key).close()

    def close(self) -> None:
        """End every server."""
        while self._servers:
            self._servers.popitem()[1].close()
