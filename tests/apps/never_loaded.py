"""A module whose import never ends."""

from __future__ import annotations

import time
from pathlib import Path

Path("loading").touch()
while True:
    time.sleep(3600)
