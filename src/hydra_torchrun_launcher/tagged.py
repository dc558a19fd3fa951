"""Values of a config as JSON: what arrives over a network is data, and runs no code (used in all).

JSON's own types are written as they are, others as an object with one tag: floats that are no
numbers, bytes, paths, tuples, mappings with other keys than text, members of enums. A member comes
back only as one of a class that this process has loaded already.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from collections.abc import Callable
from enum import Enum, Flag
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from hydra_torchrun_launcher.errors import TransportError

_TAG = "!"


class _NoDataError(Exception):
    """A value is no data: where it is, and what."""

    def __init__(self, key: str, kind: type) -> None:
        super().__init__(key)
        self.key = key
        self.kind = f"{kind.__module__}.{kind.__qualname__}"


def dumps(value: Any, subject: str = "The config's value") -> str:
    """Return a value as JSON text.

    Args:
        value: the value.
        subject: what messages call it.

    Raises:
        TransportError: a value in it is of a type that is no data; names the key.
    """
    try:
        return json.dumps(_encode(value, ""), allow_nan=False)
    except _NoDataError as found:
        at = f" at {found.key}" if found.key else ""
        problem = (
            f"{subject}{at} cannot be sent to the other ranks: type {found.kind} is no plain data"
        )
        raise TransportError(problem) from None


def loads(text: str) -> Any:
    """Return the value of a text that `dumps` made.

    Raises:
        TransportError: it names an enum that this process does not have.
    """
    return json.loads(text, object_hook=_decode)


def _encode(value: Any, key: str) -> Any:  # noqa: PLR0911 - a case for each type
    if isinstance(value, Enum):  # before int and str, which an enum may also be
        kind = type(value)
        word = ("flag", value.value) if isinstance(value, Flag) else ("enum", value.name)
        return {_TAG: [word[0], kind.__module__, kind.__qualname__, word[1]]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_TAG: ["float", repr(value)]}
    if isinstance(value, bytes):
        return {_TAG: ["bytes", base64.b64encode(value).decode()]}
    if isinstance(value, Path):
        return {_TAG: ["path", str(value)]}
    if isinstance(value, DictConfig | ListConfig):
        return {_TAG: ["config", _encode(OmegaConf.to_container(value), key)]}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{key}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TAG: ["tuple", items]}
    if isinstance(value, dict):
        if all(type(name) is str for name in value) and _TAG not in value:
            return {name: _encode(item, f"{key}.{name}") for name, item in value.items()}
        pairs = [[_encode(k, key), _encode(item, f"{key}.{k}")] for k, item in value.items()]
        return {_TAG: ["dict", pairs]}
    raise _NoDataError(key.lstrip("."), type(value))


def _decode(found: dict[str, Any]) -> Any:
    if list(found) != [_TAG]:
        return found
    kind, *content = found[_TAG]
    return _DECODERS[kind](*content)


def _member(module: str, qualname: str, name: str) -> Enum:
    kind = _enum(module, qualname)
    if name not in kind.__members__:
        problem = f"This rank's enum {module}.{qualname} has no member {name}"
        raise TransportError(problem)
    return kind[name]


def _flag(module: str, qualname: str, value: int) -> Enum:
    return _enum(module, qualname)(value)


def _enum(module: str, qualname: str) -> type[Enum]:
    kind: Any = sys.modules.get(module)
    for part in qualname.split("."):
        kind = getattr(kind, part, None)
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        problem = f"This rank has no enum {module}.{qualname}"
        raise TransportError(problem)
    return kind


_DECODERS: dict[str, Callable[..., Any]] = {
    "enum": _member,
    "flag": _flag,
    "float": float,
    "bytes": base64.b64decode,
    "path": Path,
    "config": OmegaConf.create,
    "tuple": tuple,
    "dict": dict,
}
