"""What ranks that others started tell each other: places, data, structures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, IntEnum
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from hydra_torchrun_launcher import overlay, tagged
from hydra_torchrun_launcher.errors import StartError, TransportError
from hydra_torchrun_launcher.launched import MARK, find_place

pytestmark = pytest.mark.hydra_versions


class Color(Enum):
    RED = "r"


class Level(IntEnum):
    LOW = 1


class Rights(Flag):
    READ = 1
    WRITE = 2


class Split(str, Enum):
    TRAIN = "train"


VALUES = [
    Rights.READ | Rights.WRITE, Rights(0), {Split.TRAIN: Split.TRAIN},
    None, True, False, 0, -1, 2**80, 1.5, -0.0, "", "é \n", "lone \udc80", b"\x00\xff", Path("a b"),
    (1, (2,)), [], [1, [None]], {}, {"a": {"b": [1]}}, {1: "one", (2, 3): None}, {"!": "tag"},
    Color.RED, Level.LOW, {Color.RED: Level.LOW}, {None: 1, True: 2},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_data_comes_back(value: Any) -> None:
    """Data comes back as it was, of the same types."""
    back = tagged.loads(tagged.dumps({"value": value}))["value"]
    assert repr(back) == repr(value)
    assert type(back) is type(value)


def test_floats_that_are_no_numbers() -> None:
    """NaN and the infinities are floats, too."""
    found = tagged.loads(tagged.dumps([math.nan, math.inf, -math.inf]))
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]


def test_config_comes_back() -> None:
    """What a resolver returned as a config is one again."""
    back = tagged.loads(tagged.dumps({"cached": OmegaConf.create({"a": [1]})}))["cached"]
    assert isinstance(back, DictConfig)
    assert back == {"a": [1]}


def test_what_is_no_data() -> None:
    """Anything else is refused by its key."""
    with pytest.raises(TransportError, match=r"at model\.layers\[1\].*builtins\.complex"):
        tagged.dumps({"model": {"layers": [1, 1j]}})


@pytest.mark.parametrize(
    "text",
    [
        '{"!": ["enum", "os", "system", "x"]}',
        '{"!": ["enum", "no_such_module", "Color", "RED"]}',
        '{"!": ["enum", "signal", "Signals", "NOT_ONE"]}',
        '{"!": ["flag", "os", "system", 1]}',
    ],
)
def test_nothing_but_loaded_enums(text: str) -> None:
    """A name that is no enum's member leads to nothing, and nothing is imported for it."""
    with pytest.raises(TransportError, match="This rank"):
        tagged.loads(text)


@dataclass
class Inner:
    number: int = 1
    color: Color = Color.RED
    path: Path = Path("p")


@dataclass(frozen=True)
class Frozen:
    seed: int = 1


@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    many: list[Inner] = field(default_factory=lambda: [Inner(), Inner()])
    named: dict[str, int] = field(default_factory=lambda: {"a": 1})
    frozen: Frozen = field(default_factory=Frozen)
    anything: Any = 0.5
    link: Any = "${inner.number}"
    missing: int = "???"  # type: ignore[assignment]


def test_values_are_laid_over_types() -> None:
    """Values are the other's, types one's own, interpolations stay."""
    other = OmegaConf.structured(Outer)
    OmegaConf.set_readonly(other.frozen, False)
    other.merge_with(
        {"inner": {"number": 7}, "frozen": {"seed": 5}, "anything": math.nan, "missing": 3}
    )
    other.many[1].number = 9
    own = OmegaConf.structured(Outer)
    OmegaConf.set_readonly(own, True)
    overlay.lay(tagged.loads(tagged.dumps(overlay.raw(other))), own)
    found = OmegaConf.to_object(own)
    assert isinstance(found, Outer)
    assert found.frozen.seed == 5
    assert (found.inner.number, found.link, found.many[1].number, found.missing) == (7, 7, 9, 3)
    assert isinstance(found.many[1], Inner)
    assert math.isnan(found.anything)
    assert OmegaConf.is_readonly(own)
    assert OmegaConf.to_container(own)["link"] == "${inner.number}"  # type: ignore[index,call-overload]


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"a": 1}, "b is only in rank 0's"),
        ({"a": 1, "b": {"c": [1, 2]}, "d": 1}, "d is only in this rank's"),
        ({"a": 1, "b": {"c": [1]}}, "b.c has 2 items in rank 0's and 1 in this rank's"),
        ({"a": [], "b": {"c": [1, 2]}}, "a is a int in rank 0's and a list here"),
        ({"a": 1, "b": None}, "b is a dict in rank 0's and a NoneType here"),
    ],
)
def test_other_structures_are_named(own: Any, named: str) -> None:
    """A key or a kind that differs is named."""
    with pytest.raises(StartError, match=named):
        overlay.lay({"a": 1, "b": {"c": [1, 2]}}, OmegaConf.create(own))


TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_NODEID": "2", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1", "SLURM_STEP_NODELIST": "gpu[03-05,9],cpu1",
}  # fmt: skip


def test_place_by_torchrun() -> None:
    """Torchrun's variables are taken as they are."""
    place = find_place(TORCHRUN)
    assert place is not None
    assert (place.rank, place.world_size, place.host, place.port) == (1, 4, "node0", 29400)
    assert (place.shares_store, dict(place.variables)) == (True, {})


def test_place_by_slurm() -> None:
    """What torchrun would have set comes from Slurm; what is set stays."""
    place = find_place({**SLURM, "LOCAL_RANK": "0"})
    assert place is not None
    assert (place.rank, place.world_size, place.host, place.port) == (5, 7, "gpu03", None)
    assert place.variables == {
        "RANK": "5", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2",
        "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "gpu03",
    }  # fmt: skip
    chosen = find_place({**SLURM, "MASTER_ADDR": "cpu1", "MASTER_PORT": "3000"})
    assert chosen is not None
    assert (chosen.host, chosen.port) == ("cpu1", 3000)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu7", "gpu7"), ("gpu[7-9]", "gpu7"), ("a[1,3]-ib,b", "a1-ib"), ("x,y", "x")],
)
def test_first_host(nodes: str, first: str) -> None:
    """Slurm's short form of a list of hosts is understood."""
    place = find_place({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert place is not None
    assert place.host == first


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},  # a batch script
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
        {"RANK": "0", "WORLD_SIZE": "4"},
        {**TORCHRUN, MARK: "none/node0/29400/1/0"},  # started by such a rank
    ],
)
def test_nobodys_rank(environ: Mapping[str, str]) -> None:
    """An app that runs alone is no rank."""
    assert find_place(environ) is None
