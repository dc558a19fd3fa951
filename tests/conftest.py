"""Runs real apps in real processes and checks that nothing of them is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

APPS = Path(__file__).parent / "apps"
HANG_S = float(os.environ.get("TEST_HANG_S", "120"))
"""Bound against hangs, far above what any of these runs takes."""


def pytest_configure() -> None:
    """Have Ctrl-C work in apps, also where a shell in the background has it ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def processes_with(marker: str, variable: str = "TEST_MARKER") -> list[psutil.Process]:
    """Return the living processes that carry the marker in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(variable) == marker
            ):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@dataclass
class Sweep:
    """One command that is started as a user would, and what it left."""

    directory: Path
    marker: str
    popen: subprocess.Popen[bytes]
    temporary: Path
    output: str = ""
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def wait(self, timeout_s: float = HANG_S) -> Sweep:
        """Wait for its end; a hang fails the test with what was printed."""
        try:
            self.popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            pytest.fail(f"hangs after {timeout_s} s:\n{self.read_output()}")
        self.seconds = time.monotonic() - self.started
        self.output = self.read_output()
        return self

    def read_output(self) -> str:
        """Return what it has printed so far."""
        return (self.directory / "console.txt").read_text(errors="replace")

    def kill(self) -> None:
        """End everything that carries the marker."""
        for process in processes_with(self.marker):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.popen.wait(HANG_S)

    @property
    def status(self) -> int:
        """Return the exit status; negative: killed by that signal."""
        return int(self.popen.returncode)

    def lines(self, pattern: str) -> list[dict[str, Any]]:
        """Return the JSON records in the files that match."""
        return [
            json.loads(line)
            for name in sorted(self.directory.glob(pattern))
            for line in name.read_text().splitlines()
        ]

    def jobs(self) -> list[dict[str, Any]]:
        """Return what `on_job_end` was given, by job."""
        return self.lines("job_end.jsonl")

    def await_file(self, pattern: str, count: int = 1) -> list[Path]:
        """Wait until that many files match."""
        deadline = time.monotonic() + HANG_S
        while len(found := list(self.directory.glob(pattern))) < count:
            if time.monotonic() > deadline or self.popen.poll() is not None:
                pytest.fail(f"no {pattern} in {self.directory}:\n{self.read_output()}")
            time.sleep(0.02)
        return found

    def await_text(self, text: str) -> None:
        """Wait until it has printed this."""
        deadline = time.monotonic() + HANG_S
        while text not in self.read_output():
            if time.monotonic() > deadline or self.popen.poll() is not None:
                pytest.fail(f"never printed {text!r}:\n{self.read_output()}")
            time.sleep(0.02)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Return its processes of a kind: server, keeper, agent or ranks."""
        children = psutil.Process(self.popen.pid).children()
        server = [p for p in children if "servers" in str(p.cmdline())] or children  # fork
        keepers = [child for p in server for child in p.children()]
        below = [child for p in keepers for child in p.children()]
        below.sort(key=lambda p: p.pid)
        return {"server": server, "keeper": keepers, "agent": below[:1], "rank": below[1:]}[kind]


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    """Start an app of `tests/apps`; at the end of the test nothing of it may be left."""
    yield from _sweeps(tmp_path)


@pytest.fixture(scope="module")
def start_sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Sweep]]:
    """Do the same for a run that several tests look at."""
    yield from _sweeps(tmp_path_factory.mktemp("sweep"))


def _sweeps(folder: Path) -> Iterator[Callable[..., Sweep]]:
    runs: list[Sweep] = []
    shm_before = set(os.listdir("/dev/shm"))

    def run(
        app: str,
        *overrides: str,
        environ: dict[str, str] | None = None,
        nproc: int = 2,
        code: str | None = None,
        stdin: str | None = None,
        launcher: str | None = "torchrun",
        single: bool = False,
        sweep_dir: str | None = "",
        flags: Sequence[str] = ("-m",),
        cwd: str = "",
    ) -> Sweep:
        directory = folder / f"run{len(runs)}"
        if single:  # the app's single run by our decorator; where a sweep's first job would be
            flags, environ = (), {**(environ or {}), "APP_MAIN": "ours"}
            overrides = (f"hydra.run.dir={directory / (sweep_dir or '') / '0'}", *overrides)
        start = ["-c", code] if code is not None else app.split() if app.startswith("-") else None
        command = [*(start or [str(APPS / app)]), *flags]
        command += [f"hydra/launcher={launcher}"] if launcher else []
        command += [f"hydra.launcher.nproc_per_node={nproc}"] if nproc else []
        command += [f"hydra.sweep.dir={directory / sweep_dir}"] if sweep_dir is not None else []
        command += overrides
        runs.append(_start(directory, command, environ or {}, stdin, cwd))
        return runs[-1]

    yield run
    for one in runs:
        if one.popen.poll() is None:
            one.kill()
            pytest.fail("the test ended before its app")
        left = leftovers(one.marker)
        one.kill()
        assert not left, f"left alive: {left}"
        left = [name for name in os.listdir(one.temporary) if not is_torchs(name)]
        assert not left, "temporary files left"
    assert not left_in_shared_memory(shm_before), "shared memory left"


def left_in_shared_memory(before: set[str], timeout_s: float = HANG_S) -> set[str]:
    """Return what is there and was not before, when tests that run beside this one had time."""
    deadline = time.monotonic() + timeout_s
    left = set(os.listdir("/dev/shm")) - before
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left &= set(os.listdir("/dev/shm"))
    return left


def is_torchs(name: str) -> bool:
    """Whether a temporary file is torch's cache, which is meant to stay."""
    return name.startswith("torchinductor")


def _start(
    directory: Path,
    arguments: Sequence[str],
    environ: dict[str, str],
    stdin: str | None,
    cwd: str,
) -> Sweep:
    marker = uuid.uuid4().hex
    directory.mkdir(parents=True)
    # Sockets that Python makes there have a path of some hundred characters at most.
    temporary = Path(tempfile.mkdtemp(prefix="t", dir=directory.parents[1]))
    (directory / cwd).mkdir(exist_ok=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTEST_"))}
    own = {"TEST_MARKER": marker, "TMPDIR": str(temporary)}
    with (directory / "console.txt").open("wb") as console:
        popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=console,
            stderr=subprocess.STDOUT,
            cwd=directory / cwd,
            start_new_session=True,
            env={**inherited, **own, **environ},
        )
    if stdin is not None:
        assert popen.stdin is not None
        with popen.stdin as pipe:
            pipe.write(stdin.encode())
    return Sweep(directory, marker, popen, temporary)


@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """When all tests are done, no process and no temporary file of the launcher's is there."""
    session = os.environ["TEST_SESSION"] = uuid.uuid4().hex
    temporary = tmp_path_factory.mktemp("temporary")
    os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
    yield
    assert not processes_with(session, "TEST_SESSION"), "processes left"
    left = [path.name for path in temporary.iterdir()]
    assert not [name for name in left if "hydra" in name or "elastic" in name], "files left"


def leftovers(marker: str, timeout_s: float = 10) -> list[str]:
    """Return the processes that are still there when killed ones have had time to vanish."""
    deadline = time.monotonic() + timeout_s
    while (found := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [f"{process.pid} {process.cmdline()}" for process in found]


def send(process: subprocess.Popen[bytes] | psutil.Process, signum: int = signal.SIGKILL) -> None:
    """Send a signal to a process that the test started."""
    os.kill(process.pid, signum)
