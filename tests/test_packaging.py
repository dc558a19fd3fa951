"""What is installed: the wheel, how Hydra finds it, and what it costs apps that do not use it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import hydra.core.plugins
import pytest

pytestmark = pytest.mark.hydra_versions

ROOT = Path(__file__).parent.parent
DOOR = "hydra_plugins/hydra_torchrun_launcher"
CLASS = "hydra_plugins.hydra_torchrun_launcher.TorchrunLauncher"
HEAVY = ("torch", "psutil", "cloudpickle", "tblib", "numpy", "rich")
MAX_IMPORT_CPU_S = 0.020

_DISCOVER = """
import json, pkgutil, sys
import hydra.core.plugins as plugins
from hydra.core.config_store import ConfigStore
from hydra.plugins.launcher import Launcher
way, walk = sys.argv[1], pkgutil.walk_packages
if way == "entry point":
    # Hydra's own plugins are found by the same function.
    pkgutil.walk_packages = lambda path=None, prefix="", onerror=None: (
        [] if prefix.startswith("hydra_plugins") else walk(path, prefix, onerror)
    )
if way == "namespace" and hasattr(plugins, "entry_points"):
    plugins.entry_points = lambda group: []
found = plugins.Plugins.instance().discover(Launcher)
print(json.dumps({
    "launchers": [f"{kind.__module__}.{kind.__qualname__}" for kind in found],
    "group": ConfigStore.instance().list("hydra/launcher"),
    "modules": sorted(name for name in sys.modules if "." not in name),
}))
"""

_IMPORT = """
import json, sys, time
import hydra, hydra.core.config_store, hydra.core.plugins, hydra.plugins.launcher
began = time.process_time()  # of this process alone: a busy machine doubles what the clock says
import hydra_plugins.hydra_torchrun_launcher
seconds = time.process_time() - began
modules = sorted(name for name in sys.modules if "." not in name)
print(json.dumps({"seconds": seconds, "modules": modules}))
"""


def python(code: str, *arguments: str) -> Any:
    """Run code in a fresh interpreter, warnings as errors; return the JSON that it printed."""
    environ = {key: v for key, v in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel with the build backend of this environment."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("the build backend, hatchling, is not installed here")
    folder = tmp_path_factory.mktemp("wheel")
    build = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [sys.executable, "-m", *build, "--wheel-dir", str(folder), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_both_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    """The wheel holds our package with its types, the door, and metadata; no tests, no bytecode."""
    names = wheel.namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {
        "hydra_plugins",
        "hydra_torchrun_launcher",
    }
    assert {f"hydra_torchrun_launcher/{name}" for name in ("py.typed", "report.html")} <= set(names)
    assert not [name for name in names if name.endswith(".pyc")]
    sources = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == sources


def test_door_is_one_module_in_a_namespace(wheel: zipfile.ZipFile) -> None:
    """Hydra imports every module it finds there, so there is one; `hydra_plugins` is nobody's."""
    below = [name for name in wheel.namelist() if name.startswith("hydra_plugins/")]
    assert below == [f"{DOOR}/__init__.py"]


def test_wheel_names_the_entry_points(wheel: zipfile.ZipFile) -> None:
    """The wheel tells Hydra 1.4 of the launcher once, and has the command."""
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    lines = wheel.read(name).decode().split("\n")
    assert lines.count("[hydra.plugins]") == 1
    module, kind = CLASS.rsplit(".", 1)
    assert [line for line in lines if "=" in line] == [
        "hydra-torchrun = hydra_torchrun_launcher.cli:main",
        f"torchrun = {module}:{kind}",
    ]


def test_entry_point_loads_the_launcher() -> None:
    """The installed entry point names a class that exists."""
    ours = [point for point in entry_points(group="hydra.plugins") if "torchrun" in point.value]
    assert {f"{p.load().__module__}.{p.load().__qualname__}" for p in ours} == {CLASS}


WAYS = ["namespace", "both"]
if hasattr(hydra.core.plugins, "entry_points"):  # hydra-core >= 1.4
    WAYS.append("entry point")


@pytest.mark.parametrize("way", WAYS)
def test_hydra_finds_one_launcher(way: str) -> None:
    """Hydra finds the launcher once, by each way and by both, with no warning or heavy import."""
    seen = python(_DISCOVER, way)
    assert seen["launchers"].count(CLASS) == 1
    assert [name for name in seen["launchers"] if "torchrun" in name.lower()] == [CLASS]
    assert seen["group"].count("torchrun.yaml") == 1
    assert not set(HEAVY) & set(seen["modules"])


def test_importing_the_plugin_is_cheap() -> None:
    """Every Hydra app pays for the import: no heavy module, and under 20 ms of CPU time."""
    runs = [python(_IMPORT) for _ in range(6)][1:]  # the first may write bytecode
    assert not set(HEAVY) & {name for run in runs for name in run["modules"]}
    # What else runs on the machine only adds to it.
    assert min(run["seconds"] for run in runs) < MAX_IMPORT_CPU_S
