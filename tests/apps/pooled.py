"""An app whose ranks write down what part of the machine they have, and when."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import either
import rank_records
from hydra.core.hydra_config import HydraConfig

FOLDER = Path(os.environ["RANK_RECORDS"])
VISIBILITY = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@either.main(version_base="1.3", config_path=".", config_name="pooled")
def main(cfg: Any) -> Any:
    started, clock = time.monotonic(), time.time()
    job = either.job_number(HydraConfig.get())
    attempts = len(list(FOLDER.glob(f"try.{job}.*")))
    if os.environ["RANK"] == "0":
        (FOLDER / f"try.{job}.{attempts}").touch()
    for number in range(cfg.lines):
        print(f"<{job} {number} {'x' * cfg.length} end>", flush=True)
        print(f"<{job} {number} {'y' * cfg.length} end>", flush=True, file=sys.stderr)
    if cfg.stubborn and os.environ["RANK"] != "0":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (FOLDER / f"stubborn.{job}").touch()
        time.sleep(cfg.stubborn)
    time.sleep(cfg.get("holds", {}).get(cfg.n, cfg.hold))
    if cfg.get("fail", {}).get(cfg.n, cfg.fails) and attempts < cfg.fail_until:
        raise (WordlessError if cfg.wordless else ValueError)(f"job {job} was asked to fail")
    if cfg.leaves:
        subprocess.Popen(["/bin/sleep", str(cfg.leaves)], start_new_session=True)
    import torch

    rank_records.write(
        f"job{job}",
        job=job,
        started=started,
        ended=time.monotonic(),
        clock=clock,
        seen={name: os.environ[name] for name in VISIBILITY if name in os.environ},
        cores=sorted(os.sched_getaffinity(0)),
        limit=os.environ.get("OMP_NUM_THREADS"),
        threads=torch.get_num_threads(),
        attempts=attempts,
        environ=dict(os.environ),
    )
    return Unfit() if cfg.unfit else complex(cfg.n, 1) if cfg.strange else cfg.n


class WordlessError(ValueError):
    """An exception that does not tell."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unfit:
    """A value that cannot be rebuilt elsewhere."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


if __name__ == "__main__":
    main()
