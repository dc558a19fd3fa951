"""Measure a job on several hosts against torchrun started by hand on each of them.

The hosts are network namespaces on this machine (root is needed). In each round both run the same
app, one rank per host, one after the other; what is told is the time until the last host has ended,
as a share of torchrun's.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from launch import APP, FURTHER_JOBS, machine, summary

SCRIPT = Path(__file__).parents[1] / "tests/netns_hosts.sh"
PORT = 29400
BASH = shutil.which("bash") or "/bin/bash"


def on_all(hosts: int, command: list[str], environ: dict[str, str]) -> float:
    """Run a command on each of so many hosts; return the seconds until all have ended."""
    with tempfile.TemporaryDirectory() as directory:
        start = time.monotonic()
        running = [
            subprocess.Popen(
                [BASH, str(SCRIPT), "exec", str(host), *command],
                cwd=directory, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )
            for host in range(1, hosts + 1)
        ]  # fmt: skip
        ends = [each.wait(600) for each in running]
        if any(ends):
            sys.exit(f"{' '.join(command)} failed: {ends}")
        return time.monotonic() - start


def torchrun(hosts: int) -> list[str]:
    """Return torchrun's command for a host."""
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=host1:{PORT}", "--rdzv-id=b"]
    module = ["-m", "torch.distributed.run", f"--nnodes={hosts}", "--nproc-per-node=1", *meeting]
    return [sys.executable, *module, str(APP)]


def sweep(hosts: int, jobs: int) -> list[str]:
    """Return the launcher's command for a host."""
    numbers = ",".join(map(str, range(jobs)))
    settings = {
        "nnodes": hosts, "nproc_per_node": 1, "rdzv_endpoint": f"host1:{PORT}",
    }  # fmt: skip
    launcher = [f"hydra.launcher.{name}={value}" for name, value in settings.items()]
    return [sys.executable, str(APP), "-m", "hydra/launcher=torchrun", *launcher, f"+job={numbers}"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hosts", default="1,2,4,8")
    arguments = parser.parse_args()
    counts = [int(count) for count in arguments.hosts.split(",")]
    with tempfile.TemporaryDirectory() as state:
        environ = {**os.environ, "NETNS_HOSTS_STATE": f"{state}/b", "OMP_NUM_THREADS": "1"}
        subprocess.run([BASH, str(SCRIPT), "up", str(max(counts))], env=environ, check=True)
        try:
            print(f"{machine()}\n{arguments.rounds} rounds, load {os.getloadavg()[0]:.1f}\n")
            on_all(1, torchrun(1), environ)  # brings the libraries into the page cache
            for count in counts:
                one, further, theirs = [], [], []
                for _ in range(arguments.rounds):
                    theirs.append(on_all(count, torchrun(count), environ))
                    one.append(on_all(count, sweep(count, 1), environ))
                    many = on_all(count, sweep(count, 1 + FURTHER_JOBS), environ)
                    further.append((many - one[-1]) / FURTHER_JOBS)
                share = summary([a / b for a, b in zip(one, theirs, strict=True)])
                each = summary([a / b for a, b in zip(further, theirs, strict=True)])
                print(
                    f"{count} hosts: torchrun {statistics.median(theirs):.2f} s; a sweep of one "
                    f"job {share} of it, each further job {each}"
                )
        finally:
            subprocess.run([BASH, str(SCRIPT), "down"], env=environ, check=True)


if __name__ == "__main__":
    main()
