"""What a person sees of a sweep that runs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import APPS, Sweep
from terminals import Terminal

from hydra_torchrun_launcher.progress import Progress
from hydra_torchrun_launcher.tails import between_lines

Run = Callable[..., Sweep]

SETTINGS = ("hydra/launcher=torchrun", "hydra.launcher.nproc_per_node=1", "hydra.sweep.dir=sweep")
AT_ONCE = ("hydra.launcher.n_jobs=2", "hydra.launcher.devices=[0,1]")


@pytest.fixture
def on_terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Start the pooled app on a terminal."""
    records = tmp_path / "records"
    records.mkdir()
    started: list[Terminal] = []

    def start(
        *overrides: str, size: tuple[int, int] = (30, 100), term: str = "xterm-256color"
    ) -> Terminal:
        command = [str(APPS / "pooled.py"), "-m", *SETTINGS, *overrides]
        environ = {"RANK_RECORDS": str(records), "TERM": term}
        started.append(Terminal(command, tmp_path, environ, size))
        return started[-1]

    yield start
    for terminal in started:
        is_over = terminal.popen.poll() is not None
        terminal.close()
        assert is_over, "the test ended before its app"


def has(*patterns: str) -> Callable[[list[str]], bool]:
    """Ask for lines that match, in this order."""

    def condition(lines: list[str]) -> bool:
        left = iter(lines)
        return all(any(re.search(pattern, line) for line in left) for pattern in patterns)

    return condition


def test_table(on_terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """It stands below all other output, which loses nothing by it, and goes with the sweep."""
    jobs = ("n=range(6)", "hold=3", "+fail={1:true}", "lines=20", "length=10")
    terminal = on_terminal(*jobs, *AT_ONCE)
    seen = terminal.await_screen(
        has(
            r"^ *1 failed +n=1 +[01] .* rank 0 raised ValueError: job 1 was asked to fail",
            r"^ *\d running +n=\d +[01] +\d",
            r"^ *\d running +n=\d +[01] +\d",
            r"^ *5 queued +n=5",
            r"^2 of 6 jobs .* left  2 running  2 queued  1 completed  1 failed$",
        )
    )
    rule = next(number for number, line in enumerate(seen) if line.startswith("───"))
    assert len(seen) - rule == 9, "no more than there is to show"
    assert terminal.wait() == 1
    assert terminal.is_whole
    shown = terminal.everything()
    assert "jobs have ended" not in shown, shown
    for line in ("before 0", "before 29", "Launching 6 jobs", "#0 : n=0", "#5 : n=5"):
        assert shown.count(line) == 1, line
    for job in range(6):
        for number in range(20):
            for letter in "xy":
                assert shown.count(f"<{job} {number} {letter * 10} end>") == 1
    for job in (0, 2, 3, 4, 5):
        assert re.search(rf"#{job} : completed in \d.* s, value {job} \(\d of 6", shown), shown


def test_table_of_another_size(on_terminal: Callable[..., Terminal]) -> None:
    """It follows the terminal's size; a small terminal has none, and Ctrl-C gives it back."""
    terminal = on_terminal("n=range(4)", "hold=60", *AT_ONCE)
    terminal.await_screen(lambda lines: has("^0 of 4 jobs .*  2 running")(lines[-1:]))
    terminal.resize(20, 60)
    terminal.await_screen(
        lambda lines: (
            len(lines) == 20 and lines[-6].startswith("───") and lines[-1].startswith("0 of 4 jobs")
        )
    )
    terminal.resize(9, 60)
    terminal.await_screen(lambda lines: not has("jobs have ended")(lines) and terminal.is_whole)
    terminal.resize(30, 100)
    terminal.await_screen(lambda lines: has("^0 of 4 jobs .*  2 running")(lines[-1:]))
    terminal.type(b"\x03")
    assert terminal.wait() == -2
    assert terminal.is_whole
    assert not has("jobs have ended")(terminal.lines())


def test_table_after_another_program(on_terminal: Callable[..., Terminal]) -> None:
    """A process that was stopped and goes on makes room for its table again."""
    terminal = on_terminal("n=range(4)", "+holds={0:6,1:60}", "lines=3", "length=5", *AT_ONCE)
    terminal.await_screen(lambda lines: has("^0 of 4 jobs .*  2 running")(lines[-1:]))
    os.kill(terminal.popen.pid, signal.SIGSTOP)
    terminal.show(b"\x1b[r\x1b[2J\x1b[30;1Hleft by an editor\r\n")  # it ends on the last line
    started = time.monotonic()
    while time.monotonic() - started < 4:  # longer than a few frames
        time.sleep(0.1)
    os.kill(terminal.popen.pid, signal.SIGCONT)
    seen = terminal.await_screen(lambda lines: has("^[1-4] of 4 jobs ")(lines[-1:]))
    assert has("left by an editor", "#0 : completed in", "^───", "^ *0 completed")(seen), "\n".join(
        seen
    )
    terminal.type(b"\x03")
    assert terminal.wait() == -2
    assert terminal.is_whole


def test_many_jobs_on_a_terminal(on_terminal: Callable[..., Terminal]) -> None:
    """The table keeps its height, and what runs is in it."""
    terminal = on_terminal("n=range(40)", "hold=60", *AT_ONCE, size=(60, 80))
    seen = terminal.await_screen(
        has("^ *0 running", "^ *1 running", "^ *2 queued", "^… and 32 more", "^0 of 40 jobs")
    )
    assert seen[-12].startswith("───")
    terminal.type(b"\x03")
    assert terminal.wait() == -2


@pytest.mark.parametrize(("kind", "is_told"), [("auto", True), ("plain", True), ("none", False)])
def test_no_terminal(sweep: Run, tmp_path: Path, kind: str, is_told: bool) -> None:
    """Without a terminal there are plain lines, or nothing of it if so asked."""
    (tmp_path / "records").mkdir()
    run = sweep(
        "pooled.py", "n=1,2", f"hydra.launcher.progress={kind}", nproc=1,
        environ={"RANK_RECORDS": str(tmp_path / "records"), "TERM": "xterm"},
    ).wait()  # fmt: skip
    assert run.status == 0, run.output
    assert "\x1b" not in run.output
    told = re.findall(r"#(\d) : completed in [\d.]+ s, value (\d) \((\d) of 2", run.output)
    assert told == ([("0", "1", "1"), ("1", "2", "2")] if is_told else [])


HOLDER = """
import fcntl, pathlib, sys, time
fcntl.lockf(1, fcntl.LOCK_EX, 1, 1)
pathlib.Path("locked").touch()
time.sleep(0.4)
pathlib.Path("left").write_text(str(time.monotonic()))
"""


def test_line_that_waits_for_anothers_end(tmp_path: Path) -> None:
    """The launching process says nothing in the middle of a job's line."""
    reader, writer = os.pipe()
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdout=writer, cwd=tmp_path) as holder:
        while not (tmp_path / "locked").exists():
            assert holder.poll() is None
        descriptors = os.listdir("/proc/self/fd")
        with between_lines(writer):
            entered = time.monotonic()
        assert os.listdir("/proc/self/fd") == descriptors
    os.close(reader)
    os.close(writer)
    assert entered >= float((tmp_path / "left").read_text())


def test_mistake_of_ours_ends_no_sweep(caplog: pytest.LogCaptureFixture) -> None:
    """It is said once, and nothing is shown any more."""
    progress = Progress("plain")
    progress.take_in({"event": "completed", "job": []})
    progress.take_in({"event": "completed", "job": []})
    assert [record.getMessage() for record in caplog.records] == [
        "Progress is not shown any more; the sweep goes on"
    ]


@pytest.mark.parametrize(
    ("setting", "term"), [("plain", "xterm"), ("none", "xterm"), ("auto", "dumb")]
)
def test_no_table(on_terminal: Callable[..., Terminal], setting: str, term: str) -> None:
    """A terminal has none if it is not wanted, or cannot show one."""
    terminal = on_terminal("n=1,2", f"hydra.launcher.progress={setting}", term=term)
    assert terminal.wait() == 0
    assert b"\x1b" not in terminal.written
    assert ("completed in" in terminal.everything()) == (setting != "none")
