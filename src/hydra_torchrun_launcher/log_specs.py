"""Where the output of a job's ranks goes, attempt by attempt (runs in the agent)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from hydra_torchrun_launcher.job_files import ERROR, STDERR, STDOUT, claim_attempt

_OUT, _ERR = 1, 2


class RankLogs(LogsSpecs):
    """Where ranks' output goes: as torchrun's settings say, except that a rank kept from the
    console writes to its file and not to nowhere. Nothing that exists is overwritten.
    """

    def __init__(self, settings: dict[str, Any]) -> None:
        """Take the agent's part of a job's plan."""
        self._root: str | None = settings["rank_files"]
        self._settings = settings
        # Torch's own filters of teed output (hydra.launcher.extra) need torch's own tails.
        self._torch_shows = any(name.startswith("duplicate_") for name in settings["launch_config"])
        self.shown_by_us: dict[tuple[int, int], str] = {}
        """Teed files of the attempt, by local rank and stream."""
        super().__init__(log_dir=self.root_log_dir)

    @property
    def root_log_dir(self) -> str:
        """The folder of all attempts; the null device where a job leaves no files."""
        return self._root or os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the next attempt's folders; say where each rank's streams go."""
        destination = LogsDest()
        attempt = claim_attempt(Path(self._root)) if self._root is not None else None
        self.shown_by_us = {}
        for local_rank, env in envs.items():
            if attempt is None:
                nowhere = "" if self._on_console(local_rank) else os.devnull
                destination.stdouts[local_rank] = destination.stderrs[local_rank] = nowhere
                continue
            folder = attempt / str(local_rank)
            folder.mkdir()
            env["TORCHELASTIC_ERROR_FILE"] = str(folder / ERROR)
            destination.error_files[local_rank] = str(folder / ERROR)
            destination.filtered_stdout = str(folder.parent / "filtered_stdout.log")
            destination.filtered_stderr = str(folder.parent / "filtered_stderr.log")
            for stream, name, to_file, to_both in (
                (_OUT, STDOUT, destination.stdouts, destination.tee_stdouts),
                (_ERR, STDERR, destination.stderrs, destination.tee_stderrs),
            ):
                on_console = self._on_console(local_rank)
                teed = self._wants("tee", local_rank, stream) or self._is_labelled(
                    local_rank, stream
                )
                filed = teed or self._wants("redirects", local_rank, stream) or not on_console
                to_file[local_rank] = str(folder / name) if filed else ""
                if teed and on_console and self._torch_shows:
                    to_both[local_rank] = to_file[local_rank]
                elif teed and on_console:
                    self.shown_by_us[local_rank, stream] = to_file[local_rank]
        return destination

    def _wants(self, setting: str, local_rank: int, stream: int) -> bool:
        by_rank = self._settings[setting]
        return bool(int(by_rank.get(str(local_rank), by_rank.get("-1", 0))) & stream)

    def _is_labelled(self, local_rank: int, stream: int) -> bool:
        """Whether it goes to the console line by line, as other jobs use the console too."""
        labelled = bool(self._settings["job_label"]) and self._on_console(local_rank)
        return labelled and not self._wants("redirects", local_rank, stream)

    def _on_console(self, local_rank: int) -> bool:
        console = self._settings["console_ranks"]
        return console is None or local_rank in console
