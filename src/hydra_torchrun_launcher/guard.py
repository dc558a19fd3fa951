"""The guard: Hydra asks no launcher without `-m`, so that an app would run alone without a word.

It is a callback without a class: an entry of `hydra.callbacks` whose hooks are values that can be
called. A `_target_` would warn on hydra-core 1.4 and be refused by apps that limit what may be
executed. Members of an Enum are values for OmegaConf, and can be printed, copied and sent.
Imported by every Hydra app in the environment (through the door): no heavy imports here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import Enum
from typing import Any

_MESSAGE = """\
hydra/launcher=torchrun starts no ranks here: Hydra uses a launcher only in a multirun, and this is
a single run, which would be one process. Choose one:
  - add -m (or --multirun) to the command line;
  - set hydra.mode=MULTIRUN, on the command line or in the config;
  - for single runs in ranks, put @hydra_torchrun_launcher.main in the place of @hydra.main;
  - to run this app alone on purpose, although its config chooses the launcher, set
    hydra.launcher.guard=false, on the command line or in the config.
"""


_IN_RANKS = """\
hydra/launcher=torchrun starts no ranks here: torchrun has started this process as a rank already.
Choose one:
  - start the app without torchrun, and with -m (or hydra.mode=MULTIRUN);
  - start it by torchrun, without hydra/launcher=torchrun, and put @hydra_torchrun_launcher.main in
    the place of @hydra.main: then the ranks share one config and one output directory;
  - to let every rank run Hydra by itself, set hydra.launcher.guard=false.
"""

TASK = "_torchrun_task"
"""Attribute of what `hydra_torchrun_launcher.main` hands to Hydra: the user's function."""

in_charge: Any = None
"""What `hydra_torchrun_launcher.main` does in the run that it has started; None in all others."""


at_multirun_end: list[Callable[[], None]] = []
"""What is to be done when a sweep has ended well."""


def starting() -> None:
    """Say that `hydra_torchrun_launcher.main` starts an app now; a rank that only imports the app's
    script takes this function's place.
    """


class Hook(Enum):
    """The hooks that Hydra calls: one that is missing would be a warning in every run."""

    on_run_start = "on_run_start"
    on_run_end = "on_run_end"
    on_multirun_start = "on_multirun_start"
    on_multirun_end = "on_multirun_end"
    on_job_start = "on_job_start"
    on_job_end = "on_job_end"

    def __call__(self, *, config: Any, job_return: Any = None, **_: Any) -> None:
        """End a single run before any work, or let `main` do it; tell the end of a sweep to those
        who wait for it.

        Raises:
            SystemExit: the guard is on, or other nodes did not hear of the end of the sweep.
                Hydra turns other exceptions of a callback into warnings.
        """
        if in_charge is not None and self is Hook.on_run_start:
            in_charge.on_run_start(config)
        elif in_charge is not None and self is Hook.on_job_end:
            in_charge.on_job_end(job_return)
        elif self is Hook.on_multirun_end:
            while at_multirun_end:
                at_multirun_end.pop()()
        elif self is Hook.on_run_start and config.hydra.launcher.guard:
            started = "TORCHELASTIC_RUN_ID" in os.environ
            sys.stderr.write(_IN_RANKS if started else _MESSAGE)
            raise SystemExit(1)


ENTRY = {hook.name: hook for hook in Hook}
"""The entry for `hydra.callbacks`."""
