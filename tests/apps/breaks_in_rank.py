"""A script that cannot be imported in a rank, or whose task cannot be sent there."""

from __future__ import annotations

import os
import threading
from typing import Any

import hydra

if "RANK" in os.environ and os.environ.get("BREAK") == "import":
    raise ImportError("this script cannot be imported in a rank")


def task_with_a_lock() -> Any:
    lock = threading.Lock()

    def task(_: Any) -> None:
        with lock:
            print("locked")

    return task


@hydra.main(version_base="1.3", config_path=None)
def main(_: Any) -> None:
    print("ran")


if __name__ == "__main__":
    if os.environ.get("BREAK") == "task":
        hydra.main(version_base="1.3", config_path=None)(task_with_a_lock())()
    else:
        main()
