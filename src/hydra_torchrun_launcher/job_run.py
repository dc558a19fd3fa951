"""One job's processes as the launching process sees them: handed to a server, followed, judged.

Runs in the launching process.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hydra_torchrun_launcher import stacks
from hydra_torchrun_launcher.errors import (
    FailFastError,
    JobStoppedError,
    JobTimeoutError,
    StartError,
    printable,
    signal_name,
)
from hydra_torchrun_launcher.outcomes import Failure, describe, load_value
from hydra_torchrun_launcher.processes import (
    Deadline,
    flush_standard_streams,
    kill,
    start_time,
)
from hydra_torchrun_launcher.servers import Server
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.team import Team
from hydra_torchrun_launcher.wire import Closed, Fd, channel_pair

log = logging.getLogger(__name__)

_KEEPER_ANSWERS_S = 15
"""How long a keeper has to end a stopped job, beyond the ranks' time to leave."""
_KILL_S = 3
"""How long it has after a second signal."""
_STACKS_S = 5
"""How long it has beyond that to have ranks write their stacks."""
_LONGEST_STACKS = 1 << 20
_SERVER_ANSWERS_S = 15
"""How long a server has to end what a keeper left and to say so."""


Note = Callable[..., None]
"""Takes an event's name, and its facts by name."""


@dataclass(frozen=True)
class HandedOver:
    """What the launching process knows of a job that runs.

    Attributes:
        key: tells it from the server's other jobs.
        name: what messages call it.
        max_restarts: how often its ranks may start again.
        shutdown_timeout_s: how long its ranks have to leave once they were asked to.
        timeout_s: how long the job may take, or None.
        note: takes in what happens to the job, an event and its facts.
    """

    key: int
    name: str
    max_restarts: int
    shutdown_timeout_s: float
    timeout_s: float | None
    note: Note


def _shown(text: str) -> str:
    """Escape what the console cannot show (PYTHONIOENCODING=ascii)."""
    return printable(text, getattr(sys.stdout, "encoding", None))


class JobRun:
    """One job's processes, as the launching process sees them."""

    def __init__(
        self, job: HandedOver, server: Server, document: Fd, team: Team, *, owns_server: bool
    ) -> None:
        """Hand the job to its server.

        Args:
            job: what is known of it here.
            server: forks its keeper.
            document: the plan and the ranks' payload.
            team: the parts of the job on other nodes.
            owns_server: end the server with the job.
        """
        self._key = job.key
        self._name = job.name
        self._max_restarts = job.max_restarts
        self._shutdown_timeout_s = job.shutdown_timeout_s
        self._timeout_s = job.timeout_s
        self._time = Deadline()
        self._note = job.note
        self._stood: dict[int, str] = {}
        self._keeper_pid: int | None = None
        self._limit = Deadline()
        self._server = server
        self._owns_server = owns_server
        self._team = team
        self._team_knows_the_end = False
        self._has_completed = False
        self._failed_first = False
        self.restarts: list[str] = []
        """What failed in attempts that were followed by another."""
        self._failures: list[Failure] = []
        self._regrouping = ""
        self._attempt = 0
        self._done: dict[str, Any] | None = None
        self._value: Fd | None = None
        self._ended: dict[str, Any] | None = None
        self._signals_sent = 0
        self._cannot_go_on: Exception | None = None
        self._ended_for: Exception | None = None
        self._stopped_by: int | None = None
        self._job, keepers_end = channel_pair()
        flush_standard_streams()
        try:
            fds = (keepers_end.fileno(), document.fileno(), 0, 1, 2)
            server.listeners[job.key] = self._hear_server
            server.channel.send({"op": "job", "job": job.key}, fds)
        except Closed as error:
            server.dead = True
            problem = f"the launcher's server (pid {server.pid}) was lost"
            raise StartError(problem) from error
        finally:
            keepers_end.close()
            document.close()
        team.join(self)

    @property
    def server(self) -> Server:
        """The server that forks its keeper."""
        return self._server

    @property
    def is_over(self) -> bool:
        """Whether nothing of the job is left, or nothing more can be heard of it."""
        return self._own_part_is_over and self._team.is_over

    @property
    def _own_part_is_over(self) -> bool:
        heard_all = self._job.fileno() < 0 and (self._ended is not None or self._server.dead)
        return heard_all or (self._cannot_go_on is not None and self._server.dead)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when its keeper speaks, or -1."""
        return self._job.fileno()

    @property
    def wait_s(self) -> float | None:
        """Seconds until `keep_time` has something to do; None: never."""
        limits = [self._server.start_s_left, self._limit.remaining_s, self._time.remaining_s]
        limits.append(self._team.wait_s)
        return min((limit for limit in limits if limit is not None), default=None)

    def keep_time(self) -> None:
        """Act on limits that have passed.

        Raises:
            StartError: the server has not started in time.
        """
        if self._server.start_s_left == 0:
            self._server.give_up()
        if self._time.passed:
            self._time.clear()
            self._end_in_time()
        if self._limit.passed:
            self._end_by_force()
        if self._own_part_is_over and not self._team_knows_the_end:
            self._team_knows_the_end = True
            well = self._done is not None and self._done["state"] == "succeeded"
            self._team.own_has_ended(well=well)
        self._team.keep_time()

    def give_up(self, error: Exception) -> None:
        """End the job, of which not all can be known any more: its result is this error."""
        if self._cannot_go_on is None:
            self._cannot_go_on = error
            self._ask_to_leave(signal.SIGTERM)

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

    def pass_on(self, watch: SignalWatch) -> None:
        """Hand signals on: the first asks the ranks to leave, a second kills them."""
        while self._signals_sent < min(watch.count, 2) and self._job.fileno() >= 0:
            self._failed_first = self._failed_first or self._is_failing
            self._signals_sent += 1
            self._stopped_by = watch.received
            if not self._server.is_ready():
                self._give_server_up(watch.received or 0)
            elif self._signals_sent == 1:
                name = signal_name(watch.received or 0)
                log.warning("%s: stopping on %s; a second signal kills it", self._name, name)
                self._team.leaves(f"it was stopped by {name}")
                self._ask_to_leave(watch.received or 0)
            else:
                self._limit.within(_KILL_S)
                self._order({"op": "kill"})

    def stop(self, error: Exception) -> None:
        """End the job: its ranks are asked to leave, and its result is this error."""
        if not self._is_decided:
            self._ended_for = error
            log.warning("%s: %s", self._name, error)
            if self._server.is_ready():
                self._ask_to_leave(signal.SIGTERM)
            else:
                self._give_server_up(signal.SIGTERM)

    def end(self, error: Exception) -> None:
        """End the job with others, whatever it is at; its result is this error if it has none."""
        if self._is_decided:
            self._ask_to_leave(signal.SIGTERM)
        else:
            self.stop(error)

    def _end_in_time(self) -> None:
        """End a job whose time is up, once its ranks have said where they stand."""
        self._limit.within(_STACKS_S + self._shutdown_timeout_s + _KEEPER_ANSWERS_S)
        if not self._is_decided:
            self._ended_for = JobTimeoutError(self._timeout_s or 0, ())
            log.warning("%s: its time is up (hydra.launcher.timeout_s)", self._name)
            self._order({"op": "time is up"})

    @property
    def _is_decided(self) -> bool:
        """Whether it is known why the job ends, or has ended: what comes later is not the cause."""
        is_ending = self._ended_for is not None or self._signals_sent > 0
        has_ended = self._has_completed or self._done is not None or self.is_over
        return self._is_failing or is_ending or has_ended

    @property
    def _is_failing(self) -> bool:
        return bool(self._failures) and self._attempt >= self._team.last_attempt

    def _give_server_up(self, signum: int) -> None:
        """End a server that imports still: there may be nobody to hear an order."""
        self._server.close()
        self._done = {"state": "stopped", "signal": signum}
        self._team.pass_on({"op": "stop", "signal": signum})

    def _ask_to_leave(self, signum: int) -> None:
        self._limit.clear()
        self._limit.within(self._shutdown_timeout_s + _KEEPER_ANSWERS_S)
        self._order({"op": "stop", "signal": signum})

    def _order(self, order: dict[str, Any]) -> None:
        self.order(order)
        self._team.pass_on(order)

    def order(self, order: dict[str, Any]) -> None:
        """Have the keeper do something."""
        with suppress(Closed):  # it is over
            self._job.send(order)

    def _hear_server(self, message: dict[str, Any]) -> None:
        if message["op"] == "kept":
            self._keeper_pid = message["pid"]
            if self._timeout_s is not None:
                self._time.within(self._timeout_s)
        elif message["op"] == "ended":
            self._ended = message
        elif message["op"] == "refused":
            self._done = {"state": "refused", "message": message["message"]}
            self._ended = message

    def hear_keeper(self) -> None:
        """Take in the keeper's next message."""
        try:
            message, fds = self._job.receive()
        except Closed:
            self._job.close()
            self._limit.within(_SERVER_ANSWERS_S)
            return
        operation = message["op"]
        if operation == "failed":
            failure = Failure.read(message, fds[0])
            self.note_failure(failure)
            self._team.failed(failure)
        elif operation == "stacks":
            dump = os.pread(fds[0].fileno(), _LONGEST_STACKS, 0).decode(errors="replace")
            stood = stacks.where(dump) if dump else f"unknown: its process is {message['status']}"
            self.note_stand(message["global_rank"], stood)
            self._team.stands(message["global_rank"], stood)
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
        else:
            self._team.hear(message)

    def note_stand(self, rank: int, stood: str) -> None:
        """Note where a rank stood when the time was up."""
        self._stood[rank] = stood

    def note_completion(self) -> None:
        """Note that all ranks have completed: what they leave behind, or show, is no work."""
        self._has_completed = True
        self._time.clear()

    def note_regrouping(self, why: str) -> None:
        """Note that its ranks start again as nodes come or go."""
        self._regrouping = why
        self.restarts.append(why)
        log.warning("%s: %s", self._name, why)

    def note_start(self, message: dict[str, Any]) -> None:
        """Note that the ranks of an attempt are there."""
        attempt, names = message["attempt"], ("pids", "folders", "hosts", "nodes")
        processes: dict[str, Any] = {
            **{name: message[name] for name in names if name in message},
            "keeper": self._keeper_pid,
            "keeper_start": start_time(self._keeper_pid or 0),
        }
        if attempt == 0:
            self._note("started", attempt=0, **processes)
        else:
            cause = self._failures[0].facts() if self._failures else None
            why, self._regrouping = self._regrouping, ""
            self._note("restarted", attempt=attempt, cause=cause, why=why, **processes)
        if self._attempt < attempt:
            self._attempt, self._failures = attempt, []

    @property
    def place(self) -> dict[str, Any]:
        """Which rank failed first, as facts for an event."""
        return self._failures[0].facts() if self._failures else {}

    @property
    def cause(self) -> str:
        """Which rank failed first, and how, in a line; empty where none did."""
        return self._failures[0].line() if self._failures else ""

    def note_failure(self, failure: Failure) -> None:
        """Note that a rank has failed, here or on another node, and say so."""
        if self._signals_sent or self._ended_for is not None:
            return  # how ranks answer a signal is no failure: the job was stopped
        if self._team.expects_failures:
            return  # nor is how they bear that others leave
        if failure.attempt != self._attempt:
            self._attempt, self._failures = failure.attempt, []
        self._failures.append(failure)
        if len(self._failures) == 1:
            left, most = self._team.last_attempt - failure.attempt, self._max_restarts
            if left > 0:
                self.restarts.append(
                    f"attempt {failure.attempt} failed, its ranks start again (restart "
                    f"{most - left + 1} of {most}): {_shown(failure.report())}"
                )
                log.warning("%s: %s", self._name, self.restarts[-1])
            else:
                log.error("%s failed: %s", self._name, _shown(failure.report()))
        else:
            log.error("%s: also failed: %s", self._name, _shown(failure.line()))

    def hang_up(self) -> None:
        """Leave the job to its keeper, which ends what still runs of it, in its own time."""
        self._server.listeners.pop(self._key, None)
        if self._job.fileno() >= 0:
            # Until then the server has children to wait for.
            self._server.patience_s = self._shutdown_timeout_s + _KEEPER_ANSWERS_S
            self._job.hang_up()

    def close(self) -> None:
        """Hang up, and end the server with the job if it is the job's own."""
        self.hang_up()
        if self._owns_server:
            self._server.close()

    def result(self) -> tuple[Any, BaseException | None]:
        """Return rank 0's value, or None and why the job failed.

        Raises:
            Exception: what `give_up` was given.
        """
        return self._team.result(*self._own_result())

    def _own_result(self) -> tuple[Any, BaseException | None]:
        if self._cannot_go_on is not None:
            raise self._cannot_go_on
        done = self._done or {"state": "keeper lost"}
        if self._done is None and self._stopped_by is not None:
            done = {"state": "stopped", "signal": self._stopped_by}
        state = done["state"]
        if state == "succeeded":
            value, error = (None, None) if self._value is None else load_value(self._value)
            return value, error and self._said(error)  # without a value, rank 0 is on another node
        return None, self._error(state, done)

    def _error(self, state: str, done: dict[str, Any]) -> BaseException:
        """Return why the job failed, and say it if it has not been said."""
        if self._ended_for is not None:
            return self._said(self._ended_for)
        if state == "stopped" and self._stopped_by is not None and not self._failed_first:
            return JobStoppedError(done["signal"])
        if state in ("refused", "broken"):
            return self._said(StartError(done["message"]))
        if self._failures:
            return self._failures[0].error(self._failures[1:])
        return self._said(StartError(describe(state, done, self._ended)))

    def _said(self, error: Exception) -> Exception:
        if isinstance(error, JobTimeoutError):
            stood = [f"rank {rank}: {place}" for rank, place in sorted(self._stood.items())]
            error = JobTimeoutError(error.timeout_s, stood)
        if not isinstance(error, FailFastError):
            log.error("%s failed: %s", self._name, error)
        return error
