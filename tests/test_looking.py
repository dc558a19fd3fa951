"""Looking at a sweep before it runs, and into a rank while it does."""

from __future__ import annotations

import os
import pty
import re
import selectors
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import APPS, HANG_S, Sweep
from running import read_records

from hydra_torchrun_launcher.dry_run import _where_config_is
from hydra_torchrun_launcher.stacks import where

Start = Callable[..., Sweep]
TELL_TALE = """
import os, sys
def note(event, _arguments):
    if event in ("subprocess.Popen", "os.fork", "os.posix_spawn"):
        open(os.environ["PROCESSES"], "a").write(event)
sys.addaudithook(note)
"""
"""What an interpreter runs first that is to note every process it starts."""


@pytest.fixture
def start(sweep: Start, tmp_path: Path) -> Start:
    """Start the app whose ranks write down what they have."""
    records = tmp_path / "records"
    records.mkdir()

    def run(*overrides: str, environ: dict[str, str] | None = None) -> Sweep:
        environ = {"RANK_RECORDS": str(records), **(environ or {})}
        return sweep("pooled.py", *overrides, environ=environ)

    return run


def sets(line: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in shlex.split(line.partition("sets: ")[2]))
    return {name: value for name, _, value in pairs}


@pytest.mark.hydra_versions
def test_dry_run_says_what_ranks_get(start: Start, tmp_path: Path) -> None:
    """It names the variables that ranks then have, no others; nothing is started."""
    settings = ("n=1,2", "hydra.launcher.n_jobs=auto", "hydra.launcher.devices=[5,GPU-x]",
                "hydra.launcher.max_restarts=2", "+hydra.job.env_set.SET='a b'")  # fmt: skip
    (tmp_path / "sitecustomize.py").write_text(TELL_TALE)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environ = {"PYTHONPATH": path, "PROCESSES": str(tmp_path / "processes")}
    dry = start(*settings, "hydra.launcher.dry_run=true", environ=environ).wait()
    assert dry.status == 0, dry.output
    assert not (tmp_path / "processes").exists()
    assert read_records(tmp_path / "records") == []
    assert not (dry.directory / "0").exists()
    assert not (dry.directory / ".torchrun").exists()
    said = [sets(line) for line in dry.output.splitlines() if "  sets: " in line]
    run = start(*settings).wait()
    assert run.status == 0, run.output
    base = {**os.environ, "TEST_MARKER": "", "TMPDIR": "", "RANK_RECORDS": ""}
    ranks = read_records(tmp_path / "records")
    for rank in ranks:
        own = {k: v for k, v in rank["environ"].items() if base.get(k) != v and k not in (
            "TEST_MARKER", "TMPDIR", "RANK_RECORDS", "PWD", "OLDPWD", "_")}  # fmt: skip
        assert set(own) == set(said[rank["job"]])
        for name in ("WORLD_SIZE", "OMP_NUM_THREADS", "SET", "TORCHELASTIC_MAX_RESTARTS"):
            assert own[name] == said[rank["job"]][name]
    assert said[0]["CUDA_VISIBLE_DEVICES"] == ranks[0]["seen"]["CUDA_VISIBLE_DEVICES"] == "5,GPU-x"
    assert said[1]["CUDA_VISIBLE_DEVICES"] == "<2 of 5, GPU-x, when they are free>"
    first = re.search(r"like: (.*)", dry.output)
    assert first is not None
    words = shlex.split(first[1])
    assert words[words.index("torchrun") :] == [
        "torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=2",
        str(APPS / "pooled.py"), "n=1", "+hydra.job.env_set.SET='a b'",
    ]  # fmt: skip


@pytest.mark.hydra_versions
def test_dry_run_names_the_config_and_lent_devices(sweep: Start, tmp_path: Path) -> None:
    """The command has Hydra's flags, and devices are named also where all are lent."""
    (tmp_path / "pooled.yaml").write_text((APPS / "pooled.yaml").read_text())
    run = sweep(
        "pooled.py", "hydra.launcher.n_jobs=auto", "hydra.launcher.dry_run=true",
        "hydra.launcher.devices=[3,4]", flags=(f"--config-dir={tmp_path}", "-cn", "pooled", "-m"),
        environ={"CUDA_VISIBLE_DEVICES": "3,4", "RANK_RECORDS": str(tmp_path)},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert f"pooled.py --config-name=pooled --config-dir={tmp_path}\n" in run.output
    (line,) = [line for line in run.output.splitlines() if "  sets: " in line]
    assert sets(line)["CUDA_VISIBLE_DEVICES"] == "3,4"
    assert "Jobs: 1, and none was started" in run.output


def test_dry_run_places_as_the_run_would(start: Start, tmp_path: Path) -> None:
    """The largest job goes first, whatever its number."""
    settings = ("n=0,1,2", "sizes=[1,2,4]", "hydra.launcher.nproc_per_node=${size}",
                "hydra.launcher.n_jobs=auto", "hydra.launcher.devices=[a,b,c,d]")  # fmt: skip
    dry = start(*settings, "hydra.launcher.dry_run=true").wait()
    assert dry.status == 0, dry.output
    lines = [line for line in dry.output.splitlines() if "sets:" in line]
    found = [sets(line)["CUDA_VISIBLE_DEVICES"] for line in lines]
    assert found == [
        "<1 of a, b, c, d, when they are free>", "<2 of a, b, c, d, when they are free>", "a,b,c,d",
    ]  # fmt: skip


def test_dry_run_with_virtual_local_rank(start: Start) -> None:
    """Each rank sees one device, as its rank 0."""
    dry = start("hydra.launcher.devices=[x,y]", "hydra.launcher.virtual_local_rank=true",
                "hydra.launcher.dry_run=true").wait()  # fmt: skip
    (line,) = [line for line in dry.output.splitlines() if "sets:" in line]
    assert sets(line)["LOCAL_RANK"] == "0"
    assert sets(line)["CUDA_VISIBLE_DEVICES"] == "<one of x,y for each rank>"


@pytest.mark.parametrize("arguments", [["-c", "x"], ["--config", "x"], ["--config-name"]])
def test_command_line_of_another_program(arguments: list[str]) -> None:
    """What Hydra would not understand names no config."""
    assert _where_config_is(arguments) == []


@pytest.mark.hydra_versions
def test_dry_run_of_a_single_run(sweep: Start, tmp_path: Path) -> None:
    """A single run has one job to tell about, and makes no directory."""
    run = sweep("faults.py", "hydra.launcher.dry_run=true", single=True).wait()
    assert run.status == 0, run.output
    assert "1 node x 2 ranks (forkserver)" in run.output
    assert not (run.directory / "0").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["hydra.launcher.debug_rank=2"], "debug_rank=2: the job has ranks 0 to 1"),
        (["hydra.launcher.debug_rank=0", "hydra.launcher.n_jobs=2"], "expected n_jobs=1"),
    ],
)
def test_debug_rank_that_cannot_be(start: Start, settings: list[str], said: str) -> None:
    """A rank that is not there, or several jobs at once, are refused."""
    run = start(*settings).wait()
    assert run.status == 1
    assert said in run.output
    assert "Traceback" not in run.output


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: list[str], cwd: Path) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(cwd)
            os.execv(command[0], command)
        self.shown = self.everything = ""

    def await_text(self, text: str) -> None:
        deadline = time.monotonic() + HANG_S
        with selectors.DefaultSelector() as selector:
            selector.register(self.fd, selectors.EVENT_READ)
            while text not in self.shown:
                assert selector.select(max(0.0, deadline - time.monotonic())), self.shown
                try:
                    text_read = os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    assert text in self.shown, self.shown
                    return
                self.shown += text_read
                self.everything += text_read
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def await_quiet(self) -> None:
        """Wait until it waits itself."""
        before = None
        while before != (before := psutil.Process(self.pid).cpu_times()):
            time.sleep(0.3)

    def wait(self) -> int:
        """Return its status."""
        self.await_end()
        _, status = os.waitpid(self.pid, 0)
        os.close(self.fd)
        return os.waitstatus_to_exitcode(status)

    def await_end(self) -> None:
        deadline = time.monotonic() + HANG_S
        while psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, self.shown
            time.sleep(0.02)


OnTerminal = Callable[[list[str]], Terminal]


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[OnTerminal]:
    """Start a command on a terminal, which ends with the test."""
    started: list[Terminal] = []

    def start(command: list[str]) -> Terminal:
        started.append(Terminal(command, tmp_path))
        return started[-1]

    yield start
    for terminal in started:
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(terminal.pid, signal.SIGKILL)
            os.waitpid(terminal.pid, 0)


def test_interrupt_before_the_debugged_rank_is_there(
    on_terminal: OnTerminal, tmp_path: Path
) -> None:
    """Until a rank has the terminal, Ctrl-C ends the app."""
    (tmp_path / "never_ready.py").write_text("import time\nopen('asked', 'w')\ntime.sleep(100)\n")
    terminal = on_terminal([
        "/usr/bin/env", f"PYTHONPATH={tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        sys.executable, str(APPS / "debugged.py"), "-m", "hydra/launcher=torchrun",
        "hydra.launcher.debug_rank=0", "hydra.launcher.preload=[never_ready]",
        "hydra.launcher.nproc_per_node=1",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ])  # fmt: skip
    terminal.await_text("#0 :")
    terminal.await_quiet()
    terminal.type("\x03")
    assert terminal.wait() == -signal.SIGINT, terminal.everything
    assert "stopping on SIGINT" not in terminal.shown


@pytest.mark.parametrize(
    ("dump", "said"),
    [
        (
            'Thread 1 (most recent call first):\n  File "/a/b.py", line 1 in f\n...\n',
            "a main thread that is not shown: there are too many threads",
        ),
        (
            """Current thread 1 (most recent call first):
  File "/usr/lib/python3/dist-packages/x/y.py", line 3 in g
  File "/home/me/train.py", line 7 in main""",
            "/usr/lib/python3/dist-packages/x/y.py:3 in g, called from /home/me/train.py:7 in main",
        ),
    ],
)
def test_where_a_rank_stands(dump: str, said: str) -> None:
    """Installed packages are nobody's own code; what is cut off is not guessed at."""
    assert where(dump) == said


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_debug_rank_has_the_terminal(on_terminal: OnTerminal, tmp_path: Path, method: str) -> None:
    """A debugger works in it, Ctrl-C is its own, no time limit holds, others write to files."""
    terminal = on_terminal([
        sys.executable, str(APPS / "debugged.py"), "-m", "hydra/launcher=torchrun",
        "hydra.launcher.nproc_per_node=3", "hydra.launcher.debug_rank=1",
        "hydra.launcher.timeout_s=0.01", f"hydra.launcher.start_method={method}",
        f"hydra.sweep.dir={tmp_path / 'sweep'}",
    ])  # fmt: skip
    terminal.await_text("rank 1 speaks")
    terminal.await_text("waiting")
    terminal.type("\x03")
    terminal.await_text("interrupted with 42")
    terminal.await_text("(Pdb)")
    terminal.type("p secret + 1000\n")
    terminal.await_text("1042")
    terminal.type("c\n")
    assert terminal.wait() == 0, terminal.shown
    assert "time is up" not in terminal.everything
    assert len(list(tmp_path.glob("rank*.ended"))) == 3
    for rank in (0, 2):
        log = tmp_path / f"sweep/0/ranks/attempt_0/{rank}/stdout.log"
        assert log.read_text() == f"rank {rank} speaks\n"
