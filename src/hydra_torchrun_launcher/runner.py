"""Runs jobs that Hydra has begun: checks and servers before the first, then a keeper for each (runs
in the launching process).
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from omegaconf import OmegaConf

from hydra_torchrun_launcher import dry_run, freshness, machine, preconditions
from hydra_torchrun_launcher.claims import Claim
from hydra_torchrun_launcher.config import StartMethod
from hydra_torchrun_launcher.errors import (
    JobStoppedError,
    LauncherError,
    SettingsError,
    StartError,
    refused,
)
from hydra_torchrun_launcher.job_run import HandedOver, JobRun, Note
from hydra_torchrun_launcher.lending import Lender
from hydra_torchrun_launcher.node_settings import Nodes
from hydra_torchrun_launcher.outcomes import Ended
from hydra_torchrun_launcher.payload import Program, Work, pack
from hydra_torchrun_launcher.plans import Begun, Surroundings, job_plan, with_thread_limit
from hydra_torchrun_launcher.processes import open_standard_streams
from hydra_torchrun_launcher.progress import Progress
from hydra_torchrun_launcher.servers import Pool, Server
from hydra_torchrun_launcher.settings import Settings, Sharing, read
from hydra_torchrun_launcher.signals import SignalWatch
from hydra_torchrun_launcher.slots import Accelerators, Share
from hydra_torchrun_launcher.team import Alone, Role
from hydra_torchrun_launcher.tries import Tries
from hydra_torchrun_launcher.wire import Readable, anonymous_file, wait_readable, write_document

log = logging.getLogger(__name__)


class OtherNodes(Readable, Protocol):
    """The other nodes of a sweep."""

    def hear(self) -> None:
        """Take in what they say."""

    def check(self) -> None:
        """See that they are there."""

    def role(self, job: Begun, key: int, settings: Settings, watch: SignalWatch) -> Role:
        """Return this node's role in a job."""


def _unnoted(_event: str, **_facts: Any) -> None:
    """Note nothing."""


class JobRunner:
    """Runs the jobs of a sweep, or of a single run."""

    def __init__(self, config: Any, *, is_single: bool = False) -> None:
        """Check what can be checked and start a server, which imports torch meanwhile.

        Args:
            config: the sweep's or the run's own config.
            is_single: whether it is a run's.

        Raises:
            SettingsError: settings cannot work.
            StartError: torch is not installed, or too old; this process is itself a rank, or a
                frozen program.
        """
        preconditions.check_place()
        preconditions.check_torch()
        open_standard_streams()
        self._lender: Lender | None = None
        self._directories: dict[str, int | None] = {}
        self._warned: set[str] = set()
        self._running: dict[Begun, JobRun] = {}
        self.nodes: OtherNodes | None = None
        """The other nodes, where there are several."""
        self.follows = False
        """Whether another node leads."""
        self._keys = itertools.count()
        self._environ = {**os.environ, **_env_set(config)}
        self._is_single = is_single
        self._settings = settings = self._read(config, self._environ)
        self._pool = Pool(debug=settings.sharing.debug_rank is not None)
        self.signals = settings.signals
        """Names of the signals that stop the sweep."""
        self.claim: Claim | None = None
        """What is to show meanwhile that this process lives."""
        self.progress = Progress(self._kind_of_progress(settings.sharing))
        """What shows meanwhile how far the jobs are."""
        if settings.start_method is not StartMethod.fork and not settings.sharing.dry_run:
            preconditions.check_interpreter()
            preconditions.check_preload(settings.preload)
            self._server(self._environ_of_first(settings.nproc_per_node), settings)

    def _read(self, config: Any, environ: Mapping[str, str]) -> Settings:
        settings = read(config, environ)
        if self.follows:  # what only the launching process does is the leader's to do
            own = self._settings
            settings = replace(settings, sharing=own.sharing, nodes=own.nodes, timeout_s=None)
        return settings.of_single_run() if self._is_single else settings

    def _kind_of_progress(self, sharing: Sharing) -> str:
        has_none = self._is_single or sharing.dry_run or sharing.debug_rank is not None
        return "none" if has_none else sharing.progress

    def _environ_of_first(self, wanted: int | str) -> dict[str, str]:
        """Return the environment of most jobs' ranks, as far as it is known without torch."""
        share, sharing = Share(), self._settings.sharing
        if sharing.lends and not machine.may_have_accelerators():
            lender = Lender(sharing, wanted, lambda: Accelerators(0, 0), self._environ)
            wanted = lender.ranks(wanted)
            share = lender.take(wanted) or share
        return with_thread_limit(self._environ, wanted, share)

    def check_directory(self, config: Any) -> None:
        """See that the directory of the sweep or the run can be made.

        Raises:
            StartError: it cannot.
        """
        directory = "hydra.run.dir" if self._is_single else "hydra.sweep.dir"
        preconditions.check_directory(directory, str(OmegaConf.select(config, directory)))

    def close(self) -> None:
        """End what still runs, and the servers."""
        runs = list(self._running.values())
        self._running.clear()
        for run in runs:  # their keepers work side by side
            run.hang_up()
        for run in runs:
            run.close()
        self._pool.close()

    def run(self, job: Begun, watch: SignalWatch) -> Ended:
        """Run a job alone, to its end; what goes wrong is said on the console and returned."""
        try:
            share = self.lender(watch).take(self.ranks(job.config, watch)) or Share()
        except Exception as problem:  # noqa: BLE001 - said, and the job's end
            return Ended(error=self._told(job, problem))
        tries = Tries(job.name)
        while True:
            ended = self.start(job, share, watch) or dict(self.wait(watch))[job]
            if watch.received is not None or not self.tries_again(job, tries, ended):
                return tries.all_with(ended)

    def start(
        self, job: Begun, share: Share, watch: SignalWatch, note: Note = _unnoted
    ) -> Ended | None:
        """Start a job; return how it ended if it cannot start.

        Args:
            job: what Hydra has begun.
            share: its part of the machine.
            watch: the signals that stop it.
            note: takes in what happens to it.
        """
        try:
            self._running[job] = self._start(job, share, watch, note)
        except Exception as problem:  # noqa: BLE001 - said, and the job's end
            return Ended(error=self._told(job, problem))
        return None

    def check_nodes(self) -> None:
        """See that the other nodes are there, where there are several.

        Raises:
            NodeLostError: one is not: no more jobs can run.
        """
        if self.nodes is not None:
            self.nodes.check()

    @property
    def settings_of_nodes(self) -> Nodes | None:
        """What is set of the nodes, where there are several."""
        return self._settings.nodes

    @property
    def fail_fast(self) -> bool:
        """Whether a failed job ends the sweep."""
        return self._settings.sharing.fail_fast

    def tries_again(self, job: Begun, tries: Tries, ended: Ended) -> bool:
        """Begin another try of a job, if it has failed and its settings allow it."""
        if not tries.may_help(ended):
            return False
        last = self._read(job.config, job.environ).retries
        if tries.number >= last:
            return False
        tries.begin_next(ended, last)
        return True

    @property
    def is_resumed(self) -> bool:
        """Whether what completed before is taken over."""
        return self._settings.sharing.resume

    @property
    def is_dry(self) -> bool:
        """Whether nothing is to be started."""
        return self._settings.sharing.dry_run

    def describe(self, name: str, config: Any, watch: SignalWatch) -> str:
        """Return what a job would be.

        Args:
            name: what to call it.
            config: its composed config.
            watch: as for `lender`.

        Raises:
            SettingsError: its settings cannot work.
        """
        environ = {**os.environ, **_env_set(config)}
        settings = self._read(config, environ).given_terminal()
        ranks, lender = self._ranks(settings, watch), self.lender(watch)
        share = lender.take(ranks)
        later = share is None
        if share is None:  # it waits for one before it
            share = lender.typical(ranks)
        there = self._with_share(environ, ranks, share)
        lent = lender.variable if share.devices else ""
        variables = {k: v for k, v in there.items() if k == lent or os.environ.get(k) != v}
        if later and share.devices:
            variables[lender.variable] = f"<{ranks} of {lender.names}, when they are free>"
        cores = share.cores and f"cores {', '.join(map(str, share.cores))}{' or others' * later}"
        return dry_run.describe(
            f"{name} ({cores})" if cores else name, config.hydra, settings, ranks, variables
        )

    def _with_share(self, environ: Mapping[str, str], nproc: int, share: Share) -> dict[str, str]:
        found = with_thread_limit(environ, nproc, share)
        if share.devices is not None and self._lender is not None:
            found[self._lender.variable] = ",".join(share.devices)
        return found

    def stop(self, job: Begun, error: Exception) -> None:
        """Stop a job that runs; it fails with this error."""
        self._running[job].stop(error)

    def wait(self, watch: SignalWatch) -> Iterator[tuple[Begun, Ended]]:
        """Wait until jobs that run have ended, and return how each of them did."""
        while self._running and not any(run.is_over for run in self._running.values()):
            self.follow(watch)
        yield from self.over(watch)

    def over(self, watch: SignalWatch) -> Iterator[tuple[Begun, Ended]]:
        """Return how those that ended have, without waiting."""
        for job in [job for job, run in self._running.items() if run.is_over]:
            run = self._running.pop(job)
            watch.interrupts_are_a_ranks = False
            yield job, self._end(job, run)

    def follow(self, watch: SignalWatch) -> None:
        """Wait until something happens to a job that runs, and act on it."""
        runs = list(self._running.values())
        for run in runs:
            run.pass_on(watch)
        has_terminal = self._settings.sharing.debug_rank is not None
        # From here on ranks may be there any moment, before a word of them can be.
        watch.interrupts_are_a_ranks = has_terminal and any(run.server.ready for run in runs)
        servers = {run.server.pid: run.server for run in runs}.values()
        sources: list[Readable] = [watch, *runs, *(server.channel for server in servers)]
        if self.nodes is not None:
            sources.append(self.nodes)
        waits = [run.wait_s for run in runs]
        for each in (self.claim, self.progress):
            if each is not None:
                each.beat()
                waits.append(each.beats_in_s)
        ready = wait_readable(sources, min((w for w in waits if w is not None), default=None))
        if watch in ready:
            watch.drain()
        if self.nodes is not None and self.nodes in ready:
            self.nodes.hear()
        self._hear(runs, servers, ready)

    def _hear(
        self, runs: list[JobRun], servers: Iterable[Server], ready: Sequence[Readable]
    ) -> None:
        """Hear keepers and servers, and keep their time."""
        for run in runs:
            if run in ready:
                self._try([run], run.hear_keeper)
        for server in servers:
            if server.channel in ready:
                self._try([run for run in runs if run.server is server], server.hear)
        for run in runs:
            self._try([run], run.keep_time)

    def _try(self, runs: list[JobRun], act: Callable[[], Any]) -> None:
        try:
            act()
        except Exception as error:  # noqa: BLE001 - said when the job's end is
            for run in runs:
                run.give_up(error)

    def _end(self, job: Begun, run: JobRun) -> Ended:
        try:
            value, error = run.result()
        except Exception as problem:  # noqa: BLE001 - said
            value, error = None, self._told(job, problem)
        finally:
            run.close()
        return Ended(value, error, run.restarts, run.place)

    def _told(self, job: Begun, problem: Exception) -> Exception:
        """Say what went wrong in the launching process; return it as the job's error."""
        error = StartError(refused(problem)) if isinstance(problem, OSError) else problem
        if not isinstance(error, LauncherError):  # our mistake
            log.error("%s failed in the launching process", job.name, exc_info=error)
        elif not isinstance(error, JobStoppedError):
            log.error("%s failed: %s", job.name, error)
        return error

    def _start(self, job: Begun, share: Share, watch: SignalWatch, note: Note) -> JobRun:
        settings = self._read(job.config, job.environ).given_terminal()
        nproc = self._ranks(settings, watch)
        lender = self.lender(watch)
        for problem in [*settings.ranks_beyond(nproc), *machine.too_many_ranks(nproc, job.environ)]:
            self._warn_once(problem, "%s: %s", job.name, problem)
        environ = self._with_share(job.environ, nproc, share)
        program = Program.of_this_process()
        job.work.label = self._label(job)
        key = next(self._keys)
        role = (
            Role(Alone(settings.max_restarts), settings.run_id, None)
            if self.nodes is None
            else self.nodes.role(job, key, settings, watch)
        )
        if role.node is not None:
            environ = {**machine.network_variables(role.node["address"]), **environ}
        label = job.name.lower() if lender.is_parallel and job.number is not None else ""
        found = Surroundings(
            environ=environ,
            working_dir=job.working_dir,
            program=program,
            rank_files=_rank_files(job, settings, role),
            share=share,
            job_label=label,
            run_id=role.run_id,
            node=role.node,
        )
        plan = job_plan(settings, nproc, found)
        fork = settings.start_method is StartMethod.fork
        server = (
            _fork_server(job.work, watch, settings) if fork else self._server(environ, settings)
        )
        document = anonymous_file("plan")
        write_document(document.fileno(), plan, b"" if fork else pack(job.work, program))
        handed_over = HandedOver(
            key,
            job.name,
            settings.max_restarts,
            settings.shutdown_timeout_s,
            settings.timeout_s,
            note,
        )
        run = JobRun(handed_over, server, document, role.team, owns_server=fork)
        role.begin()
        return run

    def _server(self, environ: Mapping[str, str], settings: Settings) -> Server:
        return self._pool.get(environ, settings.preload, settings.preload_env)

    def _label(self, job: Begun) -> str:
        """Return what sets a job's files apart, if another job of this sweep has its directory."""
        directory = os.path.realpath(job.output_dir)
        first = self._directories.setdefault(directory, job.number)
        if first == job.number:
            return ""
        self._warn_once(
            "directory",
            "%s: its output directory %s is job #%d's too; files of the launcher carry the job's "
            "number, Hydra's own do not (hydra.sweep.subdir sets jobs apart)",
            job.name, directory, first,
        )  # fmt: skip
        return f"job{job.number}"

    def _warn_once(self, subject: str, text: str, *values: object) -> None:
        if subject not in self._warned:
            self._warned.add(subject)
            log.warning(text, *values)

    def lender(self, watch: SignalWatch) -> Lender:
        """Return what lends jobs their part of the machine.

        Args:
            watch: the signals that end a wait for torch, which alone can count accelerators.
        """
        if self._lender is None:
            look = functools.cache(lambda: self._look(watch))
            settings = self._settings
            self._lender = Lender(settings.sharing, settings.nproc_per_node, look, self._environ)
        return self._lender

    def ranks(self, config: Any, watch: SignalWatch) -> int:
        """Return how many ranks per node a job has.

        Args:
            config: its composed config.
            watch: as for `lender`.

        Raises:
            SettingsError: its settings cannot work.
        """
        settings = self._read(config, {**os.environ, **_env_set(config)})
        return self._ranks(settings, watch)

    def _ranks(self, settings: Settings, watch: SignalWatch) -> int:
        if settings.nodes != self._settings.nodes:
            problem = (
                "hydra.launcher.nnodes and the settings of the nodes' meeting are one for the "
                f"whole sweep ({self._settings.nodes}); this job has {settings.nodes}"
            )
            raise SettingsError([problem])
        if settings.sharing != self._settings.sharing:
            problem = (
                "hydra.launcher.n_jobs, devices, jobs_per_device, fail_fast, resume and progress "
                f"are one for the whole sweep ({self._settings.sharing}); this job has "
                f"{settings.sharing}"
            )
            raise SettingsError([problem])
        lender = self.lender(watch)
        ranks = lender.ranks(settings.nproc_per_node)
        debug_rank = settings.sharing.debug_rank
        if debug_rank is not None and debug_rank >= ranks:
            problem = f"hydra.launcher.debug_rank={debug_rank}: the job has ranks 0 to {ranks - 1}"
            raise SettingsError([problem])
        too_large = lender.problem(ranks)
        if too_large is not None:
            raise SettingsError([too_large])
        return ranks

    def _look(self, watch: SignalWatch) -> Accelerators:
        sharing = self._settings.sharing
        is_needless = sharing.lends or sharing.dry_run
        if is_needless and not machine.may_have_accelerators():  # no need to wait for torch
            return Accelerators(0, 0)
        wanted = self._settings.nproc_per_node
        server = self._server(with_thread_limit(self._environ, wanted), self._settings)
        answer = server.ask("count", watch)
        return Accelerators(answer["count"], answer["gpus"], tuple(answer["variables"]))


def _rank_files(job: Begun, settings: Settings, role: Role) -> str | None:
    """Return the folder for a job's ranks' files: a node's own, where nodes may share a disk."""
    node = () if role.node is None else (f"node_{role.node['label']}",)
    if settings.log_dir is not None:
        number = () if job.number is None else (str(job.number),)
        return os.path.abspath(os.path.join(settings.log_dir, *number, *node))
    if job.leaves_no_files:
        return None
    return os.path.abspath(os.path.join(job.output_dir, "ranks", job.work.label, *node))


def _env_set(config: Any) -> dict[str, str]:
    """Return what the job sets itself; run_job applies it, a server may have to know it before."""
    try:
        values = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
    except Exception:  # noqa: BLE001 - resolvable within a job only
        return {}
    return {str(key): str(value) for key, value in values.items()}  # type: ignore[union-attr]


def _fork_server(work: Work, watch: SignalWatch, settings: Settings) -> Server:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        problem = (
            "hydra.launcher.start_method='fork': CUDA is initialized in the launching process, and "
            "its state does not survive a fork; use forkserver or spawn"
        )
        raise SettingsError([problem])

    random_state = random.getstate()

    def in_child() -> None:
        watch.restore()
        freshness.inherited = freshness.Inherited(work, random_state)

    return Server.fork(in_child, debug=settings.sharing.debug_rank is not None)
