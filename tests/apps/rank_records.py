"""How an app's processes say what they saw: a JSON file for each record."""

import json
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "RANK_RECORDS"
"""Name of the variable that holds the folder."""


def write(kind: str, **facts: Any) -> None:
    """Leave a record; it appears whole or not at all."""
    rank, attempt = os.environ.get("RANK"), os.environ.get("TORCHELASTIC_RESTART_COUNT")
    record = {
        "kind": kind,
        "pid": os.getpid(),
        "rank": None if rank is None else int(rank),
        "attempt": None if attempt is None else int(attempt),
        **facts,
    }
    # By time too: a kernel gives a number again, in small namespaces soon.
    name = f"{kind}.{attempt}.{rank}.{time.time_ns()}.{os.getpid()}.unfinished"
    path = Path(os.environ[FOLDER], name)
    path.write_text(json.dumps(record))
    path.rename(path.with_suffix(".json"))
