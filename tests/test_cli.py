"""The command `hydra-torchrun`, against what the ranks of real sweeps recorded."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import HANG_S, Sweep, send
from running import read_records
from terminals import Terminal

from hydra_torchrun_launcher import claims, events, report, tables
from hydra_torchrun_launcher.cli import as_json
from hydra_torchrun_launcher.job_logs import JobLogs
from hydra_torchrun_launcher.job_state import JobState
from hydra_torchrun_launcher.sweep_state import Reader, SweepState
from hydra_torchrun_launcher.telling import duration, numbers_of, value_text

Run = Callable[..., Sweep]

COMMAND = "import sys; from hydra_torchrun_launcher.cli import main; sys.exit(main())"


def cli(*words: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [sys.executable, "-c", COMMAND, *map(str, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        env=env,
        timeout=HANG_S,
    )


def status(run: Sweep) -> dict[str, Any]:
    """Return what `status --json` says."""
    result = cli("status", run.directory, "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert isinstance(found, dict)
    return found


@dataclass
class Ended:
    """A sweep that has ended, and what its ranks recorded."""

    run: Sweep
    records: Path

    def of(self, job: int) -> list[dict[str, Any]]:
        """Return what the ranks of a job recorded, ranks in order."""
        found = [record for record in read_records(self.records) if record["job"] == job]
        return sorted(found, key=lambda record: record["rank"])


@pytest.fixture(scope="module")
def ended(start_sweep: Run, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Run three jobs of two ranks, of which the second fails, after a retry."""
    records = tmp_path_factory.mktemp("records")
    run = start_sweep(
        "pooled.py", "n=3,1,5", "+fail={1:true}", "lines=3", "length=4", "hydra.launcher.n_jobs=2",
        "hydra.launcher.devices=[0,1,2,3]", "hydra.launcher.retries=1",
        environ={"RANK_RECORDS": str(records)},
    ).wait()  # fmt: skip
    assert run.status == 1, run.output
    return Ended(run, records)


def test_status_is_what_ranks_recorded(ended: Ended) -> None:
    """Devices, processes, values, times and causes."""
    found = status(ended.run)
    assert (found["v"], found["state"], found["app"]) == (1, "ended", "pooled")
    assert found["counts"]["completed"] == 2
    assert found["counts"]["failed"] == 1
    first, failed, last = found["jobs"]
    assert [job["job"] for job in found["jobs"]] == [0, 1, 2]
    for job, n in ((first, 3), (last, 5)):
        ranks = ended.of(job["job"])
        assert job["overrides"] == [f"n={n}", "+fail={1:True}", "lines=3", "length=4"]
        assert (job["state"], job["value"], job["retry"]) == ("completed", n, 0)
        assert job["pids"] == [rank["pid"] for rank in ranks]
        assert job["devices"] == ranks[0]["seen"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert job["queued"] < job["started"] < job["ended"]
        for number, folder in enumerate(job["folders"]):
            assert folder == str(ended.run.directory / f"{job['job']}/ranks/attempt_0/{number}")
    assert (failed["state"], failed["error"], failed["retry"]) == ("failed", "ValueError", 1)
    assert failed["what"] == "raised ValueError: job 1 was asked to fail"
    assert Path(failed["log"]).read_text().endswith("job 1 was asked to fail\n")


def test_status_as_a_table(ended: Ended) -> None:
    """A line each; piped, it is as wide as it needs to be, without colours."""
    result = cli("status", ended.run.directory)
    head, *jobs, totals = result.stdout.splitlines()
    assert head.split() == ["job", "state", "overrides", "on", "time", "value"]
    assert re.fullmatch(r"  0 completed +n=3 +[0-3],[0-3] +\S+ s 3", jobs[0]), jobs
    assert re.match(
        r"  1 failed \(retry 1\) +n=1 +[0-3],[0-3] .* raised ValueError: job 1", jobs[1]
    )
    assert re.fullmatch(r"3 of 3 jobs have ended after [\d.]+ s  2 completed  1 failed", totals)
    assert "\x1b" not in result.stdout
    environ = {**os.environ, "FORCE_COLOR": "1"}
    forced = cli("status", ended.run.directory, env=environ).stdout
    plain = re.sub(r"\x1b\[[\d;]*m", "", forced).splitlines()
    assert [line.rstrip() for line in plain] == result.stdout.splitlines()


def test_logs_are_what_ranks_wrote(ended: Ended) -> None:
    """Of each rank, of the last try."""
    for job, rank in ((0, 0), (0, 1), (1, 0), (1, 1), (2, 1)):
        result = cli("logs", ended.run.directory, "--job", job, "--rank", rank)
        folder = ended.run.directory / f"{job}/ranks/attempt_{int(job == 1)}/{rank}"
        expected = "\n".join(
            f"==> {folder / name} <==\n{(folder / name).read_text()}"
            for name in ("stdout.log", "stderr.log")
        )
        assert result.stdout == expected
        assert f"<{job} 2 xxxx end>" in result.stdout


def test_report_is_what_ranks_recorded(ended: Ended, tmp_path: Path) -> None:
    """The page holds the same facts, a span for each device and try, and nothing from outside."""
    result = cli("report", ended.run.directory, "-o", tmp_path / "page.html")
    assert (result.returncode, result.stdout) == (0, f"{tmp_path / 'page.html'}\n"), result.stderr
    assert os.listdir(tmp_path) == ["page.html"]
    (tmp_path / "link.html").symlink_to("page.html")
    cli("report", ended.run.directory, "-o", tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert cli("report", ended.run.directory, "-o", "/dev/null").returncode == 0
    assert Path("/dev/null").is_char_device()
    facts = data_of((tmp_path / "page.html").read_text())
    assert [job["numbers"] for job in facts["jobs"]] == [{"value": 3}, {}, {"value": 5}]
    assert [job["params"]["n"] for job in facts["jobs"]] == [3, 1, 5]
    for job in (0, 2):
        spans = [span for span in facts["spans"] if span["job"] == job]
        record = ended.of(job)[0]
        assert [s["lane"] for s in spans] == record["seen"]["CUDA_VISIBLE_DEVICES"].split(",")
        assert {span["state"] for span in spans} == {"completed"}
        # A rank may begin before the launching process has heard of it.
        assert all(max(span["start"], record["clock"]) < span["end"] for span in spans)
    (trace,) = [job["traceback"] for job in facts["jobs"] if job["traceback"]]
    assert trace.startswith("Traceback ")
    assert trace.endswith("ValueError: job 1 was asked to fail\n")
    states = [span["state"] for span in facts["spans"] if span["job"] == 1]
    assert sorted(states) == ["failed", "failed", "failed_try", "failed_try"]
    assert data_of(cli("report", ended.run.directory, "-o", "-").stdout)["jobs"] == facts["jobs"]


def data_of(page: str) -> dict[str, Any]:
    """Return the data in a report."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    assert not re.search(r"(src|href)=.?https?:", page)
    data = json.loads(found[1])
    assert isinstance(data, dict)
    return data


@pytest.fixture
def start(sweep: Run, tmp_path: Path) -> Run:
    """Start the app whose ranks write down what they have."""
    records = tmp_path / "records"
    records.mkdir()

    def run(*overrides: str, **more: Any) -> Sweep:
        return sweep("pooled.py", *overrides, environ={"RANK_RECORDS": str(records)}, **more)

    return run


def test_sweep_that_runs_and_is_killed(start: Run) -> None:
    """It is said to run, until its launching process is killed."""
    run = start("n=0,1,2", "+holds={0:0,1:60,2:0}", nproc=1)
    run.await_file("../records/try.1.0")
    found = status(run)
    while found["jobs"][1]["state"] == "queued":  # the rank was faster than its keeper's word
        found = status(run)
    assert found["state"] == "running"
    assert [job["state"] for job in found["jobs"]] == ["completed", "running", "queued"]
    send(run.popen, signal.SIGKILL)
    run.popen.wait(HANG_S)
    found = status(run)
    assert found["state"] == "killed"
    assert [job["state"] for job in found["jobs"]] == ["completed", "lost", "queued"]
    table = cli("status", run.directory).stdout
    assert re.search(r"^  1 lost +n=1", table, re.MULTILINE), table
    assert re.search(r"^  2 not started +n=2", table, re.MULTILINE)
    assert "the launching process was killed" in table
    facts = data_of(cli("report", run.directory, "-o", "-").stdout)
    (lost,) = [span for span in facts["spans"] if span["job"] == 1]
    assert lost["state"] == "lost"


def test_logs_that_are_followed(start: Run) -> None:
    """They go on over a restart, to the job's end, from before its start."""
    run = start(
        "n=0,1", "+holds={0:4,1:0}", "+fail={1:true}", "fail_until=1", "lines=2",
        "hydra.launcher.max_restarts=1",
    )  # fmt: skip
    run.await_file(".torchrun/1.jsonl")
    logs = JobLogs(Reader(str(run.directory)), 1, 1, follow=True)
    result = cli("logs", run.directory, "--job", 1, "--rank", 1, "--follow")
    assert result.stderr == "hydra-torchrun: job #1 is queued; waiting for it to start\n"
    folders = [run.directory / f"1/ranks/attempt_{number}/1" for number in (0, 1)]
    for path in [folder / name for folder in folders for name in ("stdout.log", "stderr.log")]:
        assert f"==> {path} <==\n<1 0" in result.stdout, result.stderr
        assert path.read_text()[-200:] in result.stdout
    assert result.stdout.count("<1 0 x end>") == 2, "once for each attempt"
    run.wait()
    logs.look()
    assert b"".join(logs.new()).count(b"<1 0 x end>") == 2, "also if both were over at this look"


def test_job_that_was_taken_over(start: Run, tmp_path: Path) -> None:
    """Its logs and devices are its own, also under another number and in a directory for all."""
    words = (
        "lines=1", "hydra.sweep.subdir=all", f"hydra.sweep.dir={tmp_path / 'sweep'}",
        "hydra.launcher.devices=[4,5]",
    )  # fmt: skip
    assert start(*words, "n=0,1", sweep_dir=None).wait().status == 0
    for order in ("n=1,0", "n=5,1,0"):
        run = start(*words, order, "hydra.launcher.resume=true", sweep_dir=None).wait()
        assert run.status == 0, run.output
    result = cli("logs", tmp_path / "sweep", "--job", 1, "--rank", 1)
    assert "all/ranks/job1/attempt_0/1/stdout.log" in result.stdout, result.stderr
    assert "<1 0 x end>" in result.stdout
    assert "<0 " not in result.stdout
    facts = data_of(cli("report", tmp_path / "sweep", "-o", "-").stdout)
    assert [(job["ran_as"], job["devices"]) for job in facts["jobs"]] == [
        (None, "4,5"), (1, "4,5"), (0, "4,5"),
    ]  # fmt: skip
    table = cli("status", tmp_path / "sweep").stdout
    assert re.search(r"^  2 completed \(before\) +n=0 +4,5", table, re.MULTILINE), table


def test_watch(start: Run) -> None:
    """The table stays on the terminal until the sweep ends; then it is printed once."""
    run = start("n=0,1", "hold=3", nproc=1)
    run.await_file(".torchrun/1.jsonl")
    words = ["-c", COMMAND, "status", "--watch", str(run.directory)]
    terminal = Terminal(words, run.directory, {"TERM": "xterm-256color"}, (12, 80))
    terminal.await_screen(lambda lines: any(re.match("  0 running", line) for line in lines))
    assert terminal.wait() == 0
    shown = terminal.lines()
    terminal.close()
    assert any(re.match("2 of 2 jobs have ended after .* 2 completed", line) for line in shown)
    run.wait()
    piped = cli("status", "--watch", run.directory)
    assert (piped.returncode, piped.stderr.count("\n")) == (1, 1)
    assert "--watch needs a terminal; without" in piped.stderr
    dumb = Terminal(words, run.directory, {"TERM": "dumb"}, (12, 80))
    assert dumb.wait() == 1
    assert "--watch needs a terminal whose cursor can be moved (TERM=dumb)" in dumb.everything()
    dumb.close()


def test_mistakes(ended: Ended, tmp_path: Path) -> None:
    """Each is one sentence that says what is there, and status 1."""
    there = ended.run.directory
    expected = {
        ("status", tmp_path / "none"): "is no directory; expected the directory of a sweep",
        ("status", tmp_path): "holds no record of a sweep (no folder .torchrun)",
        ("status", there / "0"): f"its parent does: {there}",
        ("status", there.parent): f"The last sweeps below it were in\n  {there}",
        ("logs", there, "--job", 7): "there is no job #7 (it has 3 jobs, from #0 to #2)",
        ("logs", there, "--job", 0, "--rank", 2): "job #0 has no rank 2; it has ranks 0 to 1",
        ("logs", there, "--job", 0, "--rank", "-1"): "--rank=-1: expected a number from 0",
        ("report", there, "-o", tmp_path / "no/page"): "--output=",
    }
    for words, text in expected.items():
        result = cli(*words)
        assert result.returncode == 1, words
        assert text in result.stderr
        assert "Traceback" not in result.stderr
    assert re.fullmatch(r"\d+\.\d+\.\d+\n", cli("--version").stdout)
    assert cli("status").returncode == 2
    assert cli("look", there).returncode == 2


def test_reader_that_goes_away(tmp_path: Path) -> None:
    """`| head` is no error."""
    for number in range(300):
        events.EventFile(tmp_path / ".torchrun", number).add("queued", overrides=["x" * 500])
    command = f"{sys.executable} -c '{COMMAND}' status --json {tmp_path}"
    shell = f"set -o pipefail; {command} | head -c 1"
    result = subprocess.run(
        ["bash", "-c", shell], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (128 + signal.SIGPIPE, "{", "")


OLDER = """\
{"v": 1, "event": "queued", "time": 1764600000.0, "job": 0, "overrides": ["n=1"]}
{"v": 1, "event": "started", "time": 1764600001.0, "job": 0, "retry": 0, "attempt": 0, \
"pids": [10, 11], "keeper": 9, "output_dir": "DIR/0", "devices": ["0"], "cores": null}
{"v": 1, "event": "completed", "time": 1764600004.5, "job": 0, "value": 0.25, "retry": 0, \
"seconds": 4.5}
"""


def test_directory_of_an_older_version(tmp_path: Path) -> None:
    """What it has is shown: there were no claims, and events had fewer fields."""
    folder = tmp_path / ".torchrun"
    folder.mkdir()
    (folder / "0.jsonl").write_text(OLDER.replace("DIR", str(tmp_path)))
    (folder / "1.jsonl").write_text(
        (folder / "0.jsonl")
        .read_text()
        .replace('"job": 0', '"job": 1')
        .replace(f"{tmp_path}/0", f"{tmp_path}/1")
        .rpartition('{"v"')[0]
    )
    (folder / "2.jsonl").write_text('{"v": 2, "event": "of a later version", "time": 1, "job": 2}')
    rank = tmp_path / "0/ranks/attempt_3/1"
    rank.mkdir(parents=True)
    (rank / "stdout.log").write_text("printed by rank 1\n")
    sweep = Reader(str(tmp_path)).read()
    assert (sweep.state, sweep.unread) == ("killed", 1)
    assert [job.state for job in sweep.jobs.values()] == ["completed", "lost"]
    assert (sweep.jobs[0].value, sweep.jobs[0].seconds, sweep.started) == (0.25, 4.5, None)
    table = cli("status", tmp_path).stdout
    assert "0.25" in table
    assert table.endswith("files that hold no event known here: 1\n")
    assert "printed by rank 1" in cli("logs", tmp_path, "--job", 0, "--rank", 1).stdout
    assert data_of(cli("report", tmp_path, "-o", "-").stdout)["jobs"][0]["numbers"] == {
        "value": 0.25
    }


def looked_at(directory: Path) -> SweepState:
    """Read a directory and show it in every way."""
    sweep = Reader(str(directory)).read()
    tables.table(sweep, time.time())
    json.dumps(as_json(sweep), allow_nan=False)
    page = report.page(sweep, time.time())
    assert len(data_of(page)["jobs"]) == len(sweep.jobs)
    return sweep


def test_records_cut_anywhere(tmp_path: Path, ended: Ended) -> None:
    """What stands in whole lines counts, of each file; half a claim is none."""
    folder = tmp_path / ".torchrun"
    folder.mkdir()
    whole = (ended.run.directory / ".torchrun/1.jsonl").read_bytes()
    lines = [json.loads(line) for line in whole.splitlines()]
    states: list[str | None] = [None]
    for count in range(len(lines)):
        job = JobState(1)
        for event in lines[: count + 1]:
            job.take_in(event)
        job.lose(None)
        states.append(job.state)
    for length in range(len(whole) + 1):
        (folder / "1.jsonl").write_bytes(whole[:length])
        jobs = Reader(str(tmp_path)).read().jobs
        assert (jobs[1].state if jobs else None) == states[whole[:length].count(b"\n")]
    looked_at(tmp_path)
    claim = (ended.run.directory / ".torchrun/sweep.0.json").read_bytes()
    for length in range(len(claim) + 1):
        (folder / "sweep.0.json").write_bytes(claim[:length])
        assert looked_at(tmp_path).jobs[1].state == "failed"


ODD: tuple[Any, ...] = (
    None, -1, 3, 1e400, float("nan"), 10**400, "x", "", [], [{}], {}, True,
    "\0", ["\0"], ["\ud800"],
)  # fmt: skip


def test_claim_that_is_being_written(tmp_path: Path) -> None:
    """The sweep runs; half a claim that nobody has touched for long is a killed process's."""
    events.EventFile(tmp_path / ".torchrun", 0).add("queued", overrides=[])
    (claim := tmp_path / ".torchrun/sweep.0.json").touch()
    assert Reader(str(tmp_path)).read().state == "running"
    os.utime(claim, (time.time() - 3600,) * 2)
    assert Reader(str(tmp_path)).read().state == "killed"


@pytest.mark.parametrize("pid", ODD)
def test_claim_with_an_odd_process_number(tmp_path: Path, pid: Any) -> None:
    """That a sweep of which no more is known was killed is all that can be said."""
    folder = tmp_path / ".torchrun"
    claims.Claim.take(folder, "there", {"app": "app"})
    events.EventFile(folder, 0).add("queued", overrides=[])
    (claim,) = folder.glob("sweep.*.json")
    claim.write_text(json.dumps({**json.loads(claim.read_text()), "pid": pid}))
    os.utime(claim, (time.time() - 3600,) * 2)
    assert Reader(str(tmp_path)).read().state == "killed"


def test_job_between_two_tries(tmp_path: Path) -> None:
    """It runs, and is lost if its launching process is killed then."""
    file = events.EventFile(tmp_path / ".torchrun", 0)
    file.add("queued", overrides=[])
    file.add("failed_try", retry=0)
    claims.Claim.take(tmp_path / ".torchrun", "there", {})
    file.add("queued", overrides=[])
    file.add("failed_try", retry=0)
    (job,) = Reader(str(tmp_path)).read().jobs.values()
    assert (job.state, job.retry) == ("running", 1)
    (claim,) = (tmp_path / ".torchrun").glob("sweep.*")
    claim.write_text(claim.read_text().replace('"start": ', '"start": 1'))
    assert Reader(str(tmp_path)).read().jobs[0].state == "lost"


def test_end_of_a_lost_job(tmp_path: Path) -> None:
    """It is when the job was heard of last, by whatever of it was."""
    (folder := tmp_path / "ranks").mkdir()
    (log := folder / "stdout.log").touch()
    (records := tmp_path / ".torchrun").mkdir()
    for number, folders in enumerate(([None], [str(folder)])):
        started = {"time": 100.0, "pids": [1], "folders": folders}
        event = {"v": 1, "event": "started", "job": number, **started}
        (records / f"{number}.jsonl").write_text(json.dumps(event) + "\n")
    (records / "2.jsonl").write_text('{"v": 1, "event": "queued", "time": 130, "job": 2}\n')
    os.utime(log, (170, 170))
    jobs = Reader(str(tmp_path)).read().jobs
    assert [span.end for number in (0, 1) for span in jobs[number].spans] == [130, 170]


def test_events_of_another_job(tmp_path: Path) -> None:
    """What a file holds of another job than its own does not count."""
    events.EventFile(tmp_path / ".torchrun", 3).add("queued", overrides=["a=1"])
    (tmp_path / ".torchrun/3.jsonl").rename(tmp_path / ".torchrun/4.jsonl")
    sweep = Reader(str(tmp_path)).read()
    assert (sweep.jobs, sweep.unread) == ({}, 1)


def test_edited_records(tmp_path: Path, ended: Ended) -> None:
    """Whatever stands in a field, it is no crash, and the other jobs are as they were."""
    folder = tmp_path / ".torchrun"
    folder.mkdir()
    for path in (ended.run.directory / ".torchrun").glob("*"):
        (folder / path.name).write_bytes(path.read_bytes())
    for name in ("0.jsonl", "1.jsonl", "sweep.0.json"):
        whole = (folder / name).read_text()
        lines = [json.loads(line) for line in whole.splitlines()]
        for number, line in enumerate(lines):
            for key in line:
                for odd in ODD:
                    edited = [*lines[:number], {**line, key: odd}, *lines[number + 1 :]]
                    (folder / name).write_text("".join(json.dumps(e) + "\n" for e in edited))
                    assert looked_at(tmp_path).jobs[2].value == 5, (name, key, odd)
        (folder / name).write_text("[" * 100_000 + "\n" + whole)
        assert looked_at(tmp_path).jobs[2].value == 5
        (folder / name).write_text(whole)


def test_second_sweep_in_a_directory(tmp_path: Path) -> None:
    """The last one's jobs are shown; what it did not have is counted."""
    folder = tmp_path / ".torchrun"
    for number in range(3):
        events.EventFile(folder, number).add("queued", overrides=["a=1"])
    claim = claims.Claim.take(folder, "there", {"app": "app"})
    events.EventFile(folder, 0).add("queued", overrides=["a=2"])
    sweep = Reader(str(tmp_path)).read()
    assert (sweep.state, list(sweep.jobs), list(sweep.earlier)) == ("running", [0], [1, 2])
    assert sweep.jobs[0].overrides == ("a=2",)
    assert "jobs of earlier sweeps there: 2" in cli("status", tmp_path).stdout
    claim.release()
    assert Reader(str(tmp_path)).read().state == "ended"


def test_hostile_texts(tmp_path: Path) -> None:
    """They disturb neither the terminal nor the page."""
    text = "</script><img src=x onerror=alert(1)>[bold]\x1b[2J\u2028\n"
    file = events.EventFile(tmp_path / ".torchrun", 0)
    file.add("queued", overrides=[f"a={text}"])
    file.add("failed", error="E", message=text, log=text, seconds=1)
    table = cli("status", tmp_path).stdout
    assert "\x1b" not in table
    assert "[bold]\\u001b[2J\\u2028\\n" in table
    page = cli("report", tmp_path, "-o", "-").stdout
    assert text[:20] not in page
    assert data_of(page)["jobs"][0]["message"] == text
    place = "\x1b]0;title\x07"
    events.EventFile(tmp_path / ".torchrun", 1).add("started", output_dir=place, pids=[1])
    assert "\\u001b]0;title\\u0007" in cli("logs", tmp_path, "--job", "1").stderr


def many(count: int) -> SweepState:
    """Return a sweep of that many jobs, of which some run, wait and failed."""
    sweep = SweepState("there", started=0.0)
    for number in range(count):
        job = JobState(number, (f"lr={number}", "all=1"), queued=1.0)
        if number < count * 0.9:
            job.state, job.started, job.ended, job.seconds = "completed", 1.0, 2.0 + number, 4.0
        sweep.jobs[number] = job
    sweep.jobs[3].state = "failed"
    for number in (count - 5, count - 4):
        sweep.jobs[number].state, sweep.jobs[number].started = "running", 1000.0
    return sweep


def test_hundreds_of_jobs() -> None:
    """Where there is no room for all, what runs and what failed comes first."""
    from rich.console import Console

    console = Console(width=100)
    with console.capture() as captured:
        console.print(tables.table(many(500), 1002.0, height=12))
    lines = captured.get().splitlines()
    assert len(lines) == 12
    shown = [int(line.split()[0]) for line in lines[1:10]]
    assert shown == [3, *range(450, 456), 495, 496]
    assert lines[10].strip() == "… and 491 more jobs"
    # 48 wait for 4 s each and 2 have 2 s of theirs behind them; two at once.
    assert lines[11].startswith(
        "450 of 500 jobs have ended after 16:42 min, about 1:38 min left  2 running  48 queued"
    )


def test_narrow_terminal() -> None:
    """Overrides and values are cut to its width; numbers, states, places and times are whole."""
    from rich.console import Console

    sweep = many(20)
    for job in sweep.jobs.values():
        job.overrides = ("width=" + "8" * 50, f"n={job.number}")
        job.value, job.devices = {"loss": 1.5, "text": "x" * 200}, ("0", "1")
    console = Console(width=60)
    with console.capture() as captured:
        console.print(tables.table(sweep, 1002.0, width=60))
    head, *jobs, _ = captured.get().splitlines()
    assert head.split() == ["job", "state", "overrides", "on", "time", "value"]
    assert len(jobs) == 20
    for number, line in enumerate(jobs):
        state = sweep.jobs[number].state
        assert re.match(rf" *{number} {state} ", line)
        assert " 0,1 " in line
    assert "4.0 s loss=" in jobs[0]


def test_words() -> None:
    """Values and times are said in short."""
    said = {7.25: "7.2 s", 59.4: "59 s", 185: "3:05 min", 9600: "2:40 h", 273_600: "3 d 4 h"}
    assert {seconds: duration(seconds) for seconds in said} == said
    assert value_text({"a": 1.5, "b": {"!": ["float", "nan"]}, "c": [True, None]}) == (
        "a=1.5, b=nan, c=[True, None]"
    )
    assert value_text({"a": {"b": {"c": 1}, "d": "x"}, "e": {}}) == "a.b.c=1, a.d=x, e="
    assert numbers_of({"a": 1, "b": {"c": 2.5, "d": True}, "!": 3}) == {}
    assert numbers_of({"a": 1, "b": {"c": 2.5, "d": "x"}}) == {"a": 1, "b.c": 2.5}
    assert numbers_of(7) == {"value": 7}
