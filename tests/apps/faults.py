"""An app whose ranks end in every way a process can end."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import either
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


class Unpicklable(Exception):  # noqa: N818
    """Holds something that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.held = threading.Lock()


class Unbuildable(Exception):  # noqa: N818
    """Pickles, but cannot be rebuilt."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


class Changeling(Exception):  # noqa: N818
    """Comes back as something else."""

    def __reduce__(self) -> Any:
        return (ValueError, ("something else",))


KEPT: list[Any] = []


class ScriptError(Exception):
    """An exception class of the script."""


def deep(depth: int) -> None:
    if depth == 0:
        raise ScriptError("far down")
    deep(depth - 1)


def raise_late(*_: Any) -> None:
    raise ScriptError("raised when it was told to leave")


def answer_the_end(mine: bool) -> None:
    """Raise in one rank; the other raises when it is asked to leave."""
    if not mine:
        signal.signal(signal.SIGTERM, raise_late)
        note("handling")
        hang()
    while not list(Path(HydraConfig.get().runtime.output_dir).glob("handling.*")):
        time.sleep(0.01)
    raise ScriptError("the first")


def hang() -> None:
    while True:
        time.sleep(3600)


def fail(fault: str) -> Any:  # noqa: C901, PLR0912, PLR0915
    """End, or return, as the fault says."""
    if fault == "raise":
        raise ScriptError("raised on purpose")
    if fault == "surrogate":
        raise ScriptError("lone \udc80")
    if fault == "chained":
        try:
            raise KeyError("the first")
        except KeyError as error:
            raise ScriptError("the second") from error
    if fault == "unpicklable_error":
        raise Unpicklable
    if fault == "unbuildable_error":
        raise Unbuildable("one and two")
    if fault == "changing_error":
        raise Changeling("the original")
    if fault == "closes_descriptors":
        os.closerange(3, 1000)
        for number in range(20):
            KEPT.append(open(f"precious{number}", "w+"))  # noqa: SIM115
            KEPT[-1].write("the user's")
            KEPT[-1].flush()
    if fault == "forked_child":
        if os.fork() == 0:
            time.sleep(0.3)  # until the rank itself has left
            return "the child's"
        return 42
    if fault == "clears_environment":
        os.environ.clear()
    if fault == "real_time_signal":
        os.kill(os.getpid(), 40)
    if fault == "keyboard_interrupt":
        raise KeyboardInterrupt
    if fault == "sys_exit_0":
        sys.exit(0)
    if fault == "deep":
        deep(600)
    if fault == "sys_exit_large":
        sys.exit(2**40 + 5)
    if fault == "sys_exit_3":
        sys.exit(3)
    if fault == "sys_exit_text":
        sys.exit("a farewell")
    if fault == "os_exit_0":
        os._exit(0)
    if fault == "os_exit_7":
        os._exit(7)
    if fault == "abort":
        os.abort()
    if fault in ("SIGKILL", "SIGSEGV"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "hang_at_exit":
        atexit.register(hang)
    if fault == "raise_and_hang_at_exit":
        atexit.register(hang)
        raise ScriptError("raised before it hangs")
    if fault == "crash_at_exit":
        atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
    if fault == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    if fault == "stubborn_child":
        code = (
            "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"
        )
        subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        raise ScriptError("leaves a stubborn child")
    if fault == "tensor":
        return torch.arange(3)
    return {
        "unpicklable_value": threading.Lock,
        "large": lambda: b"x" * 200_000_000,
        "not_a_number": lambda: float("nan"),
    }.get(fault, lambda: 42)()


def note(name: str) -> None:
    """Leave a file that says how far this rank came."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / f"{name}.rank{os.environ['RANK']}.{os.getpid()}").touch()


@either.main(version_base="1.3", config_path=".", config_name="faults")
def main(cfg: DictConfig) -> Any:  # noqa: C901
    rank = int(os.environ["RANK"])
    note("started")
    my_job = cfg.at_job in (either.job_number(HydraConfig.get()), "all")
    mine = rank == cfg.at_rank and my_job
    if cfg.fault == "wait" and my_job:
        hang()
    if cfg.fault == "wait_with_child" and my_job:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        note("child")
        hang()
    if cfg.fault in ("ignores_sigterm", "ignores_all") and my_job:
        if mine or cfg.fault == "ignores_all":
            for signum in (signal.SIGTERM, signal.SIGINT):
                signal.signal(signum, signal.SIG_IGN)
            note("ignoring")
            hang()
        while not list(Path(HydraConfig.get().runtime.output_dir).glob("ignoring.*")):
            time.sleep(0.01)
        raise ScriptError("the other rank ignores SIGTERM")
    if cfg.fault == "raises_on_sigterm" and my_job:
        answer_the_end(mine)
    if cfg.fault == "raise_in_collective":
        dist.init_process_group("gloo")
        if mine:
            raise ScriptError("raised while the others wait")
        if my_job:
            dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        return 42
    return fail(cfg.fault) if mine else 42


if __name__ == "__main__":
    main()
