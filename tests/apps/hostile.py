"""An app that makes trouble where no ordinary app does; without `from __future__`, on purpose."""

import builtins
import dataclasses
import inspect
import os
import pathlib
import shutil
import signal
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import hydra
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

if "RANK" in os.environ and os.environ.get("TROUBLE") == "exit at import":
    sys.exit(7)
if os.environ.get("TROUBLE") == "path":
    sys.path.insert(0, pathlib.Path("/somewhere"))  # type: ignore[arg-type]


class Tee:
    """A stream as people write one: it has what they needed of a stream."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> None:
        self.stream.write(text)


if os.environ.get("TROUBLE") == "tee":
    sys.stdout = Tee(sys.stdout)  # type: ignore[assignment]


def annotated(number: int) -> int:
    return number


REGISTRY = {int: "found"}


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    text: str


@dataclasses.dataclass
class Holding(Exception):  # noqa: N818
    data: Any


class Unequal(Exception):  # noqa: N818
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("cannot be compared")

    def __bool__(self) -> bool:
        raise RuntimeError("is neither true nor false")

    __hash__ = None  # type: ignore[assignment]


class Fatal(Exception):  # noqa: N818
    def __reduce__(self) -> Any:
        return (os._exit, (4,))


class Exiting:
    def __setstate__(self, state: Any) -> None:
        if "RANK" not in os.environ:
            sys.exit(9)


class Interrupting(Exiting):
    def __setstate__(self, state: Any) -> None:
        if "RANK" not in os.environ:
            raise KeyboardInterrupt


def with_state(thing: Any) -> Any:
    thing.state = 1
    return thing


def noted() -> Exception:
    error = ValueError("with notes")
    error.__notes__ = "no list"  # type: ignore[assignment]
    return error


def chained() -> Exception:
    error = Holding(torch.zeros(3))
    error.__cause__ = Holding(torch.ones(3))
    return error


def raise_it(error: BaseException) -> None:
    raise error


def without_stderr() -> None:
    sys.stderr = None
    raise ValueError("said nowhere")


def with_closed_stderr() -> None:
    sys.stderr.close()
    raise ValueError("said nowhere")


def without_open() -> None:
    builtins.open = None  # type: ignore[assignment]
    raise ValueError("without open")


FAULTS = {
    "frozen": lambda: raise_it(Frozen("cannot be changed")),
    "chained": lambda: raise_it(chained()),
    "noted": lambda: raise_it(noted()),
    "unequal": lambda: raise_it(Unequal("odd")),
    "exit_tensor": lambda: sys.exit(torch.ones(3)),  # type: ignore[arg-type]
    "no_stderr": without_stderr,
    "closed_stderr": with_closed_stderr,
    "no_open": without_open,
    "fatal_reduce": lambda: raise_it(Fatal("ends its process")),
    "exiting_value": lambda: with_state(Exiting()),
    "interrupting_value": lambda: with_state(Interrupting()),
    "umlaut": lambda: raise_it(ValueError("größe ü")),
    "removes_cwd": lambda: shutil.rmtree(os.getcwd()),
    "none": lambda: REGISTRY[inspect.signature(annotated).parameters["number"].annotation],
}


def in_collective() -> None:
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hold_shared_memory(folder: pathlib.Path) -> None:
    memory = SharedMemory(create=True, size=1000)
    (folder / f"holding.{os.environ['RANK']}").touch()
    while memory:
        time.sleep(3600)


def await_go(folder: pathlib.Path) -> None:
    (folder / f"waiting.{os.environ['RANK']}").touch()
    while not (folder / "go").exists():
        time.sleep(0.02)


class KillServer(Callback):
    """Kills the launcher's idle server before the second job."""

    def on_job_start(self, config: Any, **_: Any) -> None:
        if config.hydra.job.num == 1:
            import psutil

            (server,) = psutil.Process().children()
            server.kill()
            server.wait()


@hydra.main(version_base="1.3", config_path=".", config_name="hostile")
def main(cfg: Any) -> Any:
    folder = pathlib.Path(HydraConfig.get().runtime.output_dir)
    if cfg.fault == "collective":
        in_collective()
    if cfg.fault == "shared_memory":
        hold_shared_memory(folder)
    if cfg.fault == "await":
        await_go(folder)
    if cfg.fault == "speaks":
        print("I am", cfg.who, os.environ["RANK"])
        return None
    if cfg.fault in ("await", "removes_cwd") and os.environ["RANK"] != "0":
        return "found"
    return FAULTS.get(cfg.fault, FAULTS["none"])()


if __name__ == "__main__":
    if os.environ.get("TROUBLE") == "impatient":
        import importlib

        importlib.import_module("hydra_torchrun_launcher.keeper")._AGENT_ACTS_S = 2
    main()
