"""The keeper: one single-threaded process per job that forks its agent and its ranks, sees each of
them end, and ends whatever is left of the job.

It holds no store and decides nothing about restarts: the agent does, by messages. It has the last
word on time: every wait for another process ends at a deadline here.
"""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hydra_torchrun_launcher import agent, worker
from hydra_torchrun_launcher.processes import (
    ChildWatch,
    Deadline,
    adopt_orphans,
    children,
    die_with_parent,
    exit_code,
    kill,
    kill_descendants,
    kill_group,
)
from hydra_torchrun_launcher.wire import (
    Channel,
    Closed,
    Fd,
    anonymous_file,
    channel_pair,
    close_all_but,
    read_document,
)

Role = Callable[[], Any]
"""What a forked child does next. It is handed up to the bottom of the stack and called there, so
that a rank's stack holds nothing of ours but the worker."""

_FAILED_RANK_LEAVES_S = 5
"""How long a rank that failed may spend in `atexit` before it is killed."""
_LEFTOVERS_S = 5
"""How long what a failed or stopped job's ranks left behind has after SIGTERM."""
_AGENT_LEAVES_S = 10
"""How long the agent has for its own clean-up, beyond the ranks' time to leave."""


@dataclass
class _Rank:
    pid: int
    local_rank: int
    global_rank: int
    outcome: Fd
    recorded: str | None = None
    ended: bool = False
    signalled: bool = False
    overdue: bool = False
    deadline: Deadline = field(default_factory=Deadline)


class Keeper:
    """Runs one job's processes and reports to the launching process over `job`."""

    def __init__(self, job: Channel, document: Fd, streams: list[Fd]) -> None:
        """Take over the connections of a job.

        Args:
            job: to the launching process; its end-of-file means that the job has to end.
            document: the job's plan, and the ranks' payload, which stays opaque here.
            streams: standard input, output and error of the launching process.
        """
        self._job: Channel | None = job
        self._document = document
        self._streams = streams
        self._plan, self._payload = read_document(document.fileno())
        self._grace_s: float = self._plan["shutdown_timeout_s"]
        self._ranks: list[_Rank] = []
        self._attempt = 0
        self._stopping: int | None = None
        self._answer_stop = False
        self._verdict: dict[str, Any] | None = None
        self._agent_exit: int | None = None
        self._hard = Deadline()
        self._leftovers = Deadline()

    def run(self) -> Role | None:
        """Keep the job until nothing of it is left; returns in forked children only."""
        adopt_orphans()
        self._watch = ChildWatch()
        self._agent_channel, agents_end = channel_pair()
        self._notes, self._notes_end = (Fd(fd) for fd in os.pipe())
        self._agent_pid = self._fork()
        if self._agent_pid == 0:
            return lambda: self._become_agent(agents_end)
        agents_end.close()
        while not self._done():
            role = self._step()
            if role is not None:
                return role
        self._report_done()
        os._exit(0)

    def _fork(self) -> int:
        keeper_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._watch.restore()
            die_with_parent(keeper_pid)
        return pid

    def _become_agent(self, channel: Channel) -> None:
        close_all_but([channel, *self._streams])
        for number, stream in enumerate(self._streams):
            os.dup2(stream.fileno(), number)
        agent.run(self._plan, channel)

    def _step(self) -> Role | None:
        with selectors.DefaultSelector() as selector:
            for source in (self._watch, self._notes, self._agent_channel, self._job):
                if source is not None and source.fileno() >= 0:
                    selector.register(source, selectors.EVENT_READ)
            ready = {key.fileobj for key, _ in selector.select(self._next_deadline_s())}
        role = None
        # What a rank said before it left is read before its end is looked at.
        if self._notes in ready:
            self._read_notes()
        if self._watch in ready:
            self._reap()
        if self._agent_channel in ready and self._agent_exit is None:
            role = self._hear_agent()
        if role is None and self._job in ready:
            self._hear_launching_process()
        if role is None:
            self._keep_deadlines()
        return role

    def _next_deadline_s(self) -> float | None:
        deadlines = [self._hard, self._leftovers, *(r.deadline for r in self._alive())]
        return min((d.remaining_s for d in deadlines if d.remaining_s is not None), default=None)

    def _alive(self) -> list[_Rank]:
        return [rank for rank in self._ranks if not rank.ended]

    # -- the launching process ------------------------------------------------------------------

    def _tell(self, message: dict[str, Any], *fds: int) -> None:
        if self._job is None:
            return
        try:
            self._job.send(message, fds)
        except Closed:
            self._lose_launching_process()

    def _hear_launching_process(self) -> None:
        assert self._job is not None  # noqa: S101 - registered only while it is there
        try:
            message, _ = self._job.receive()
        except Closed:
            self._lose_launching_process()
            return
        if message["op"] == "kill":
            self._hard.set(0)
        else:
            self._stop_job(message["signal"])

    def _lose_launching_process(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None
            self._stop_job(signal.SIGTERM)

    def _stop_job(self, signum: int) -> None:
        self._stopping = signum
        self._hard.set(self._grace_s + _AGENT_LEAVES_S)
        if self._agent_exit is None:
            kill(self._agent_pid, signum)

    def _report_done(self) -> None:
        verdict = self._verdict or {"state": "lost", "exit": self._agent_exit}
        if self._stopping is not None:
            verdict = {"state": "stopped", "signal": self._stopping}
        value = [r.outcome.fileno() for r in self._ranks if r.global_rank == 0]
        succeeded = verdict["state"] == "succeeded"
        self._tell({**verdict, "op": "done"}, *(value if succeeded else ()))

    # -- the agent ------------------------------------------------------------------------------

    def _hear_agent(self) -> Role | None:
        try:
            message, _ = self._agent_channel.receive()
        except Closed:
            self._agent_channel.close()
            return None
        operation = message["op"]
        if operation == "attempt":
            self._begin_attempt(message["number"])
        elif operation == "spawn":
            return self._fork_rank(message)
        elif operation == "running":
            pids = {str(rank.global_rank): rank.pid for rank in self._ranks}
            self._tell({"op": "started", "attempt": self._attempt, "pids": pids})
        elif operation == "stop":
            self._stop_ranks(message["signal"])
            self._answer_stop = True
        elif operation == "verdict":
            self._verdict = message
        return None

    def _hear_last_words(self) -> None:
        """Take the verdict that a dead agent left in the socket; it can ask for nothing more."""
        try:
            while True:
                message, _ = self._agent_channel.receive()
                if message["op"] == "verdict":
                    self._verdict = message
        except Closed:
            self._agent_channel.close()

    def _answer(self, message: dict[str, Any]) -> None:
        if self._agent_channel.fileno() >= 0:
            try:
                self._agent_channel.send(message)
            except Closed:
                self._agent_channel.close()

    def _begin_attempt(self, number: int) -> None:
        for rank in self._ranks:
            rank.outcome.close()
        self._ranks = []
        self._attempt = number

    def _fork_rank(self, order: dict[str, Any]) -> Role | None:
        outcome = anonymous_file("outcome")
        pid = self._fork()
        if pid == 0:
            return lambda: self._become_rank(order, outcome)
        rank = _Rank(pid, order["local_rank"], int(order["env"]["RANK"]), outcome)
        self._ranks.append(rank)
        self._answer({"op": "pid", "pid": pid})
        return None

    def _become_rank(self, order: dict[str, Any], outcome: Fd) -> None:
        start = worker.RankStart(outcome, self._notes_end, bool(order["stderr"]))
        close_all_but([outcome, self._notes_end, self._document, *self._streams])
        os.setsid()  # as torchrun's: a rank leads its own session
        for number, stream in enumerate(self._streams):
            name = (None, order["stdout"], order["stderr"])[number]
            log = (
                Fd(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)) if name else stream
            )
            os.dup2(log.fileno(), number)
        environ = {**self._plan["environ"], **order["env"]}
        os.chdir(self._plan["cwd"])
        if self._plan["start_method"] == "spawn":
            worker.exec_rank(start, self._document, environ, self._plan["program"]["path"])
        close_all_but([outcome, self._notes_end])
        os.environ.clear()
        os.environ.update(environ)
        worker.run(start, self._plan["program"], self._payload)

    # -- the ranks ------------------------------------------------------------------------------

    def _read_notes(self) -> None:
        for note in worker.read_notes(self._notes):
            rank = next((r for r in self._ranks if r.pid == note.pid), None)
            if rank is None or rank.recorded is not None:
                continue
            rank.recorded = note.status
            if note.status == "failed" and not rank.signalled:
                rank.deadline.set(_FAILED_RANK_LEAVES_S)
                self._report_failure(rank, note.exit_code)
        if self._ranks and all(rank.recorded == "completed" for rank in self._ranks):
            for rank in self._alive():
                rank.deadline.set(max(self._grace_s, _FAILED_RANK_LEAVES_S))

    def _report_failure(self, rank: _Rank, code: int) -> None:
        facts = {
            "op": "failed",
            "attempt": self._attempt,
            "local_rank": rank.local_rank,
            "global_rank": rank.global_rank,
            "recorded": rank.recorded,
            "exit": code,
        }
        self._tell(facts, rank.outcome.fileno())
        self._answer({"op": "failed", "local_rank": rank.local_rank, "exit": code})

    def _reap(self) -> None:
        ended = self._watch.reap()
        self._read_notes()  # written before the deaths that were just seen
        died = []
        for pid, status in ended:
            if pid == self._agent_pid:
                self._agent_exit = exit_code(status)
                self._hear_last_words()
            died += [(rank, exit_code(status)) for rank in self._ranks if rank.pid == pid]
        # An abort is often a library's answer to another rank's death: look at it last.
        for rank, code in sorted(died, key=lambda pair: pair[1] == -signal.SIGABRT):
            rank.ended = True
            self._judge_exit(rank, code)
        if died and not self._alive() and all(r.recorded == "completed" for r in self._ranks):
            self._answer({"op": "finished"})

    def _judge_exit(self, rank: _Rank, code: int) -> None:
        if rank.overdue and rank.recorded == "completed":
            self._tell({"op": "lingered", "global_rank": rank.global_rank})
        elif rank.recorded == "completed" and code != 0 and not rank.signalled:
            rank.recorded = "crashed"
            self._report_failure(rank, code)
        elif rank.recorded is None and not rank.signalled:
            self._report_failure(rank, code)

    def _stop_ranks(self, signum: int) -> None:
        self._read_notes()  # what failed before this did not fail by it
        for rank in self._alive():
            if rank.recorded is None:
                rank.signalled = True
                kill_group(rank.pid, signum)
            rank.deadline.set(self._grace_s)

    # -- time -----------------------------------------------------------------------------------

    def _keep_deadlines(self) -> None:
        if self._hard.passed:
            for rank in self._alive():
                rank.signalled = True
            kill_descendants()
            self._hard.clear()
            self._hard.set(1)
        for rank in self._alive():
            if rank.deadline.passed:
                rank.overdue = rank.signalled = True
                kill_group(rank.pid, signal.SIGKILL)
                kill(rank.pid, signal.SIGKILL)
                rank.deadline.clear()
        if self._leftovers.passed:
            kill_descendants(spare=self._agent_alive())
            self._leftovers.clear()
            self._leftovers.set(1)
        if self._answer_stop and not self._alive() and self._nothing_left(ask=True):
            self._answer_stop = False
            self._answer({"op": "stopped"})

    def _agent_alive(self) -> list[int]:
        return [self._agent_pid] if self._agent_exit is None else []

    def _nothing_left(self, *, ask: bool) -> bool:
        """Say whether no child but the agent is left; give those that are a deadline.

        Args:
            ask: send them SIGTERM at once, as nobody waits for what they do.
        """
        left = [pid for pid in children(recursive=False) if pid not in self._agent_alive()]
        if not left:
            self._leftovers.clear()
        elif self._leftovers.remaining_s is None:
            self._leftovers.set(_LEFTOVERS_S if ask else self._grace_s)
            for pid in left if ask else ():
                kill(pid, signal.SIGTERM)
        return not left

    def _done(self) -> bool:
        if self._agent_exit is None:
            return False
        if self._alive():
            if any(rank.deadline.remaining_s is None for rank in self._alive()):
                self._stop_ranks(self._stopping or signal.SIGTERM)
            return False
        succeeded = self._verdict is not None and self._verdict["state"] == "succeeded"
        return self._nothing_left(ask=not succeeded)
