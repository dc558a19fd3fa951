"""An app as Hydra 1.4 recommends them where it can; any other way on 1.3."""

from __future__ import annotations

import inspect
import os
from typing import Any

import either
import hydra

MODERN: dict[str, Any] = {"version_base": "1.3"}
if "execution_whitelist" in inspect.signature(hydra.main).parameters:
    MODERN = {"execution_whitelist": ["collections.*"]}


@either.main(config_path=None, **MODERN)
def main(_: Any) -> None:
    print("ran in rank", os.environ.get("RANK"))


if __name__ == "__main__":
    main()
