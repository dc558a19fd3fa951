"""The ranks of a job's attempt as their keeper sees them: forked, heard, judged, ended (runs in the
keeper).
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hydra_torchrun_launcher import recording, stacks, worker
from hydra_torchrun_launcher.errors import StartError
from hydra_torchrun_launcher.job_files import STDERR
from hydra_torchrun_launcher.processes import (
    Deadline,
    Ultimatum,
    kill,
    kill_group,
    kill_tree,
    status_of,
)
from hydra_torchrun_launcher.wire import Fd, close_all_but

_FAILED_RANK_LEAVES_S = 5
"""How long a rank that failed may spend in `atexit` before it is killed."""
_COMPLETED_RANK_LEAVES_S = 5
"""The least that ranks which completed get for the same, however short their time limit is."""
_LONGEST_STACKS = 1 << 20
_STACKS_TITLE = b"\nStacks of all threads when hydra.launcher.timeout_s had passed:\n"
_SETTLE_S = 0.1
"""How long the first failure of an attempt waits for its cause."""


@dataclass
class Rank:
    """One rank's process.

    Attributes:
        outcome: the file of its outcome.
        stacks: the file of its stacks, which it writes on a signal.
        folder: where its files are, or None.
        recorded: what its outcome says: None yet, "completed", "failed", or "crashed" where it
            completed and did not leave well.
        signalled: whether it was told to leave, so that how it leaves is no failure.
        overdue: whether it was killed because it did not leave in time.
    """

    pid: int
    local_rank: int
    global_rank: int
    outcome: Fd
    stacks: Fd
    folder: str | None = None
    recorded: str | None = None
    ended: bool = False
    signalled: bool = False
    overdue: bool = False
    leave: Ultimatum = field(default_factory=Ultimatum)


@dataclass(frozen=True)
class RankPlan:
    """What every rank of a job is given.

    Attributes:
        plan: the job's plan.
        payload: the ranks' work, opaque here.
        document: both, for a rank that is an interpreter of its own.
        streams: standard input, output and error of the launching process.
        notes: where ranks say that their outcome is recorded.
    """

    plan: dict[str, Any]
    payload: bytes
    document: Fd
    streams: list[Fd]
    notes: Fd


def become(given: RankPlan, order: dict[str, Any], outcome: Fd, stack: Fd) -> None:
    """Be the rank that the agent ordered, in a process forked for it; never returns."""
    stacks.ignore()
    debug_rank = given.plan["debug_rank"]
    if debug_rank is not None:  # until here it was ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if order["local_rank"] != debug_rank:
        os.setsid()  # as torchrun's: a rank leads its own session
    start = worker.RankStart(outcome, given.notes, stack, bool(order["stderr"]))
    close_all_but([outcome, given.notes, stack, given.document, *given.streams])
    environ = {**given.plan["environ"], **order["env"]}
    os.environ.clear()
    os.environ.update(environ)
    problem: Exception | None = None
    try:
        if given.plan["numa_binding"]:
            _bind(given.plan["numa_binding"], order["local_rank"])
        os.chdir(given.plan["cwd"])
        has_input = debug_rank in (None, order["local_rank"])
        stdin = None if has_input else os.devnull
        _take_streams(given.streams, (stdin, order["stdout"], order["stderr"]))
        if given.plan["start_method"] == "spawn":
            worker.exec_rank(start, given.document, environ, given.plan["program"]["path"])
    except (OSError, StartError) as error:
        problem = error
    close_all_but([outcome, given.notes, stack])
    worker.run(start, given.plan["program"], given.payload, problem)


def _bind(numa_binding: str, local_rank: int) -> None:
    """Bind this process, and what it becomes, to cores near its GPU, as torch elastic would.

    Elastic does it in the part that starts processes, which is ours here; the function that it uses
    has no public name. test_seams.py fails if it moves.
    """
    try:
        binding = importlib.import_module("torch.numa.binding")
        options = binding.NumaOptions(affinity_mode=binding.AffinityMode(numa_binding))
        binding._maybe_apply_numa_binding_to_current_process(  # noqa: SLF001
            gpu_index=local_rank, numa_options=options
        )
    except Exception as error:  # noqa: BLE001 - no GPU, no such torch, no such core
        problem = (
            f"hydra.launcher.numa_binding={numa_binding!r}: torch cannot bind local rank "
            f"{local_rank} to cores near a GPU: {type(error).__name__}: {error}"
        )
        raise StartError(problem) from None


def _take_streams(streams: list[Fd], names: Iterable[str | None]) -> None:
    for number, (stream, name) in enumerate(zip(streams, names, strict=True)):
        os.dup2(stream.fileno(), number)
        if name:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if number else os.O_RDONLY
            file = Fd(os.open(name, flags, 0o666))
            os.dup2(file.fileno(), number)
            file.close()


class Ranks:
    """The ranks of the current attempt."""

    def __init__(
        self,
        count: int,
        grace_s: float,
        tell: Callable[..., None],
        answer: Callable[[dict[str, Any]], None],
    ) -> None:
        """Have none yet.

        Args:
            count: how many there will be.
            grace_s: how long they have to leave once they were asked to.
            tell: sends a message and descriptors to the launching process.
            answer: sends a message to the agent.
        """
        self._count = count
        self._grace_s = grace_s
        self._tell = tell
        self._answer = answer
        self._attempt = 0
        self._ranks: list[Rank] = []
        self._failed: list[_Failed] = []
        self._settled = Deadline()
        self._has_completed = False

    def begin_attempt(self, number: int) -> None:
        """Forget those of the attempt before."""
        for rank in self._ranks:
            rank.outcome.close()
            rank.stacks.close()
        self._ranks = []
        self._attempt = number
        self._settled = Deadline()
        self._has_completed = False

    def add(self, rank: Rank) -> None:
        """Look after one more."""
        self._ranks.append(rank)

    def tell_if_all_are_there(self) -> None:
        """Tell the launching process of the attempt's processes once all have been forked."""
        if len(self._ranks) == self._count:
            ranks = sorted(self._ranks, key=lambda rank: rank.global_rank)
            pids, folders = [rank.pid for rank in ranks], [rank.folder for rank in ranks]
            told = {"op": "ranks", "attempt": self._attempt, "pids": pids, "folders": folders}
            self._tell(told)

    def alive(self) -> list[Rank]:
        """Return those that have not ended."""
        return [rank for rank in self._ranks if not rank.ended]

    def all_are_asked(self) -> bool:
        """Whether each that lives has a time to leave."""
        return all(rank.leave.remaining_s is not None for rank in self.alive())

    def value(self) -> list[int]:
        """Return the descriptor of rank 0's outcome, if rank 0 is on this node."""
        return [rank.outcome.fileno() for rank in self._ranks if rank.global_rank == 0]

    def read_notes(self, notes: Fd) -> None:
        """Take in which ranks have recorded their outcome."""
        for note in recording.read_notes(notes):
            rank = next((each for each in self._ranks if each.pid == note.pid), None)
            if rank is None or rank.recorded is not None:
                continue
            rank.recorded = note.status
            if note.status == "failed" and not rank.signalled:
                rank.leave.within(_FAILED_RANK_LEAVES_S)
                self._report_failure(rank, note.exit_code)
        if self._all_completed():
            for rank in self.alive():
                rank.leave.within(max(self._grace_s, _COMPLETED_RANK_LEAVES_S))
            if not self._has_completed:
                self._has_completed = True
                self._tell({"op": "completed"})

    @property
    def attempt(self) -> int:
        """The number of the current attempt."""
        return self._attempt

    def judge(self, ended: dict[int, int]) -> bool:
        """Take in which processes ended, by pid, with their exit codes.

        Returns:
            Whether the last of ranks that all have completed is gone with them.
        """
        died = [rank for rank in self._ranks if rank.pid in ended and not rank.ended]
        for rank in died:
            rank.ended = True
            self._judge_exit(rank, ended[rank.pid])
        return bool(died) and not self.alive() and self._all_completed()

    def stop(self, signum: int) -> None:
        """Ask those that still work to leave, and give all a time for it."""
        for rank in self.alive():
            if rank.recorded is None:
                rank.signalled = True
                kill_group(rank.pid, signum)
            rank.leave.within(self._grace_s)

    def ask_for_stacks(self) -> None:
        """Have those that live write their threads' stacks."""
        for rank in self.alive():
            if stacks.SIGNAL is not None:
                kill(rank.pid, stacks.SIGNAL)

    def stack_sizes(self) -> list[int]:
        """Return how much each that lives has written of its stacks."""
        return [os.fstat(rank.stacks.fileno()).st_size for rank in self.alive()]

    def tell_stacks(self) -> None:
        """Put what they wrote into their logs, and tell the launching process."""
        for rank in self.alive():
            text = os.pread(rank.stacks.fileno(), _LONGEST_STACKS, 0)
            message: dict[str, Any] = {"op": "stacks", "global_rank": rank.global_rank}
            if not text:
                message["status"] = status_of(rank.pid)
            elif rank.folder is not None:
                with suppress(OSError), open(os.path.join(rank.folder, STDERR), "ab", 0) as log:
                    log.write(_STACKS_TITLE + text)
            self._tell(message, rank.stacks.fileno())

    def expect_to_be_killed(self) -> None:
        """Take the end of those that live as no failure from now on."""
        for rank in self.alive():
            rank.signalled = True

    def kill_overdue(self) -> None:
        """Kill those that did not leave in time, and what shares their session."""
        for rank in self.alive():
            if rank.leave.strikes():
                rank.overdue = rank.signalled = True
                kill_tree(rank.pid, janitors=rank.leave.is_repeated)

    def _all_completed(self) -> bool:
        are_there = len(self._ranks) == self._count
        return are_there and all(rank.recorded == "completed" for rank in self._ranks)

    def _judge_exit(self, rank: Rank, code: int) -> None:
        if rank.overdue and rank.recorded == "completed":
            self._tell({"op": "lingered", "global_rank": rank.global_rank})
        elif rank.recorded == "completed" and code != 0 and not rank.signalled:
            rank.recorded = "crashed"
            self._report_failure(rank, code)
        elif rank.recorded is None and not rank.signalled:
            self._report_failure(rank, code)

    def _report_failure(self, rank: Rank, code: int) -> None:
        self._failed.append(_Failed(rank, rank.recorded, code))
        if self._settled.remaining_s is None:
            self._settled.within(_SETTLE_S)

    @property
    def settles_s(self) -> float | None:
        """Seconds until failures that have been seen are to be told; None: there are none."""
        return self._settled.remaining_s if self._failed else None

    def tell_failures(self, *, at_once: bool = False) -> None:
        """Tell what failed, the cause first, once it has had time to be seen (or `at_once`).

        Whoever waits for a rank that a signal killed may note its failure before the kernel shows
        that death.
        """
        if at_once or self._settled.passed or not self.alive():
            for failed in sorted(self._failed, key=_Failed.order):
                self._tell(failed.facts(self._attempt), failed.rank.outcome.fileno())
                local_rank = failed.rank.local_rank
                self._answer({"op": "failed", "local_rank": local_rank, "exit": failed.code})
            self._failed = []


@dataclass(frozen=True)
class _Failed:
    rank: Rank
    recorded: str | None
    code: int

    def order(self) -> int:
        """Put a death without a word before an exception, which may be an answer to it, and an
        abort last: that is often a library's answer.
        """
        return 2 if self.code == -signal.SIGABRT else 1 if self.recorded == "failed" else 0

    def facts(self, attempt: int) -> dict[str, Any]:
        return {
            "op": "failed",
            "attempt": attempt,
            "local_rank": self.rank.local_rank,
            "global_rank": self.rank.global_rank,
            "folder": self.rank.folder,
            "recorded": self.recorded,
            "exit": self.code,
        }
