"""Every exception we raise; each carries its facts and composes its own message (used in all)."""

from __future__ import annotations

import errno
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra.errors import CompactHydraException


def one_line(text: str) -> str:
    """Return a text of others that cannot disturb a terminal."""
    return "".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text)


class LauncherError(CompactHydraException):
    """Base of our errors. Hydra prints such an error as a sentence, without a stack trace."""


class SettingsError(LauncherError):
    """Settings that cannot work; all problems in one message."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Keep the problems, a sentence each."""
        self.problems = tuple(problems)
        super().__init__("; ".join(problems) if len(problems) == 1 else _bullets(problems))

    def __reduce__(self) -> tuple[type[SettingsError], tuple[tuple[str, ...]]]:
        """Rebuild from the problems."""
        return (type(self), (self.problems,))


def _bullets(problems: Sequence[str]) -> str:
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return f"{len(problems)} settings of hydra.launcher cannot work:{lines}"


class PlatformError(LauncherError):
    """The operating system lacks what the launcher is built on."""

    def __init__(self, platform: str) -> None:
        """Keep the system's name, as in `sys.platform`."""
        self.platform = platform
        super().__init__(
            f"hydra/launcher=torchrun does not run on {platform}: it needs Linux (or macOS, for "
            "gloo); on Windows use it inside WSL"
        )

    def __reduce__(self) -> tuple[type[PlatformError], tuple[str]]:
        """Rebuild from the system's name."""
        return (type(self), (self.platform,))


class StartError(LauncherError):
    """A process of ours could not be started, or was lost before it could report."""


class LookError(LauncherError):
    """What somebody wants to look at is not there: what, and what is."""


class TransportError(LauncherError):
    """Something cannot be sent to the ranks: what, why, and what to do."""


class UnsendableValueError(LauncherError):
    """The task function's return value cannot be pickled, or cannot be rebuilt from that."""


class JobStoppedError(LauncherError):
    """A person or a scheduler stopped the job with a signal."""

    def __init__(self, signum: int) -> None:
        """Keep the signal's number."""
        self.signum = signum
        super().__init__(f"the job was stopped by {signal_name(signum)}")

    def __reduce__(self) -> tuple[type[JobStoppedError], tuple[int]]:
        """Rebuild from the signal's number."""
        return (type(self), (self.signum,))


class JobTimeoutError(LauncherError):
    """A job took longer than hydra.launcher.timeout_s."""

    def __init__(self, timeout_s: float, ranks: Sequence[str]) -> None:
        """Keep the limit, and a line for each rank that says where it stood."""
        self.timeout_s = timeout_s
        self.ranks = tuple(ranks)
        lines = "".join(f"\n  {line}" for line in ranks)
        stood = f"; when the time was up its ranks stood at{lines}" if ranks else ""
        super().__init__(
            f"the job took longer than hydra.launcher.timeout_s={timeout_s:g} and was ended{stood}"
        )

    def __reduce__(self) -> tuple[type[JobTimeoutError], tuple[float, tuple[str, ...]]]:
        """Rebuild from both."""
        return (type(self), (self.timeout_s, self.ranks))


class FailFastError(LauncherError):
    """Another job's failure has ended the sweep."""

    def __init__(self, what: str, failed: str, why: str) -> None:
        """Keep what it did to this job, as in 'not started', the other's name and its error."""
        self.what = what
        self.failed = failed
        self.why = why
        super().__init__(f"{what}, because {failed} failed (hydra.launcher.fail_fast): {why}")

    def __reduce__(self) -> tuple[type[FailFastError], tuple[str, str, str]]:
        """Rebuild from all."""
        return (type(self), (self.what, self.failed, self.why))


class NodeLostError(LauncherError):
    """A node of several is gone, and with it the job that ran and the sweep; says which and why."""


class SweepEndedError(LauncherError):
    """The sweep has ended while the job ran; the message says why."""


@dataclass(frozen=True)
class RankPlace:
    """Where a rank ran: what a person needs to find its log.

    Attributes:
        global_rank: rank in the job's whole world.
        local_rank: rank on its node.
        node: the node's host name.
        attempt: 0 for the first start, then the number of restarts before it.
        log: the rank's standard error file, or its error file where it wrote to the console.
    """

    global_rank: int
    local_rank: int
    node: str
    attempt: int
    log: str

    def __str__(self) -> str:
        """Name the place without its log."""
        return (
            f"rank {self.global_rank} (local rank {self.local_rank} on {self.node}, "
            f"attempt {self.attempt})"
        )

    def tell(self, what: str) -> str:
        """Say what happened there and which file to open."""
        return f"{self} {what}{chr(10) if chr(10) in what else '; '}log: {self.log}"


class RankFailedError(LauncherError):
    """A rank left without an exception of its own that could be carried over."""

    def __init__(self, place: RankPlace, what: str) -> None:
        """Keep where it ran and what happened, a phrase such as 'was killed by SIGSEGV'."""
        self.place = place
        self.what = what
        super().__init__(place.tell(what))

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[RankPlace, str]]:
        """Rebuild from place and phrase."""
        return (type(self), (self.place, self.what))


def printable(text: str, encoding: str | None = None) -> str:
    """Escape what a stream cannot encode (in UTF-8, the default: lone surrogates)."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def first_line(error: BaseException | None) -> str:
    """Return an exception's class and the first line of its text."""
    name, text = type(error).__name__, text_of(error).partition("\n")[0]
    return f"{name}: {text}" if text else name


def text_of(error: BaseException | None) -> str:
    """Return an exception's text, or nothing where its class refuses to tell."""
    try:
        return printable(str(error))
    except Exception:  # noqa: BLE001 - a class of the user's
        return ""


def related(error: BaseException) -> Iterator[BaseException]:
    """Return an exception, its causes and its members, each once; compared by identity, as a user's
    `__eq__` may do anything.
    """
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__, *getattr(each, "exceptions", ())]


_REMEDIES = {
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "too many files are open on this machine",
    errno.EAGAIN: "raise the limit of processes (ulimit -u, or the container's)",
    errno.ENOMEM: "free memory, or start fewer ranks",
    errno.ENOSPC: "free space",
}


def refused(error: OSError) -> str:
    """Say what the operating system refused to a process of ours, and what may help."""
    remedy = _REMEDIES.get(error.errno or 0)
    where = f" ({error.filename})" if error.filename else ""
    advice = f": {remedy}" if remedy else ""
    return f"the operating system refused to go on: {error.strerror or error}{where}{advice}"


def signal_name(signum: int) -> str:
    """Return a signal's name; most real-time signals have only a number."""
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


def describe_exit(code: int) -> str:
    """Say how a process left that recorded nothing.

    Args:
        code: exit status; negative: the number of the signal that killed it.
    """
    if code == 0:
        return (
            "left with status 0 without finishing the task function (os._exit(0), or a library "
            "that ends the process): its result is unknown"
        )
    if code > 0:
        return f"left with status {code}"
    name = signal_name(-code)
    hint = (
        " (often the kernel's answer to running out of memory)" if -code == signal.SIGKILL else ""
    )
    return f"was killed by {name}{hint}"
