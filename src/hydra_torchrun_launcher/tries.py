"""The tries of a job, which runs again after a failure as often as the user allows (runs in the
launching process).
"""

from __future__ import annotations

import logging
from dataclasses import replace

from hydra_torchrun_launcher.errors import (
    FailFastError,
    JobStoppedError,
    SettingsError,
    SweepEndedError,
    TransportError,
    UnsendableValueError,
    first_line,
)
from hydra_torchrun_launcher.outcomes import Ended

log = logging.getLogger(__name__)

STOPPED = JobStoppedError | FailFastError | SweepEndedError
"""A job that was ended and has not failed by itself."""
_IN_VAIN = SettingsError | TransportError | UnsendableValueError
"""What would fail the next try in the same way."""


class Tries:
    """What has become of the tries of one job."""

    def __init__(self, job: str) -> None:
        """Begin the first, of the job that messages call so."""
        self._job = job
        self._failed: list[str] = []
        self.number = 0
        """The number of the last one; the first is 0."""

    def may_help(self, ended: Ended) -> bool:
        """Tell whether another try could end otherwise."""
        return ended.error is not None and not isinstance(ended.error, STOPPED | _IN_VAIN)

    def begin_next(self, failed: Ended, last: int) -> None:
        """Begin another try, and say so.

        Args:
            failed: how the one before it ended.
            last: the largest number there may be, the setting `retries`.
        """
        self.number += 1
        again = f"it runs again (retry {self.number} of {last})"
        log.warning("%s failed: %s", self._job, again)
        self._failed += [*failed.restarts, f"{again}, as it failed: {first_line(failed.error)}"]

    def all_with(self, last: Ended) -> Ended:
        """Return how the last one ended, with what is said of those before it."""
        return replace(last, restarts=[*self._failed, *last.restarts])
