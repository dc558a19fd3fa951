"""A task whose ranks have children of their own, by every start method of multiprocessing."""

from __future__ import annotations

import os
from typing import Any

import hydra
from kind import record


def square(number: int) -> int:
    return number * number


def write(rank: int, path: str) -> None:
    with open(f"{path}.{rank}", "w", encoding="utf-8") as file:
        file.write("written")


@hydra.main(version_base="1.3", config_path=".", config_name="kind")
def main(cfg: Any) -> int:
    import late_sibling  # the script's folder is on the path, whatever the directory is now
    import torch.multiprocessing as mp  # here: children import this file, and need no torch

    mp.set_start_method("spawn")
    squares = {}
    for method in ("fork", "spawn", "forkserver"):
        with mp.get_context(method).Pool(1) as pool:
            squares[method] = pool.map(square, [2, 3])
    path = os.path.abspath(f"spawned.{os.environ['RANK']}")
    mp.spawn(write, args=(path,), nprocs=1)
    written = os.path.exists(f"{path}.0")
    return record(cfg, squares=squares, written=written, sibling=late_sibling.NAME)


if __name__ == "__main__":
    main()
