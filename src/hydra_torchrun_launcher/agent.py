"""The agent: one process per job and node, in which torch elastic runs the job's rendezvous,
restarts and verdict. Everything of torch elastic that is touched is touched here.

It starts no process itself: its keeper does, by messages over a channel.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import signal
import time
import uuid
from typing import Any

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.api import (
    PContext,
    RunProcsResult,
)
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hydra_torchrun_launcher.errors import refused
from hydra_torchrun_launcher.log_specs import RankLogs
from hydra_torchrun_launcher.processes import flush_standard_streams
from hydra_torchrun_launcher.rendezvous import (
    BACKEND,
    NoMoreRoundsError,
    OneNode,
    SeveralNodes,
)
from hydra_torchrun_launcher.tails import Tails
from hydra_torchrun_launcher.wire import Channel, Closed, wait_readable

_KEEPER_ANSWERS_S = 30
"""Bound on the keeper's answers beyond the time that ranks have to leave."""
_LONGEST_MESSAGE = 20_000
"""A message between processes is whole or not at all; a text without end would be not at all."""
_MANY = 1 << 30
_SHOW_EVERY_S = 0.1
"""How often teed files are looked at, as often as torchrun does."""


def run(plan: dict[str, Any], channel: Channel) -> None:
    """Run one job to its verdict, tell the keeper, and leave."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # it is stopped by signals
    os.environ.clear()
    os.environ.update(plan["environ"])
    if "LOGLEVEL" not in os.environ:
        # Elastic announces on the console what the launching process reports better.
        for name in list(logging.Logger.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):  # each has a level of its own
                logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        verdict = _launch(plan["agent"], _Keeper(channel))
    except OSError as error:
        where = f"; ranks' files go to {plan['agent']['rank_files']} (hydra.launcher.log_dir)"
        verdict = {"state": "broken", "message": refused(error) + where}
    except BaseException as error:  # noqa: BLE001 - said to the user by the launching process
        asked = plan["agent"]["launch_config"]
        hint = f" (hydra.launcher.extra or the like asks torch for {asked})" if asked else ""
        verdict = {"state": "broken", "message": f"{type(error).__name__}: {error}{hint}"}
    verdict["message"] = str(verdict.get("message", ""))[:_LONGEST_MESSAGE]
    for name in plan["agent"]["signals"]:  # a late one must not disturb the last words
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    channel.send({"op": "verdict", **verdict})
    flush_standard_streams()
    os._exit(0)


def _launch(settings: dict[str, Any], keeper: _Keeper) -> dict[str, Any]:
    keeper.grace_s = settings["shutdown_timeout_s"]
    keeper.wait_s = settings["monitor_interval_s"]
    keeper.job_label = settings["job_label"]
    keeper.max_restarts = settings["max_restarts"]
    node: dict[str, Any] | None = settings["node"]
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    unknown = sorted(set(settings["launch_config"]) - fields)
    if unknown:
        known = ", ".join(sorted(fields))
        message = f"hydra.launcher.extra: {', '.join(unknown)}: the installed torch's LaunchConfig "
        return {"state": "refused", "message": f"{message}has no such field; it has {known}"}
    rendezvous_handler_registry.register(BACKEND, lambda found: keeper.rendezvous(found, node))
    # The one seam: LocalElasticAgent starts ranks by this module-level name, whatever LaunchConfig
    # says. The base class of what it makes is public (PContext). test_agent.py fails if it moves.
    local_elastic_agent.start_processes = keeper.start_processes  # type: ignore[attr-defined,assignment]
    try:
        elastic_launch(_launch_config(settings), _task)()
    except ChildFailedError:
        return {"state": "failed"}
    except SignalException as stopped:
        return {"state": "stopped", "signal": int(stopped.sigval)}
    except NoMoreRoundsError:
        return {"state": "failed"}
    return {"state": "succeeded" if keeper.finished else "failed"}


def _task() -> None:
    """Stand for the task function, which elastic only names in its events."""


def _launch_config(settings: dict[str, Any]) -> LaunchConfig:
    """Build this torch's LaunchConfig from what it has fields for.

    Fields come and go with torch's releases: one that this torch lacks is left out, one that we
    do not know keeps torch's default.
    """
    is_alone = settings["node"] is None
    wanted = {
        "min_nodes": 1,  # on several nodes the leader counts them, and the restarts
        "max_nodes": 1 if is_alone else _MANY,
        "nproc_per_node": settings["nproc_per_node"],
        "logs_specs": RankLogs(settings),
        "run_id": settings["run_id"] or uuid.uuid4().hex,
        "role": settings["role"],
        "rdzv_backend": BACKEND,
        "rdzv_configs": {},
        "max_restarts": settings["max_restarts"] if is_alone else _MANY,
        # Elastic sleeps this long before each look at the ranks; the wait is in the look itself.
        "monitor_interval": 1e-6,
        "signals_to_handle": ",".join(settings["signals"]),
        "shutdown_timeout": settings["shutdown_timeout_s"],
        # The torchrun command reads it, its API does not.
        "log_line_prefix_template": os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        **settings["launch_config"],
    }
    fields = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in wanted.items() if name in fields})


class _Keeper:
    """The agent's side of its keeper: requests, and what has been heard of the ranks."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._attempts = 0
        self._several: SeveralNodes | None = None
        self.max_restarts = 0
        self.grace_s = 0.0
        self.wait_s = 0.1
        self.job_label = ""
        self.tails = Tails()
        self.failures: dict[int, int] = {}
        self.finished = False

    def start_processes(self, **arguments: Any) -> _Ranks:
        """Take the place of elastic's function of this name, whose arguments change with torch."""
        known = PContext.__init__.__code__.co_varnames
        ranks = _Ranks(self, **{name: value for name, value in arguments.items() if name in known})
        ranks.start()
        return ranks

    def rendezvous(
        self, parameters: RendezvousParameters, node: dict[str, Any] | None
    ) -> RendezvousHandler:
        """Return how the job's nodes meet."""
        if node is None:
            return OneNode(parameters)
        self._several = SeveralNodes(parameters.run_id, node, self._join)
        return self._several

    def _join(self, port: int | None) -> dict[str, Any]:
        """Wait for the next round; the leader knows how long."""
        self._channel.send({"op": "join", "port": port})
        found = self._wait_for({"round", "refuse"}, math.inf)
        self._attempts = found.get("number", 0)
        return found

    def variables(self) -> dict[str, str]:
        """Return what elastic says of a rank that is another thing on several nodes.

        It counts the restarts that this node asked for, of those that it is told of.
        """
        if self._several is None:
            return {}
        return {
            "TORCHELASTIC_RESTART_COUNT": str(self._attempts),
            "TORCHELASTIC_MAX_RESTARTS": str(self.max_restarts),
        }

    def begin_attempt(self) -> None:
        self.failures, self.finished = {}, False
        self._channel.send({"op": "attempt", "number": self._attempts})
        self._attempts += 1

    def spawn(self, order: dict[str, Any]) -> int:
        self._channel.send({"op": "spawn", **order})
        return int(self._wait_for({"pid"}, _KEEPER_ANSWERS_S)["pid"])

    def stop(self, signum: int) -> None:
        """Return when no rank and nothing that ranks started is left."""
        self._channel.send({"op": "stop", "signal": signum})
        self._wait_for({"stopped"}, self.grace_s + _KEEPER_ANSWERS_S)

    def say_busy(self) -> None:
        """Ask for time: the console takes nothing for now."""
        self._channel.send({"op": "busy"})

    def listen(self, timeout_s: float) -> None:
        """Take in what the keeper says of the ranks, for at most `timeout_s` seconds."""
        self._hear(time.monotonic() + timeout_s)

    def _wait_for(self, answers: set[str], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (message := self._hear(deadline)) is not None:
            if message["op"] in answers:
                return message
        problem = f"the keeper did not answer {' or '.join(answers)} within {timeout_s:g} s"
        raise TimeoutError(problem)

    def _hear(self, deadline: float) -> dict[str, Any] | None:
        if not self._wait_readable(deadline):
            return None
        try:
            message, _ = self._channel.receive()
        except Closed:
            os._exit(1)  # without its keeper an agent can start and end nothing
        if message["op"] == "failed":
            self.failures[message["local_rank"]] = message["exit"]
        self.finished = self.finished or message["op"] == "finished"
        if self._several is not None and message["op"] == "regroup":
            self._several.others_wait = True
        return message

    def _wait_readable(self, deadline: float) -> bool:
        """Wait for a message; show what ranks write meanwhile."""
        while True:
            step_s = 0.0 if self.tails.show() else _SHOW_EVERY_S if self.tails else math.inf
            left_s = max(0.0, deadline - time.monotonic())
            if wait_readable([self._channel], min(step_s, left_s)):
                return True
            if left_s == 0:
                return False


class _Ranks(PContext):
    """One attempt's ranks, as elastic sees them.

    Elastic's own context waits for ever for a function that leaves without a return value.
    """

    def __init__(self, keeper: _Keeper, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._keeper = keeper
        self._pids: dict[int, int] = {}
        prefixes = arguments.get("log_line_prefixes") or {}
        job = keeper.job_label
        for (local_rank, stream), name in arguments["logs_specs"].shown_by_us.items():
            if job and local_rank not in prefixes:
                prefix = f"[{job}, rank {self.envs[local_rank]['RANK']}] "
            else:
                usual = prefixes.get(local_rank, f"[{arguments['name']}{local_rank}]:")
                prefix = f"[{job}]{usual}" if job else usual
            keeper.tails.follow(name, prefix, stream)

    def _start(self) -> None:
        variables = self._keeper.variables()
        self._keeper.begin_attempt()
        for local_rank in range(self.nprocs):
            self._pids[local_rank] = self._keeper.spawn(
                {
                    "local_rank": local_rank,
                    "env": {**self.envs[local_rank], **variables},
                    "stdout": self.stdouts[local_rank],
                    "stderr": self.stderrs[local_rank],
                }
            )

    def _poll(self) -> RunProcsResult | None:
        if not self._keeper.failures and not self._keeper.finished:
            self._keeper.listen(self._keeper.wait_s)
        if self._keeper.failures:
            self.close()
            return RunProcsResult(failures=dict(map(self._failure, self._keeper.failures.items())))
        if self._keeper.finished:
            self.close()
            return RunProcsResult(return_values=dict.fromkeys(range(self.nprocs)))
        return None

    def _failure(self, failure: tuple[int, int]) -> tuple[int, ProcessFailure]:
        local_rank, code = failure
        # The error file is for people and for tools that read torchrun's; elastic needs none.
        return local_rank, ProcessFailure(local_rank, self._pids[local_rank], code or 1, "")

    def pids(self) -> dict[int, int]:
        return self._pids

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        # Elastic passes its own 30 s here after a failure; the keeper knows shutdown_timeout.
        del timeout
        if not self._keeper.finished:
            self._keeper.stop(int(death_sig))
        self._keeper.tails.finish(busy=self._keeper.say_busy)
