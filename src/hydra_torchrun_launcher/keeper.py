"""The keeper: one single-threaded process per job that forks its agent and its ranks, sees each of
them end, and ends whatever is left of the job.

It holds no store and decides nothing about restarts: the agent does, by messages. It has the last
word on time: every wait for another process ends at a deadline here.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from hydra_torchrun_launcher import agent
from hydra_torchrun_launcher import ranks as ranks_of
from hydra_torchrun_launcher.errors import refused
from hydra_torchrun_launcher.processes import (
    ChildWatch,
    Deadline,
    Ultimatum,
    adopt_orphans,
    children,
    die_with_parent,
    exit_code,
    kill,
    kill_descendants,
)
from hydra_torchrun_launcher.ranks import Rank, RankPlan, Ranks
from hydra_torchrun_launcher.wire import (
    Channel,
    Closed,
    Fd,
    Readable,
    anonymous_file,
    channel_pair,
    close_all_but,
    fork,
    read_document,
    wait_readable,
)

Role = Callable[[], Any]
"""What a forked child does next. It is handed up to the bottom of the stack and called there, so
that a rank's stack holds nothing of ours but the worker."""

_LEFTOVERS_S = 5
"""How long what a failed or stopped job's ranks left behind has after SIGTERM."""
_AGENT_ACTS_S = 30
"""How long the agent has to begin, and to answer when its ranks have failed or finished."""
_STACKS_S = 2
"""How long ranks whose time is up have to write their stacks."""
_LOOK_S = 0.05
"""How often it is looked at how far they are: nothing tells."""
_AGENT_LEAVES_S = 10
"""How long the agent has for its own clean-up, beyond the ranks' time to leave."""


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
        self._streams = streams
        self._plan, payload = read_document(document.fileno())
        self._notes, notes_end = (Fd(fd) for fd in os.pipe())
        self._given = RankPlan(self._plan, payload, document, streams, notes_end)
        self._grace_s: float = self._plan["shutdown_timeout_s"]
        count = self._plan["agent"]["nproc_per_node"]
        self._is_on_several_nodes = self._plan["agent"]["node"] is not None
        self._has_finished = False
        """Whether it is decided, on several nodes by the leader, that the job has completed."""
        self._ranks = Ranks(count, self._grace_s, self._tell, self._answer)
        self._stopping: int | None = None
        self._answer_stop = False
        self._verdict: dict[str, Any] | None = None
        self._refusal: OSError | None = None
        self._agent_exit: int | None = None
        self._agent_is_silent = False
        self._agent_acts = Deadline()
        self._stacks = Deadline()
        self._look_at_stacks = Deadline()
        self._stack_sizes: list[int] = []
        self._everything = Ultimatum()
        self._leftovers = Ultimatum()
        self._leftovers_are_asked = False

    def run(self) -> Role | None:
        """Keep the job until nothing of it is left; returns in forked children only."""
        adopt_orphans()
        if self._plan["cores"]:  # a rank's are its keeper's, whatever kind of process it is
            with suppress(OSError):  # one has gone offline meanwhile
                os.sched_setaffinity(0, self._plan["cores"])
        self._watch = ChildWatch()
        # One descriptor a rank is more than some limits allow; ranks get theirs back.
        self._file_limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (self._file_limits[1], self._file_limits[1]))
        self._agent_channel, agents_end = channel_pair()
        self._agent_acts.within(_AGENT_ACTS_S)
        try:
            self._agent_pid = self._fork()
        except OSError as error:
            self._refusal, self._agent_pid, self._agent_exit = error, -1, -1
        if self._agent_pid == 0:
            return lambda: self._become_agent(agents_end)
        agents_end.close()
        while not self._done():
            role = self._step()
            if role is not None:
                return role
        self._ranks.tell_failures(at_once=True)
        self._report_done()
        os._exit(0)

    def _fork(self) -> int:
        keeper_pid = os.getpid()
        pid = fork()
        if pid == 0:
            self._watch.restore()
            resource.setrlimit(resource.RLIMIT_NOFILE, self._file_limits)
            die_with_parent(keeper_pid)
        return pid

    def _become_agent(self, channel: Channel) -> None:
        close_all_but([channel, *self._streams])
        for number, stream in enumerate(self._streams):
            os.dup2(stream.fileno(), number)
        agent.run(self._plan, channel)

    def _step(self) -> Role | None:
        sources: list[Readable | None] = [self._watch, self._notes, self._agent_channel, self._job]
        ready = wait_readable(filter(None, sources), self._next_deadline_s())
        role = None
        # What a rank said before it left is read before its end is looked at.
        if self._notes in ready:
            self._ranks.read_notes(self._notes)
        if self._watch in ready:
            self._reap()
        if self._agent_channel in ready and self._agent_exit is None:
            role = self._hear_agent()
        if role is None and self._job in ready:
            self._hear_launching_process()
        if role is None:
            self._ranks.tell_failures()
            self._keep_deadlines()
        return role

    def _ultimatums(self) -> Iterator[Ultimatum]:
        yield from (self._everything, self._leftovers)
        yield from (rank.leave for rank in self._ranks.alive())

    def _next_deadline_s(self) -> float | None:
        left = [each.remaining_s for each in self._ultimatums()]
        left += [self._ranks.settles_s, self._agent_acts.remaining_s]
        left.append(self._look_at_stacks.remaining_s)
        return min((seconds for seconds in left if seconds is not None), default=None)

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
            self._everything.within(0)
        elif message["op"] in ("round", "refuse", "regroup"):
            self._answer(message)
        elif message["op"] == "finish":
            self._finish()
        elif message["op"] == "time is up":
            self._ranks.ask_for_stacks()
            self._stacks.within(_STACKS_S)
            self._look_at_stacks.within(_LOOK_S)
        else:
            self._stop_job(message["signal"])

    def _lose_launching_process(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None
            self._stop_job(signal.SIGTERM)

    def _stop_job(self, signum: int) -> None:
        self._stopping = signum
        self._everything.within(self._grace_s + _AGENT_LEAVES_S)
        if self._agent_exit is None:
            kill(self._agent_pid, signum)

    def _report_done(self) -> None:
        silent_s = _AGENT_ACTS_S if self._agent_is_silent else None
        verdict = self._verdict or {"state": "lost", "exit": self._agent_exit, "silent_s": silent_s}
        if self._stopping is not None:  # a late stop takes no result away
            verdict = {"state": "stopped", "signal": self._stopping}
        if self._has_finished and (self._is_on_several_nodes or self._stopping is not None):
            verdict = {"state": "succeeded"}
        if self._refusal is not None:
            verdict = {"state": "refused", "message": refused(self._refusal)}
        if self._is_in_vain():
            kill_descendants()
            stuck = sorted(set(children(recursive=False)) - {self._agent_pid}) or [self._agent_pid]
            verdict = {"state": "stuck", "pids": stuck}
        succeeded = verdict["state"] == "succeeded"
        self._tell({**verdict, "op": "done"}, *(self._ranks.value() if succeeded else ()))

    # -- the agent ------------------------------------------------------------------------------

    def _hear_agent(self) -> Role | None:
        try:
            message, _ = self._agent_channel.receive()
        except Closed:
            self._agent_channel.close()
            return None
        self._agent_acts.clear()
        operation = message["op"]
        if operation == "join":  # the leader knows how long to wait
            self._tell(message)
        elif operation == "attempt":
            self._ranks.begin_attempt(message["number"])
        elif operation == "spawn":
            return self._fork_rank(message)
        elif operation == "stop":
            self._stop_ranks(message["signal"])
            self._answer_stop = True
        elif operation in ("verdict", "busy"):
            self._verdict = message if operation == "verdict" else None
            self._agent_acts.within(_AGENT_ACTS_S)
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
            if message["op"] != "pid":  # to all else it has something to say
                self._agent_acts.within(_AGENT_ACTS_S)
            try:
                self._agent_channel.send(message)
            except Closed:
                self._agent_channel.close()

    def _fork_rank(self, order: dict[str, Any]) -> Role | None:
        try:
            outcome, stacks = anonymous_file("outcome"), anonymous_file("stacks")
            pid = self._fork()
        except OSError as error:
            self._refusal = error
            for fd in (self._given.document, *self._streams):
                fd.close()  # no rank will be forked again, and to end the others takes descriptors
            self._stop_job(signal.SIGTERM)
            return None
        if pid == 0:
            return lambda: ranks_of.become(self._given, order, outcome, stacks)
        error_file = order["env"].get("TORCHELASTIC_ERROR_FILE")
        folder = os.path.dirname(error_file) if error_file else None
        number = int(order["env"]["RANK"])
        self._ranks.add(Rank(pid, order["local_rank"], number, outcome, stacks, folder))
        self._answer({"op": "pid", "pid": pid})
        self._ranks.tell_if_all_are_there()
        return None

    def _reap(self) -> None:
        ended = {pid: exit_code(status) for pid, status in self._watch.reap()}
        self._ranks.read_notes(self._notes)  # written before the deaths that were just seen
        if self._agent_pid in ended:
            self._agent_exit = ended[self._agent_pid]
            self._agent_acts.clear()
            self._hear_last_words()
        if self._ranks.judge(ended):
            if self._is_on_several_nodes:
                self._tell({"op": "finished", "attempt": self._ranks.attempt})
            else:
                self._finish()

    def _finish(self) -> None:
        """Tell the agent that the job has completed."""
        self._has_finished = True
        self._answer({"op": "finished"})

    def _stop_ranks(self, signum: int) -> None:
        self._ranks.read_notes(self._notes)  # what failed before this did not fail by it
        self._ranks.stop(signum)

    # -- time -----------------------------------------------------------------------------------

    def _await_stacks(self) -> None:
        """Stop the job once its ranks have written their stacks, or have had the time for it."""
        self._look_at_stacks.clear()
        sizes, self._stack_sizes = self._stack_sizes, self._ranks.stack_sizes()
        if not self._stacks.passed and (0 in self._stack_sizes or sizes != self._stack_sizes):
            self._look_at_stacks.within(_LOOK_S)
            return
        self._ranks.tell_stacks()
        self._stop_job(signal.SIGTERM)

    def _keep_deadlines(self) -> None:
        if self._look_at_stacks.passed:
            self._await_stacks()
        if self._everything.strikes():
            self._ranks.expect_to_be_killed()
            kill_descendants(janitors=self._everything.is_repeated)
        self._ranks.kill_overdue()
        if self._leftovers.strikes():
            kill_descendants(spare=self._agent_alive(), janitors=self._leftovers.is_repeated)
        if self._agent_acts.passed:
            self._agent_acts.clear()
            self._agent_is_silent = True
            kill(self._agent_pid, signal.SIGKILL)
        if self._answer_stop and not self._ranks.alive() and self._nothing_left(ask=True):
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
            self._leftovers_are_asked = False
            return True
        self._leftovers.within(_LEFTOVERS_S if ask else self._grace_s)
        if ask and not self._leftovers_are_asked:
            self._leftovers_are_asked = True
            for pid in left:
                kill(pid, signal.SIGTERM)
        return False

    def _is_in_vain(self) -> bool:
        return any(each.is_in_vain for each in self._ultimatums())

    def _done(self) -> bool:
        if self._is_in_vain():
            return True
        if self._agent_exit is None:
            return False
        if self._ranks.alive():
            if not self._ranks.all_are_asked():
                self._stop_ranks(self._stopping or signal.SIGTERM)
            return False
        succeeded = self._verdict is not None and self._verdict["state"] == "succeeded"
        return self._nothing_left(ask=not succeeded or self._stopping is not None)
