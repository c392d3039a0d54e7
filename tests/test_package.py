"""What strangers install: the wheel holds every module and table of `wavecore`, once, and each can be imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from documents import ALIASES, ROOT, package_files

DATA = [
    "__init__.pyi",
    "py.typed",
    "engine_core/api/llama_cpp.json",
    "engine_core/models/families.json",
    "engine_core/models/other_forms.json",
    "engine_core/models/tensor_names.json",
    "engine_core/scheduling/histograms.json",
    "frontend/cli/options.json",
    "frontend/compat.json",
    "frontend/progress_bars.json",
    "frontend/serve/api/fields.json",
    "frontend/serve/metrics.json",
    "frontend/vllm/modules.json",
]
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.path[0]), module
"""


def build(target: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return next(out.iterdir())


def contents(wheel: Path) -> list[str]:
    """Its files, without what describes it."""
    with zipfile.ZipFile(wheel) as opened:
        return sorted(name for name in opened.namelist() if ".dist-info/" not in name)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def modules() -> list[str]:
    """Paths of all modules, from the folder of the import package."""
    return [path.relative_to(ROOT).as_posix().removeprefix(f"{ALIASES}/") for path in package_files()]


def test_wheel_holds_every_module(wheel: Path, modules: list[str]) -> None:
    assert contents(wheel) == sorted(f"wavecore/{name}" for name in [*modules, *DATA])


def test_every_module_of_the_wheel_can_be_imported(wheel: Path, modules: list[str], tmp_path: Path) -> None:
    """Where the sources are not: no module is found in them by chance."""
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(tmp_path)
    names = [f"wavecore/{name}".removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in modules]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-P", "-c", IMPORT_ALL, *names]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_sdist_builds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", ROOT, tmp_path / "sdist")) as sdist:
        names = [name.split("/", 1)[1] for name in sdist.getnames()]
        sdist.extractall(tmp_path, filter="data")
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py"} <= set(names)
    [source] = tmp_path.glob("wavecore-*")
    assert contents(build("wheel", source, tmp_path / "wheel")) == contents(wheel)
