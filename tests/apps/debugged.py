"""An app whose rank 1 is looked at with a debugger, and interrupted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import hydra


def wait(name: str) -> None:
    deadline = time.monotonic() + 90
    while not Path(name).exists() and time.monotonic() < deadline:
        time.sleep(0.02)


@hydra.main(version_base="1.3", config_path=None)
def main(cfg: Any) -> None:
    rank = os.environ["RANK"]
    print(f"rank {rank} speaks", flush=True)
    if rank == "1":
        secret = 6 * 7
        try:
            print("waiting", flush=True)
            wait("never")
        except KeyboardInterrupt:
            print(f"interrupted with {secret}", flush=True)
        breakpoint()  # noqa: T100 - what the test is about
        Path("done").touch()
    wait("done")
    Path(f"rank{rank}.ended").touch()


if __name__ == "__main__":
    main()
