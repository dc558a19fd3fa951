"""An app whose ranks write what streams carry badly."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import either
from hydra.core.hydra_config import HydraConfig

LONG = 10_000_000


@either.main(version_base="1.3", config_path=None)
def main(_: Any) -> None:
    rank = os.environ["RANK"]
    size = os.get_terminal_size().columns if sys.stdout.isatty() else None
    record = {"tty": [os.isatty(number) for number in range(3)], "columns": size}
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / f"rank{rank}.json").write_text(json.dumps(record))
    if os.environ.get("SPEAK") == "what it hears":
        print("heard", sys.stdin.read())
        return
    if os.environ.get("SPEAK") == "in pieces":
        for word in ("a line", " in", " four", " pieces\n"):
            print(word, end="", flush=True)
            time.sleep(0.3)  # long enough for whoever follows the file to look at it
        print("no end", end="")
        return
    if os.environ.get("SPEAK") == "much":
        for stream in (sys.stdout, sys.stderr):
            print("\n".join(f"{number} {'x' * 100}" for number in range(3000)), file=stream)
        return
    if os.environ.get("SPEAK") == "little":
        print(f"rank {rank} speaks")
        return
    sys.stdout.buffer.write(b"\xff\xfe no text\n")
    sys.stdout.buffer.write(b"x" * LONG + b"END\n")
    for step in range(3):
        print(f"\rprogress {step}", end="", file=sys.stderr)
    print(f"\nlast of rank {rank}")


if __name__ == "__main__":
    main()
