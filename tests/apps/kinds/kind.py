"""What every kind of app does in its ranks: write down what was seen and return a number."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig


def record(cfg: Any, **facts: Any) -> int:
    """Leave a record in the output directory; return twice the config's point."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    seen = {
        "rank": int(os.environ["RANK"]),
        "point": cfg.point,
        "main_file": os.path.basename(getattr(sys.modules["__main__"], "__file__", "") or ""),
        **facts,
    }
    (folder / f"rank{seen['rank']}.json").write_text(json.dumps(seen))
    return int(cfg.point) * 2
