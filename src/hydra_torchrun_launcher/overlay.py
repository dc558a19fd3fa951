"""Lays the values of rank 0's config over a config that another rank has composed itself (in ranks
that others started).

Structure and types are the rank's own, so that `OmegaConf.to_object` gives the classes of its own
script; every value is rank 0's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from omegaconf import OmegaConf, open_dict, read_write

from hydra_torchrun_launcher.errors import StartError

_SHOWN = 10


def raw(config: Any) -> Any:
    """Return a config's values as plain data, interpolations as they are written."""
    return OmegaConf.to_container(config, resolve=False)


def lay(values: Any, config: Any) -> None:
    """Give a config the values of another that has the same structure.

    Args:
        values: the other's, as `raw` returned them.
        config: the rank's own.

    Raises:
        StartError: the structures differ; names the keys.
    """
    own = raw(config)
    differences = list(_differences(values, own, ""))
    if differences:
        shown = "; ".join(differences[:_SHOWN])
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        problem = (
            f"this rank composes a config of another structure than rank 0's: {shown}{more} "
            "(a defaults list that depends on the rank or the host, other files on this node, or a "
            "callback that adds keys?)"
        )
        raise StartError(problem)
    _lay(values, own, config)


def _differences(values: Any, own: Any, key: str) -> Iterator[str]:
    name = key.lstrip(".")
    if isinstance(values, dict) and isinstance(own, dict):
        for missing in values.keys() - own.keys():
            yield f"{name}.{missing} is only in rank 0's".lstrip(".")
        for added in own.keys() - values.keys():
            yield f"{name}.{added} is only in this rank's".lstrip(".")
        for shared in sorted(values.keys() & own.keys(), key=str):
            yield from _differences(values[shared], own[shared], f"{key}.{shared}")
    elif isinstance(values, list) and isinstance(own, list):
        if len(values) != len(own):
            yield f"{name} has {len(values)} items in rank 0's and {len(own)} in this rank's"
            return
        for index, (value, mine) in enumerate(zip(values, own, strict=True)):
            yield from _differences(value, mine, f"{key}[{index}]")
    elif isinstance(values, dict | list) or isinstance(own, dict | list):
        yield f"{name} is a {type(values).__name__} in rank 0's and a {type(own).__name__} here"


def _lay(values: Any, own: Any, node: Any) -> None:
    with read_write(node), open_dict(node):  # a frozen dataclass has flags of its own
        for key in values if isinstance(values, dict) else range(len(values)):
            if isinstance(values[key], dict | list):
                _lay(values[key], own[key], node._get_node(key))  # noqa: SLF001 - [] would resolve it
            elif not _same(values[key], own[key]):
                node[key] = values[key]


def _same(value: Any, own: Any) -> bool:
    return type(value) is type(own) and (value == own or (value != value and own != own))  # noqa: PLR0124 - NaN
