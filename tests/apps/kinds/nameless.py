"""Task functions without a name of their own: which, says the environment."""

from __future__ import annotations

import functools
import os
from typing import Any

import hydra
from kind import record

FACTOR = 1


def make_closure(facts: dict[str, Any]) -> Any:
    def task(cfg: Any) -> int:
        return record(cfg, factor=FACTOR, **facts)

    return task


def with_more(more: int, cfg: Any) -> int:
    return record(cfg, more=more)


class Trainer:
    """A callable object, as some frameworks make them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, cfg: Any) -> int:
        return record(cfg, name=self.name)

    def method(self, cfg: Any) -> int:
        return record(cfg, method_of=self.name)


def named(function: Any) -> Any:
    """Give Hydra what it wants of a function: a module."""
    functools.update_wrapper(function, with_more, assigned=["__module__"], updated=[])
    del function.__wrapped__
    return function


TASKS = {
    "closure": lambda: make_closure({"captured": [1, 2]}),
    "lambda": lambda: lambda cfg: record(cfg, is_lambda=True),
    "partial": lambda: named(functools.partial(with_more, 7)),
    "callable": lambda: Trainer("trainer"),
    "method": lambda: Trainer("trainer").method,
}

if __name__ == "__main__":
    task = TASKS[os.environ["TASK"]]()
    hydra.main(version_base="1.3", config_path=".", config_name="kind")(task)()
