"""How an app's processes say what they saw: a JSON file for each record, by process."""

import json
import os
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
    path = Path(os.environ[FOLDER], f"{kind}.{attempt}.{rank}.{os.getpid()}.unfinished")
    path.write_text(json.dumps(record))
    path.rename(path.with_suffix(".json"))
