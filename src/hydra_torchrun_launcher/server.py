"""The server: one single-threaded process with torch imported and no code of the user's, which
forks a keeper for each job and ends what a keeper that was killed leaves behind.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import NoReturn

import torch

from hydra_torchrun_launcher.errors import describe_exit, refused
from hydra_torchrun_launcher.keeper import Keeper, Role
from hydra_torchrun_launcher.processes import (
    ChildWatch,
    Ultimatum,
    adopt_orphans,
    children,
    exit_code,
    kill_descendants,
)
from hydra_torchrun_launcher.wire import (
    Channel,
    Closed,
    Fd,
    channel_from,
    close_all_but,
    fork,
    wait_readable,
)

_VISIBILITY = {
    "xpu": "ZE_AFFINITY_MASK",
    "npu": "ASCEND_RT_VISIBLE_DEVICES",
    "hpu": "HABANA_VISIBLE_MODULES",
}
"""Variables by which a process sees a part of the accelerators, by torch's name for the kind."""


def serve(channel: Channel) -> NoReturn:
    """Serve jobs until the launching process is gone; then leave.

    Forked children come back here with what they are to become, so that it starts from an almost
    empty stack, and never return to the caller.
    """
    try:
        role = _Server(channel).run()
        while role is not None:
            role = role()
        os._exit(0)
    except BaseException:  # noqa: BLE001 - nothing of a forked child may return to the caller
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._keepers: dict[int, int] = {}
        self._ended: dict[int, int] = {}
        self._orphans = Ultimatum()
        self._counter: int | None = None
        self._closed = False

    def run(self) -> Role | None:
        adopt_orphans()
        self._watch = ChildWatch()
        self._tell({"op": "ready", "pid": os.getpid()})
        while self._keepers or self._ended or not self._closed:
            sources = [self._watch, *(() if self._closed else (self._channel,))]
            ready = wait_readable(sources, self._orphans.remaining_s)
            if self._watch in ready:
                self._reap()
            if self._channel in ready:
                role = self._hear()
                if role is not None:
                    return role
            self._end_orphans()
        return None

    def _tell(self, message: dict[str, object]) -> None:
        try:
            self._channel.send(message)
        except Closed:
            self._closed = True

    def _hear(self) -> Role | None:
        try:
            message, fds = self._channel.receive()
        except Closed:
            self._closed = True
            return None
        try:
            pid = fork()
        except OSError as error:
            self._tell({**message, "op": "refused", "message": refused(error)})
            return None
        if pid == 0:
            self._watch.restore()
            return self._count if message["op"] == "count" else _keeper(fds)
        if message["op"] == "count":
            self._counter = pid
        else:
            self._keepers[pid] = message["job"]
            self._tell({"op": "kept", "job": message["job"], "pid": pid})
        return None

    def _count(self) -> None:
        """Count accelerators in a process of its own: a driver's state must not be forked."""
        accelerator = getattr(torch, "accelerator", torch.cuda)  # torch < 2.6 has CUDA only
        count = accelerator.device_count() if accelerator.is_available() else 0
        variables = ["CUDA_VISIBLE_DEVICES"]
        if torch.version.hip:
            variables.insert(0, "HIP_VISIBLE_DEVICES")  # it wins over the other
        elif count and not torch.cuda.device_count():
            variables = [_VISIBILITY.get(accelerator.current_accelerator().type, variables[0])]
        self._tell({
            "op": "counted", "count": count, "gpus": torch.cuda.device_count(),
            "variables": variables,
        })  # fmt: skip

    def _reap(self) -> None:
        for pid, status in self._watch.reap():
            if pid == self._counter and status != 0:
                how = describe_exit(exit_code(status))
                problem = f"the process that counts this machine's accelerators {how}"
                self._tell({"op": "refused", "message": problem})
            if pid in self._keepers:
                self._ended[self._keepers.pop(pid)] = exit_code(status)
                if status != 0:
                    self._orphans.within(0)

    def _end_orphans(self) -> None:
        """Kill what a killed keeper left to us; the end of its job is told when that is gone."""
        if self._orphans.strikes():
            kill_descendants(spare=self._keepers, janitors=self._orphans.is_repeated)
        if self._orphans.remaining_s is not None and not self._orphans.is_in_vain:
            ours = {*self._keepers, self._counter}
            if set(children(recursive=False)) - ours:
                return
        self._orphans.clear()
        while self._ended:
            job, code = self._ended.popitem()
            self._tell({"op": "ended", "job": job, "exit": code})


def _keeper(fds: list[Fd]) -> Role:
    job = channel_from(fds[0].release())
    close_all_but([job, *fds[1:]])
    return Keeper(job, fds[1], fds[2:]).run
