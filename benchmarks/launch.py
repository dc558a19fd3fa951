"""Measure what the launcher costs, as shares of torchrun's cost for the same app.

Each round runs its commands one after another: torchrun, a sweep of one job, a sweep of eleven,
with our decorator a single run and torchrun, and sweeps of one longer job and of eight at once. A
ratio is formed within its round, so that a machine that changes speed between rounds changes both
its sides. CPU seconds are those of every process that a command started.
"""

import argparse
import ctypes
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

APP = Path(__file__).with_name("app.py")
RANKS = 2
FURTHER_JOBS = 10
AT_ONCE, HOLD_S = 8, 2
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Cost:
    """Seconds that a command took: on the clock, and of all its processes' CPU time."""

    wall_s: float
    cpu_s: float


def torchrun() -> list[str]:
    """Return torchrun's command for the app."""
    module = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"]
    return [sys.executable, *module, str(APP)]


def sweep(jobs: int) -> list[str]:
    """Return the launcher's command for a sweep of so many jobs."""
    numbers = ",".join(map(str, range(jobs)))
    launcher = ["hydra/launcher=torchrun", f"hydra.launcher.nproc_per_node={RANKS}"]
    return [sys.executable, str(APP), "-m", *launcher, f"+job={numbers}"]


def at_once(jobs: int) -> list[str]:
    """Return the launcher's command for so many jobs of one rank that wait, all at once."""
    numbers = ",".join(map(str, range(jobs)))
    launcher = ["hydra.launcher.nproc_per_node=1", f"hydra.launcher.n_jobs={jobs}"]
    more = ["hydra/launcher=torchrun", *launcher, f"+job={numbers}", f"+hold_s={HOLD_S}"]
    return [sys.executable, str(APP), "-m", *more]


def with_our_main(command: Sequence[str]) -> list[str]:
    """Return the command for the app with our decorator."""
    return ["env", "BENCHMARK_MAIN=ours", *command]


def single_run() -> list[str]:
    """Return the command for a single run in ranks."""
    launcher = ["hydra/launcher=torchrun", f"hydra.launcher.nproc_per_node={RANKS}"]
    return with_our_main([sys.executable, str(APP), *launcher])


def measure(command: Sequence[str]) -> Cost:
    """Run a command in an empty directory, under a process that inherits and counts its orphans."""
    meter = [sys.executable, __file__, "--meter", *command]
    with tempfile.TemporaryDirectory() as directory:
        done = subprocess.run(meter, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return Cost(**json.loads(done.stdout))


def meter(command: Sequence[str]) -> int:
    """Be that process: processes that nobody waits for end as its children, and are counted."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    start = time.monotonic()
    code = subprocess.run(command, stdout=sys.stderr, check=False).returncode
    wall_s = time.monotonic() - start
    while _reap():
        pass
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps(asdict(Cost(wall_s, usage.ru_utime + usage.ru_stime))))
    return code


def _reap() -> bool:
    try:
        os.wait()
    except ChildProcessError:
        return False
    return True


@dataclass(frozen=True)
class Round:
    """The costs of one round's commands."""

    torchrun: Cost
    one_job: Cost
    many_jobs: Cost
    single_run: Cost
    torchrun_with_ours: Cost
    one_longer: Cost
    all_at_once: Cost

    @classmethod
    def run(cls, number: int) -> "Round":
        """Measure a round; every other one runs its commands in the opposite order."""
        commands = [torchrun(), sweep(1), sweep(1 + FURTHER_JOBS)]
        commands += [single_run(), with_our_main(torchrun()), at_once(1), at_once(AT_ONCE)]
        if number % 2:
            return cls(*reversed([measure(command) for command in reversed(commands)]))
        return cls(*map(measure, commands))

    @property
    def further_job(self) -> Cost:
        """What each job after the first adds to a sweep."""
        many, one = self.many_jobs, self.one_job
        return Cost(
            (many.wall_s - one.wall_s) / FURTHER_JOBS, (many.cpu_s - one.cpu_s) / FURTHER_JOBS
        )


def summary(values: Sequence[float]) -> str:
    """Return median, minimum and maximum."""
    return f"{statistics.median(values):7.3f} ({min(values):.3f} - {max(values):.3f})"


def table(rounds: Sequence[Round]) -> str:
    """Lay out seconds and ratios."""
    rows: dict[str, Callable[[Round], Cost]] = {
        "torchrun": lambda r: r.torchrun,
        "sweep of one job": lambda r: r.one_job,
        "each further job": lambda r: r.further_job,
        "single run": lambda r: r.single_run,
        "torchrun, our main": lambda r: r.torchrun_with_ours,
    }
    clocks: dict[str, Callable[[Cost], float]] = {
        "wall": lambda cost: cost.wall_s,
        "CPU": lambda cost: cost.cpu_s,
    }
    lines = [f"{'':24}{'seconds: median (min - max)':32}share of torchrun"]
    for name, cost in rows.items():
        for clock, read in clocks.items():
            seconds = [read(cost(r)) for r in rounds]
            shares = [read(cost(r)) / read(r.torchrun) for r in rounds]
            share = "" if name == "torchrun" else summary(shares)
            lines.append(f"{name + ', ' + clock:24}{summary(seconds):32}{share}".rstrip())
    together = summary([r.all_at_once.wall_s / r.one_longer.wall_s for r in rounds])
    held = f"{AT_ONCE} jobs of one rank that take {HOLD_S} s, all at once"
    return "\n".join([*lines, "", f"{held}, wall: {together.strip()} of one alone"])


def machine() -> str:
    """Describe what the figures hold for."""
    packages = ("torch", "hydra-core", "hydra-torchrun-launcher")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    cores = len(os.sched_getaffinity(0))
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, {cores} cores"
    return f"{system}; Python {platform.python_version()}, {versions}"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    measure(torchrun())  # brings the libraries into the page cache
    rounds = [Round.run(number) for number in range(arguments.rounds)]
    print(f"{machine()}\n{len(rounds)} rounds, {RANKS} ranks, load {os.getloadavg()[0]:.1f}\n")
    print(table(rounds))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--meter"]:
        sys.exit(meter(sys.argv[2:]))
    main()
