"""What a rank of a sweep's job has written (used by the command line)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from hydra_torchrun_launcher.errors import LookError
from hydra_torchrun_launcher.job_files import STDERR, STDOUT, last_attempt, rank_log_name
from hydra_torchrun_launcher.job_state import JobState
from hydra_torchrun_launcher.sweep_state import Reader, SweepState

_CHUNK = 1 << 16


class JobLogs:
    """The files of one rank, of the last attempt and of those that come."""

    def __init__(self, reader: Reader, job: int, rank: int, *, follow: bool) -> None:
        """Find them.

        Args:
            reader: reads the sweep's directory.
            job: the job's number.
            rank: the rank.
            follow: whether files that are not there yet are waited for.

        Raises:
            LookError: there is no such job or rank, or it has left nothing.
        """
        self._reader = reader
        self._number = job
        self._rank = rank
        self._first: int | None = None
        self._offsets: dict[Path, int] = {}
        self._last: Path | None = None
        self._job: JobState
        self._sweep: SweepState
        self.is_over = False
        """Whether nothing more will be written."""
        if rank < 0:
            problem = f"--rank={rank}: expected a number from 0"
            raise LookError(problem)
        self.look()
        if (self.is_over or not follow) and not self._files():
            raise LookError(self._nothing())

    def look(self) -> None:
        """See how far the job is now.

        Raises:
            LookError: there is no such job.
        """
        sweep = self._reader.read()
        job = sweep.jobs.get(self._number) or sweep.earlier.get(self._number)
        if job is None:
            first, last = min(sweep.jobs, default=0), max(sweep.jobs, default=0)
            known = f"it has {len(sweep.jobs)} jobs"
            known += f", from #{first} to #{last}" if sweep.jobs else ""
            problem = f"{sweep.directory}: there is no job #{self._number} ({known})"
            raise LookError(problem)
        self._job, self._sweep = job, sweep
        if self._first is None and job.state == "queued":
            self._first = 0  # it may fail and be started again before the next look
        self.is_over = sweep.state != "running" or job.state not in {"running", "queued"}

    def new(self) -> Iterator[bytes]:
        """Yield what has been written since the last time, in the files of the last look."""
        for path in self._files():
            yield from self._news_of(path)

    @property
    def waits_for(self) -> str:
        """What has not come yet, in a sentence; empty where something has been written."""
        if self._last is not None:
            return ""
        what = "start" if self._job.state == "queued" else f"write to a file of rank {self._rank}"
        return f"job #{self._number} is {self._job.state}; waiting for it to {what}"

    def say_why_no_more(self) -> None:
        """Fail where nothing has been written, or where the job was cut short.

        Raises:
            LookError: says so.
        """
        if self._job.state == "lost":
            problem = f"job #{self._number} was cut short: its launching process was killed"
            raise LookError(problem)
        if self._last is None:
            raise LookError(self._nothing())

    def _news_of(self, path: Path) -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            while data := file.read(_CHUNK):
                if self._last != path:
                    yield b"\n" * bool(self._last) + b"==> " + os.fsencode(path) + b" <==\n"
                    self._last = path
                yield data
            self._offsets[path] = file.tell()

    def _files(self) -> list[Path]:
        """Return the rank's files; where its output went to the console, its Python log."""
        job, folders = self._job, self._folders(self._job)
        files = [folder / name for folder in folders for name in (STDOUT, STDERR)]
        found = [path for path in files if path.exists()]
        if not found and job.output_dir and self._sweep.app:
            number = job.number if job.ran_as is None else job.ran_as
            logs = (
                Path(job.output_dir, rank_log_name(f"{self._sweep.app}.log", self._rank, label))
                for label in (f"job{number}", "")  # with a label if jobs share the directory
            )
            found = [log for log in logs if log.exists()][:1]
        return found

    def _folders(self, job: JobState) -> list[Path]:
        """Return the rank's folders: of the attempt that was going on at first, and later ones."""
        if not any(job.attempts):  # an older version has written it down
            jobs = [*self._sweep.jobs.values(), *self._sweep.earlier.values()]
            sharing = [each for each in jobs if each.output_dir == job.output_dir]
            is_own = bool(job.output_dir) and len(sharing) == 1
            attempt = last_attempt(Path(job.output_dir, "ranks")) if is_own else None
            return [attempt / str(self._rank)] if attempt is not None else []
        if self._first is None:
            self._first = len(job.attempts) - 1
        last = len(job.attempts[-1]) - 1
        if not 0 <= self._rank <= last:
            problem = f"job #{job.number} has no rank {self._rank}; it has ranks 0 to {last}"
            raise LookError(problem)
        folders = [attempt[self._rank] for attempt in job.attempts[self._first :]]
        return [Path(folder) for folder in folders if folder is not None]

    def _nothing(self) -> str:
        job = self._job
        if not job.output_dir:
            return f"job #{job.number} has not started: it has written nothing"
        host = job.hosts[self._rank] if self._rank < len(job.hosts) else ""
        elsewhere = f"; it ran on {host}, which may have files of its own there" if host else ""
        return (
            f"rank {self._rank} of job #{job.number} has written nothing to a file (its output "
            f"directory: {job.output_dir}{elsewhere}); what it printed went to the console "
            "(hydra.launcher.tee=3 keeps a copy)"
        )
