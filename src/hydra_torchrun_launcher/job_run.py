"""One job's processes as the launching process sees them: handed to a server, followed, judged.

Runs in the launching process.
"""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hydra_torchrun_launcher.errors import JobStoppedError, StartError, printable, signal_name
from hydra_torchrun_launcher.outcomes import Failure, describe, load_value
from hydra_torchrun_launcher.processes import Deadline, flush_standard_streams, kill
from hydra_torchrun_launcher.servers import Server
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.wire import Closed, Fd, channel_pair, wait_readable

log = logging.getLogger(__name__)

_KEEPER_ANSWERS_S = 15
"""How long a keeper has to end a stopped job, beyond the ranks' time to leave."""
_KILL_S = 3
"""How long it has after a second signal."""
_SERVER_ANSWERS_S = 15
"""How long a server has to end what a keeper left and to say so."""


@dataclass(frozen=True)
class HandedOver:
    """What the launching process knows of a job that runs.

    Attributes:
        number: its number in the sweep, for the server.
        name: what messages call it.
        max_restarts: how often its ranks may start again.
        shutdown_timeout_s: how long its ranks have to leave once they were asked to.
    """

    number: int
    name: str
    max_restarts: int
    shutdown_timeout_s: float


def _shown(text: str) -> str:
    """Escape what the console cannot show (PYTHONIOENCODING=ascii)."""
    return printable(text, getattr(sys.stdout, "encoding", None))


class JobRun:
    """One job's processes, as the launching process sees them."""

    def __init__(self, job: HandedOver, server: Server, document: Fd, *, owns_server: bool) -> None:
        """Hand the job to its server.

        Args:
            job: what is known of it here.
            server: forks its keeper.
            document: the plan and the ranks' payload.
            owns_server: end the server with the job.
        """
        self._number = number = job.number
        self._name = job.name
        self._max_restarts = job.max_restarts
        self._shutdown_timeout_s = job.shutdown_timeout_s
        self._keeper_pid: int | None = None
        self._limit = Deadline()
        self._server = server
        self._owns_server = owns_server
        self.restarts: list[str] = []
        """What failed in attempts that were followed by another."""
        self._failures: list[Failure] = []
        self._attempt = 0
        self._done: dict[str, Any] | None = None
        self._value: Fd | None = None
        self._ended: dict[str, Any] | None = None
        self._signals_sent = 0
        self._stopped_by: int | None = None
        self._job, keepers_end = channel_pair()
        flush_standard_streams()
        try:
            fds = (keepers_end.fileno(), document.fileno(), 0, 1, 2)
            server.channel.send({"op": "job", "job": number}, fds)
        except Closed as error:
            server.dead = True
            problem = f"the launcher's server (pid {server.pid}) was lost"
            raise StartError(problem) from error
        finally:
            keepers_end.close()
            document.close()

    def watch(self, watch: SignalWatch) -> None:
        """Follow the job until nothing of it is left."""
        handlers: dict[Any, Callable[[], None]] = {
            watch: watch.drain,
            self._job: self._hear_keeper,
            self._server.channel: self._hear_server,
        }
        while self._job.fileno() >= 0 or not (self._ended or self._server.dead):
            self._pass_on(watch)
            ready = wait_readable(handlers, self._wait_s)
            for source in ready:
                handlers[source]()
            if not ready and self._server.start_s_left == 0:
                self._server.give_up()
            if self._limit.passed:
                self._end_by_force()
        if self._owns_server:
            self._server.close()

    @property
    def _wait_s(self) -> float | None:
        limits = (self._server.start_s_left, self._limit.remaining_s)
        return min((limit for limit in limits if limit is not None), default=None)

    def _end_by_force(self) -> None:
        """End a keeper, then a server, that does not answer: stopped, or stuck in the kernel.

        The server ends what a killed keeper leaves; the kernel ends ranks and agent with it.
        """
        self._limit.clear()
        if self._job.fileno() >= 0 and self._keeper_pid is not None:
            log.warning("%s: its keeper does not answer and is killed", self._name)
            kill(self._keeper_pid, signal.SIGKILL)
            self._keeper_pid = None
            self._limit.within(_SERVER_ANSWERS_S)
        else:
            self._server.close()
            self._job.close()

    def _pass_on(self, watch: SignalWatch) -> None:
        """Hand signals on: the first asks the ranks to leave, a second kills them."""
        while self._signals_sent < min(watch.count, 2) and self._job.fileno() >= 0:
            self._signals_sent += 1
            self._stopped_by = watch.received
            if not self._server.ready:  # it imports still: there may be nobody to hear the order
                self._server.close()
                self._done = {"state": "stopped", "signal": watch.received}
                return
            order: dict[str, Any] = {"op": "kill"}
            self._limit.within(_KILL_S)
            if self._signals_sent == 1:
                order = {"op": "stop", "signal": watch.received}
                self._limit.clear()
                self._limit.within(self._shutdown_timeout_s + _KEEPER_ANSWERS_S)
                name = signal_name(watch.received or 0)
                log.warning("%s: stopping on %s; a second signal kills it", self._name, name)
            try:
                self._job.send(order)
            except Closed:
                return

    def _hear_server(self) -> None:
        message = self._server.hear()
        if message is None or message.get("job") != self._number:
            return
        if message["op"] == "kept":
            self._keeper_pid = message["pid"]
        elif message["op"] == "ended":
            self._ended = message
        elif message["op"] == "refused":
            self._done = {"state": "refused", "message": message["message"]}
            self._ended = message

    def _hear_keeper(self) -> None:
        try:
            message, fds = self._job.receive()
        except Closed:
            self._job.close()
            self._limit.within(_SERVER_ANSWERS_S)
            return
        operation = message["op"]
        if operation == "failed":
            self._note_failure(Failure.read(message, fds[0]))
        elif operation == "lingered":
            log.warning(
                "%s: rank %d returned but did not leave in time (a thread or an exit handler "
                "that does not end); it was killed", self._name, message["global_rank"],
            )  # fmt: skip
        elif operation == "done":
            self._done = message
            self._value = fds[0] if fds else None
            if message["state"] == "stuck":
                log.warning("%s: %s", self._name, describe("stuck", message, None))

    def _note_failure(self, failure: Failure) -> None:
        if self._signals_sent:
            return  # how ranks answer a signal is no failure: the job was stopped
        if failure.attempt != self._attempt:
            self._attempt, self._failures = failure.attempt, []
        self._failures.append(failure)
        if len(self._failures) == 1:
            last = self._max_restarts
            if failure.attempt < last:
                self.restarts.append(
                    f"attempt {failure.attempt} failed, its ranks start again (restart "
                    f"{failure.attempt + 1} of {last}): {_shown(failure.report())}"
                )
                log.warning("%s: %s", self._name, self.restarts[-1])
            else:
                log.error("%s failed: %s", self._name, _shown(failure.report()))
        else:
            log.error("%s: also failed: %s", self._name, _shown(failure.line()))

    def close(self) -> None:
        """Hang up: what still runs of the job is ended by its keeper."""
        if self._job.fileno() >= 0:
            # Its keeper ends it in its own time; until then the server has children to wait for.
            self._server.patience_s = self._shutdown_timeout_s + _KEEPER_ANSWERS_S
            self._job.hang_up()

    def result(self) -> tuple[Any, BaseException | None]:
        """Return rank 0's value, or None and why the job failed."""
        done = self._done or {"state": "keeper lost"}
        if self._done is None and self._stopped_by is not None:
            done = {"state": "stopped", "signal": self._stopped_by}
        state = done["state"]
        if state == "succeeded" and self._value is not None:
            return load_value(self._value)
        if state == "stopped" and self._stopped_by is not None:
            return None, JobStoppedError(done["signal"])
        if state in ("refused", "broken"):
            return None, self._log_start_error(done["message"])
        if self._failures:
            return None, self._failures[0].error(self._failures[1:])
        return None, self._log_start_error(describe(state, done, self._ended))

    def _log_start_error(self, message: str) -> StartError:
        log.error("%s failed: %s", self._name, message)
        return StartError(message)
