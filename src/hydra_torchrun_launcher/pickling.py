"""A pickler for processes that run the same program: by reference wherever a name leads to the
object, by value only for what has no name (closures, lambdas).

What goes by value gets the module globals of the process that it comes to, so that nothing of a
module is copied.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cloudpickle


@dataclass(frozen=True)
class _Reference:
    """A function by its module, its name there, and its depth below decorators."""

    module: str
    qualname: str
    depth: int

    @classmethod
    def to(cls, function: Callable[..., Any]) -> _Reference | None:
        module, qualname = (
            getattr(function, "__module__", None),
            getattr(function, "__qualname__", ""),
        )
        found = _resolve(module, qualname)
        for depth in range(16):  # more decorators than that is a cycle
            if found is function:
                return cls(str(module), qualname, depth)
            found = getattr(found, "__wrapped__", None)
        return None

    def follow(self) -> Any:
        importlib.import_module(self.module)
        found = _resolve(self.module, self.qualname)
        for _ in range(self.depth):
            found = found.__wrapped__
        return found


def _resolve(module: str | None, qualname: str) -> Any:
    found: Any = sys.modules.get(module or "")
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles named functions and classes by reference and nameless functions with their code.

    cloudpickle by value copies the module globals that a function uses, which fails for a script
    with `import torch.backends.cudnn`, and loses the file name that tracebacks show.
    """

    def __init__(self, file: io.BytesIO, *, main_is_importable: bool) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._main_is_importable = main_is_importable

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, types.FunctionType | type):
            if obj.__module__ == "__main__" and not self._main_is_importable:
                return super().reducer_override(obj)
            reference = _Reference.to(obj)
            if reference is not None:
                # Depth 0 is what pickle itself does; the others it cannot find by their name.
                return (_Reference.follow, (reference,)) if reference.depth else NotImplemented
            if isinstance(obj, types.FunctionType) and obj.__module__ in sys.modules:
                return _by_code(obj)
        return super().reducer_override(obj)


def _by_code(function: types.FunctionType) -> tuple[Any, ...]:
    cells = len(function.__closure__ or ())
    state = {
        "cells": [_cell_content(cell) for cell in function.__closure__ or ()],
        "defaults": function.__defaults__,
        "kwdefaults": function.__kwdefaults__,
        "dict": dict(function.__dict__),
        "qualname": function.__qualname__,
        "doc": function.__doc__,
        "annotations": function.__annotations__,
    }
    made_from = (marshal.dumps(function.__code__), function.__module__, function.__name__, cells)
    return (_function, made_from, state, None, None, _fill_function)


_EMPTY = "__empty_cell__"


def _cell_content(cell: types.CellType) -> Any:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return _EMPTY


def _function(code: bytes, module: str, name: str, cells: int) -> types.FunctionType:
    scope = importlib.import_module(module).__dict__
    closure = tuple(types.CellType() for _ in range(cells)) or None
    return types.FunctionType(marshal.loads(code), scope, name, None, closure)  # noqa: S302


def _fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    for cell, content in zip(function.__closure__ or (), state["cells"], strict=True):
        if content != _EMPTY:
            cell.cell_contents = content[0]
    function.__defaults__ = state["defaults"]
    function.__kwdefaults__ = state["kwdefaults"]
    function.__dict__.update(state["dict"])
    function.__qualname__ = state["qualname"]
    function.__doc__ = state["doc"]
    function.__annotations__ = state["annotations"]


def dumps(obj: Any, *, main_is_importable: bool = True) -> bytes:
    """Pickle for another process that runs the same program."""
    file = io.BytesIO()
    _Pickler(file, main_is_importable=main_is_importable).dump(obj)
    return file.getvalue()
