"""A script without a guard that works before `main()`: threads, locks, files, OpenMP, numpy."""

from __future__ import annotations

import atexit
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from kind import record

LOCK = threading.RLock()
FILE = tempfile.TemporaryFile("w+")  # noqa: SIM115
FILE.write("before")
FILE.flush()
STARTED = threading.Event()
PRODUCT = (torch.rand(300, 300) @ torch.rand(300, 300)).shape[0]
SUM = int((np.ones((300, 300)) @ np.ones((300, 300)))[0, 0])
LEFT: list[str] = []
atexit.register(LEFT.append, "left")


def work() -> None:
    STARTED.set()
    while True:
        time.sleep(3600)


threading.Thread(target=work, daemon=True).start()
STARTED.wait()


@hydra.main(version_base="1.3", config_path=".", config_name="kind")
def main(cfg: Any) -> int:
    with LOCK:
        product = (torch.ones(200, 200) @ torch.ones(200, 200))[0, 0].item()
    FILE.seek(0)
    return record(cfg, product=product, sum=SUM, text=FILE.read(), file=Path(__file__).name)


main()
