"""A module beside the script: a target, a log handler, and a name that a task imports late."""

from __future__ import annotations

import logging

NAME = "sibling"


class Part:
    """A target of the config."""

    def __init__(self, number: int) -> None:
        self.number = number


class Handler(logging.StreamHandler):  # type: ignore[type-arg]
    """A handler of the sibling's."""

    def format(self, line: logging.LogRecord) -> str:
        return "SIBLING'S " + super().format(line)
