"""A task function decorated under and over `@hydra.main`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hydra
from kind import record

CALLS: list[str] = []


def noting(name: str) -> Callable[[Any], Any]:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*arguments: Any) -> Any:
            CALLS.append(name)
            return function(*arguments)

        return wrapper

    return decorate


@noting("over")
@hydra.main(version_base="1.3", config_path=".", config_name="kind")
@noting("under")
@noting("lower")
def main(cfg: Any) -> int:
    return record(cfg, calls=[call for call in CALLS if call != "over"])


if __name__ == "__main__":
    main()
