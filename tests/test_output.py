"""What ranks write arrives, whole and where it belongs."""

from __future__ import annotations

import json
import os
import pty
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from conftest import APPS, HANG_S, Sweep

Run = Callable[..., Sweep]
LINES = b"\xff\xfe no text\n" + b"x" * 10_000_000 + b"END\n"


def console(run: Sweep) -> bytes:
    return (run.directory / "console.txt").read_bytes()


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_bytes_and_long_lines(sweep: Run, method: str) -> None:
    """Bytes that are no text and a line of 10 MB arrive as they were written: rank 0's on the
    console, the other's in its file.
    """
    run = sweep("speaking.py", f"hydra.launcher.start_method={method}").wait()
    assert run.status == 0, run.output[-4000:]
    assert LINES in console(run)
    assert b"\rprogress 0\rprogress 1\rprogress 2" in console(run)
    assert b"last of rank 1" not in console(run)
    folder = run.directory / "0/ranks/attempt_0/1"
    assert (folder / "stdout.log").read_bytes() == LINES + b"\nlast of rank 1\n"
    assert (folder / "stderr.log").read_bytes() == b"\rprogress 0\rprogress 1\rprogress 2"


def test_teed_bytes_and_long_lines(sweep: Run) -> None:
    """Teed, the file has the bytes and the console a readable form of them; no line is cut."""
    run = sweep("speaking.py", "hydra.launcher.tee='3'").wait()
    assert run.status == 0, run.output[-4000:]
    folder = run.directory / "0/ranks/attempt_0/0"
    assert (folder / "stdout.log").read_bytes() == LINES + b"\nlast of rank 0\n"
    assert b"[default0]:" + LINES.splitlines()[1] + b"\n" in console(run)
    assert b"[default0]:last of rank 0\n" in console(run)
    assert b"no text" in console(run)


def test_teed_lines_are_whole(sweep: Run) -> None:
    """A line that is teed while it is being written is shown once it is whole."""
    run = sweep("speaking.py", "hydra.launcher.tee='1'", environ={"SPEAK": "in pieces"}).wait()
    assert run.status == 0, run.output
    assert "\n[default0]:a line in four pieces\n[default0]:no end\n" in run.output


@pytest.mark.parametrize(
    ("kind", "paused_s"),
    [("pipe", 40), ("terminal", 3)],  # 40: longer than any process of a job may keep silent
)
def test_console_that_takes_nothing(tmp_path: Path, kind: str, paused_s: float) -> None:
    """A paused reader of the console holds up what is teed, for as long as it likes, and no job.

    That is so for both of a rank's streams, and for several jobs at once.
    """
    reader, writer = os.pipe() if kind == "pipe" else pty.openpty()
    command = [
        sys.executable, str(APPS / "speaking.py"), "-m", "hydra/launcher=torchrun",
        "hydra.launcher.nproc_per_node=1", f"hydra.sweep.dir={tmp_path}", "hydra.launcher.tee='3'",
        "hydra.launcher.n_jobs=2", "+n=0,1",
    ]  # fmt: skip
    app = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer,
        start_new_session=True, env={**os.environ, "SPEAK": "much"}, cwd=tmp_path,
    )  # fmt: skip
    os.close(writer)
    streams = [(job, stream) for job in (0, 1) for stream in ("stdout", "stderr")]
    logs = [tmp_path / f"{job}/ranks/attempt_0/0/{stream}.log" for job, stream in streams]
    deadline = time.monotonic() + HANG_S
    while not all(log.exists() and len(log.read_bytes().splitlines()) == 3000 for log in logs):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(subprocess.TimeoutExpired):
        app.wait(paused_s)
    shown = b""
    with suppress(OSError):  # the terminal's end
        while data := os.read(reader, 65536):
            shown += data
    os.close(reader)
    assert app.wait(HANG_S) == 0, shown[-4000:]
    for job in (0, 1):
        prefix = f"[job #{job}, rank 0] ".encode()
        lines = [line for line in shown.replace(b"\r", b"").split(b"\n") if prefix in line]
        expected = [prefix + line for line in logs[2 * job].read_bytes().splitlines()]
        assert sorted(lines) == sorted(2 * expected)


def test_torchs_filters_of_teed_lines(sweep: Run) -> None:
    """Torch's filters, set by `extra`, find the teed lines that they look for."""
    run = sweep(
        "speaking.py", "hydra.launcher.tee='1'", "hydra.launcher.local_ranks_filter=''",
        "+hydra.launcher.extra.duplicate_stdout_filters=['rank 1']", environ={"SPEAK": "little"},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert run.output.count("[default1]:rank 1 speaks\n") == 1
    filtered = run.directory / "0/ranks/attempt_0/filtered_stdout.log"
    assert filtered.read_text() == "[default1]:rank 1 speaks\n"


def test_ranks_above_nine(sweep: Run) -> None:
    """Every rank can be addressed by its number."""
    run = sweep(
        "speaking.py", "hydra.launcher.tee='11:1'", "hydra.launcher.redirects='10:1'",
        "hydra.launcher.local_ranks_filter='0,10,11'", environ={"SPEAK": "little"}, nproc=12,
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    spoke = {line for line in run.output.splitlines() if "speaks" in line}
    assert spoke == {"rank 0 speaks", "[default11]:rank 11 speaks"}
    folder = run.directory / "0/ranks/attempt_0"
    written = {
        int(path.parent.name) for path in folder.glob("*/stdout.log") if path.read_text().strip()
    }
    assert written == set(range(1, 12))


def test_terminal_stays_a_terminal(tmp_path: Path) -> None:
    """On a terminal rank 0 has the terminal, its size included; other ranks have files."""
    controller, terminal = pty.openpty()
    command = [
        sys.executable, str(APPS / "speaking.py"), "-m", "hydra/launcher=torchrun",
        "hydra.launcher.nproc_per_node=2", f"hydra.sweep.dir={tmp_path}",
    ]  # fmt: skip
    app = subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        env={**os.environ, "SPEAK": "little"}, cwd=tmp_path,
    )  # fmt: skip
    os.close(terminal)
    shown = b""
    deadline = time.monotonic() + HANG_S
    with selectors.DefaultSelector() as selector:
        selector.register(controller, selectors.EVENT_READ)
        while selector.select(max(0.0, deadline - time.monotonic())):
            try:
                shown += os.read(controller, 65536)
            except OSError:  # the last process on the terminal has left
                break
    os.close(controller)
    assert app.wait(HANG_S) == 0, shown
    assert b"rank 0 speaks\r\n" in shown
    first, second = (json.loads((tmp_path / f"0/rank{rank}.json").read_text()) for rank in range(2))
    assert first["tty"] == [True, True, True]
    assert first["columns"] is not None
    assert second["tty"][1:] == [False, False]


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_last_words(sweep: Run, method: str) -> None:
    """What a rank printed before it was killed is not lost in a buffer."""
    run = sweep("last_words.py", f"hydra.launcher.start_method={method}", nproc=1).wait()
    assert "last words of rank 0" in run.output
    assert "was killed by SIGKILL" in run.output


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_standard_input(sweep: Run, method: str) -> None:
    """A rank can read what was piped into the app."""
    run = sweep(
        "speaking.py", f"hydra.launcher.start_method={method}", nproc=1, stdin="a word",
        environ={"SPEAK": "what it hears"},
    ).wait()  # fmt: skip
    assert "heard a word" in run.output
