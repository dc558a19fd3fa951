"""An app whose ranks print and are gone the next moment."""

from __future__ import annotations

import os
import signal
from typing import Any

import hydra


@hydra.main(version_base="1.3", config_path=None)
def main(_: Any) -> None:
    print("last words of rank", os.environ["RANK"])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
