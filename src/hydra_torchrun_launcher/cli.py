"""The command `hydra-torchrun`: looks at a sweep's directory, while it runs or afterwards (runs in
the user's shell).
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from itertools import chain
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hydra_torchrun_launcher import job_logs, report, tables
from hydra_torchrun_launcher.errors import LookError, one_line, printable
from hydra_torchrun_launcher.sweep_state import Reader, SweepState

_LOOK_S = 1.0
"""Between two looks at a sweep's directory."""
_JSON_VERSION = 1
_INNER = {"spans", "keeper"}
"""What of a job is not told."""
_WIDE = 10_000
"""Columns where no terminal cuts lines."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: its words; None: those of this process.

    Returns:
        0; 1 where what is asked for is not there. Wrong words end it with 2.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` has had enough: leave, say nothing
    if sys.stdout is None:  # it was closed: nobody listens
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - to the end
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    chosen = _parser().parse_args(arguments)
    try:
        chosen.act(chosen)
    except LookError as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"{error.filename or ''}: {error.strerror or error}".lstrip(": "))
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.raise_signal(signal.SIGINT)
    return 0


def _refuse(problem: str) -> int:
    lines = "\n".join(map(one_line, printable(problem).split("\n")))
    print(f"hydra-torchrun: {lines}", file=sys.stderr)  # noqa: T201 - its output
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hydra-torchrun",
        description="Look at a sweep that hydra/launcher=torchrun runs or ran.",
    )
    number = metadata.version("hydra-torchrun-launcher")
    parser.add_argument("--version", action="version", version=number)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    status = commands.add_parser("status", help="a table of the sweep's jobs")
    status.add_argument("--json", action="store_true", help="as a JSON object")
    status.add_argument("--watch", action="store_true", help="until the sweep has ended")
    status.set_defaults(act=_status)
    logs = commands.add_parser("logs", help="what a rank has written")
    logs.add_argument("--job", type=int, required=True, help="the job's number, hydra.job.num")
    logs.add_argument("--rank", type=int, default=0, help="the rank; default: 0")
    logs.add_argument("--follow", action="store_true", help="go on until the job has ended")
    logs.set_defaults(act=_logs)
    page = commands.add_parser("report", help="a page for the browser, all in one file")
    page.add_argument("-o", "--output", default="report.html", help="default: report.html")
    page.set_defaults(act=_report)
    for command in (status, logs, page):
        command.add_argument("directory", metavar="SWEEP_DIR", help="hydra.sweep.dir")
    return parser


def _status(chosen: argparse.Namespace) -> None:
    reader = Reader(chosen.directory)
    if chosen.json:
        _write(json.dumps(as_json(reader.read()), indent=2))
        return
    console = Console(highlight=False)
    width = console.width if sys.stdout.isatty() else None  # FORCE_COLOR makes no terminal
    console.width = width or _WIDE
    sweep = _watched(reader, console) if chosen.watch else reader.read()
    with console.capture() as captured:
        console.print(tables.table(sweep, time.time(), width))
        if sweep.earlier:
            console.print(Text(f"jobs of earlier sweeps there: {len(sweep.earlier)}", "dim"))
        if sweep.unread:
            console.print(Text(f"files that hold no event known here: {sweep.unread}", "dim"))
    _write("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _watched(reader: Reader, console: Console) -> SweepState:
    """Show a sweep until it does not run any more."""
    if not sys.stdout.isatty() or console.is_dumb_terminal:
        dumb = f" whose cursor can be moved (TERM={os.environ.get('TERM')})"
        problem = (
            f"--watch needs a terminal{dumb * sys.stdout.isatty()}; without --watch, or with "
            "--json, it says what is now"
        )
        raise LookError(problem)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while (sweep := reader.read()).state == "running":
            live.update(
                tables.table(sweep, time.time(), console.width, console.height), refresh=True
            )
            time.sleep(_LOOK_S)
    return sweep


def as_json(sweep: SweepState) -> dict[str, Any]:
    """Return a sweep as `status --json` writes it."""
    jobs = []
    for job in sweep.jobs.values():
        known = asdict(job)
        folders = known.pop("attempts")[-1:]
        known = {name: value for name, value in known.items() if name not in _INNER}
        jobs.append({"job": known.pop("number"), **known, "folders": [*chain(*folders)]})
    head = {name: value for name, value in vars(sweep).items() if name not in {"jobs", "earlier"}}
    return {"v": _JSON_VERSION, **head, "counts": sweep.counts(), "jobs": jobs}


def _logs(chosen: argparse.Namespace) -> None:
    reader = Reader(chosen.directory)
    output = sys.stdout.buffer
    is_told = False
    logs = job_logs.JobLogs(reader, chosen.job, chosen.rank, follow=chosen.follow)
    while True:
        for data in logs.new():  # after the look that says whether it is over: nothing is missed
            output.write(data)
        output.flush()
        if logs.is_over or not chosen.follow:
            logs.say_why_no_more()
            return
        if logs.waits_for and not is_told:
            print(f"hydra-torchrun: {logs.waits_for}", file=sys.stderr)  # noqa: T201 - its output
            is_told = True
        time.sleep(_LOOK_S / 5)
        logs.look()


def _report(chosen: argparse.Namespace) -> None:
    page = report.page(Reader(chosen.directory).read(), time.time())
    if chosen.output == "-":
        _write(page)
        return
    target = os.path.realpath(chosen.output)
    is_special = os.path.exists(target) and not os.path.isfile(target)  # /dev/stdout
    unfinished = target if is_special else f"{target}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "w", encoding="utf-8") as file:
            file.write(page)
        if not is_special:
            os.replace(unfinished, target)
    except OSError as error:
        if not is_special and os.path.exists(unfinished):
            os.unlink(unfinished)
        problem = f"--output={chosen.output}: {error.strerror or error}"
        raise LookError(problem) from None
    _write(chosen.output)


def _write(text: str) -> None:
    sys.stdout.write(printable(text, sys.stdout.encoding) + "\n")
