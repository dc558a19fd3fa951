"""Several hosts on this machine, made of network namespaces, for tests of several nodes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from conftest import APPS, HANG_S, Sweep, leftovers, processes_with

SCRIPT = Path(__file__).parent / "netns_hosts.sh"
PORT = 29400
_MOST_TRIES = 20


def reason_for_none() -> str:
    """Say why there can be no hosts here; nothing if there can."""
    if os.geteuid() != 0:
        return "needs root, to make hosts out of network namespaces"
    missing = [tool for tool in ("ip", "nsenter", "unshare", "flock") if not shutil.which(tool)]
    return f"needs {', '.join(missing)} (iproute2, util-linux)" if missing else ""


@dataclass
class Hosts:
    """Hosts with names host1, host2 …, each with an address, joined by links."""

    state: Path
    subnet: str
    folder: Path
    apps: list[Sweep] = field(default_factory=list)

    def do(self, *words: object) -> str:
        """Call the script."""
        done = subprocess.run(
            self.command(*words),
            env=self.environ(),
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=True,
        )
        return done.stdout

    def command(self, *words: object) -> list[str]:
        """Return the command that calls the script."""
        return ["bash", str(SCRIPT), *map(str, words)]

    def environ(self, private: Path | None = None) -> dict[str, str]:
        """Return the variables that it reads."""
        own = {"NETNS_HOSTS_STATE": str(self.state), "NETNS_HOSTS_SUBNET": self.subnet}
        return {**os.environ, **own, **({"NETNS_HOSTS_PRIVATE": str(private)} if private else {})}

    def address(self, host: int) -> str:
        """Return a host's address."""
        return f"{self.subnet}.{host}"

    def in_namespace(self, host: int, *command: str) -> None:
        """Change a host's network from outside."""
        name = next(
            word.removeprefix("ns=")
            for line in self.do("status").splitlines()
            if line.startswith(f"{host} ")
            for word in line.split()
            if word.startswith("ns=")
        )
        subprocess.run(["ip", "-n", name, *command], check=True, timeout=HANG_S)

    def start(
        self,
        host: int,
        *overrides: str,
        app: str = "nodes.py",
        flags: tuple[str, ...] = ("-m",),
        environ: dict[str, str] | None = None,
        endpoint: str | None = "host1:29400",
        nodes: object = 2,
        private: Path | None = None,
        before: str = "",
    ) -> Sweep:
        """Start an app on a host.

        Args:
            host: which one.
            overrides: for the app.
            app: its file.
            flags: for Hydra.
            environ: variables for the app.
            endpoint: where nodes meet.
            nodes: how many there are.
            private: a folder of which each host has its own.
            before: what a shell does first, in the app's place.
        """
        arguments = [*flags, "hydra/launcher=torchrun", "hydra.launcher.nproc_per_node=1"]
        arguments += [f"hydra.launcher.nnodes={nodes}"] if nodes else []
        arguments += [f"hydra.launcher.rdzv_endpoint={endpoint}"] if endpoint else []
        arguments += ["hydra.launcher.rdzv_timeout=60", "hydra.launcher.local_ranks_filter="]
        command = [sys.executable, APPS / app, *arguments, *overrides]
        shell = ["bash", "-c", f'{before}exec "$@"', "-"] if before else []
        return self.run(host, [*shell, *command], environ or {}, private)

    def run_code(self, host: int, code: str) -> Sweep:
        """Run a program on a host."""
        return self.run(host, [sys.executable, "-c", code], {}, None)

    def run(
        self, host: int, command: list[Any], environ: dict[str, str], private: Path | None
    ) -> Sweep:
        """Run a command on a host."""
        marker = uuid.uuid4().hex
        directory = self.folder / f"app{len(self.apps)}"
        directory.mkdir(parents=True)
        temporary = Path(tempfile.mkdtemp(prefix="t", dir=self.folder))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "PYTEST_"))}
        own = {"TEST_MARKER": marker, "TMPDIR": str(temporary)}
        hosts_own = {k: v for k, v in self.environ(private).items() if k.startswith("NETNS_")}
        with (directory / "console.txt").open("wb") as console:
            popen = subprocess.Popen(
                self.command("exec", host, *command),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                cwd=directory,
                start_new_session=True,
                env={**inherited, **hosts_own, **own, **environ},
            )
        self.apps.append(Sweep(directory, marker, popen, temporary))
        return self.apps[-1]

    def start_all(
        self, *overrides: str, hosts: tuple[int, ...] = (1, 2), **more: Any
    ) -> list[Sweep]:
        """Start the same command on hosts."""
        return [self.start(host, *overrides, **more) for host in hosts]

    def end(self) -> None:
        """See that nothing is left of the apps that were started, and forget them."""
        apps, self.apps = self.apps, []
        for app in apps:
            if app.popen.poll() is None:
                output = app.read_output()
                app.kill()
                pytest.fail(f"the test ended before its app:\n{output}")
        left = [each for app in apps for each in leftovers(app.marker)]
        for app in apps:
            app.kill()
        assert not left, f"left alive: {left}"
        shutil.rmtree(self.folder, ignore_errors=True)


def make_hosts(folder: Path, count: int) -> Iterator[Hosts]:
    """Make hosts, and take them apart; skip where there can be none."""
    if reason_for_none():
        pytest.skip(reason_for_none())
    hosts = _up(folder, count)
    yield hosts
    hosts.do("down")


def _up(folder: Path, count: int) -> Hosts:
    """Make hosts in a subnet that is free here."""
    for number in range(os.getpid(), os.getpid() + _MOST_TRIES):
        hosts = Hosts(folder / f"h{number}", f"10.214.{number % 250 + 1}", folder / "apps")
        try:
            hosts.do("up", count)
        except subprocess.CalledProcessError as error:
            if "is in use here" not in error.stderr:
                raise RuntimeError(error.stderr) from error
        else:
            return hosts
    problem = f"none of {_MOST_TRIES} subnets is free here"
    raise RuntimeError(problem)


def wait_for(condition: Any, what: str, apps: list[Sweep], timeout_s: float = HANG_S) -> Any:
    """Wait until something holds, and return it."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            said = "\n".join(app.read_output() for app in apps)
            pytest.fail(f"not within {timeout_s:g} s: {what}\n{said}")
        time.sleep(0.02)
    return found


__all__ = ["PORT", "Hosts", "make_hosts", "processes_with", "wait_for"]
