"""What strangers install: the wheel holds every module and table under the name `wavecore`, and nothing else."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = "wavecore/frontend/compat.json"
FOLDERS = ("transport", "kernels", "parallel", "engine_core", "frontend")


def build(target: str, out: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(out)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return next(out.iterdir())


def modules() -> set[str]:
    return {str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}


def test_wheel_holds_every_module(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", tmp_path / "wheel")) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    top = {"wavecore/__init__.py", "wavecore/__init__.pyi", "wavecore/py.typed"}
    want = {f"wavecore/{name}" for name in modules()} | top | {DATA}
    assert {n for n in names if ".dist-info/" not in n} == want
    code = "import wavecore, wavecore.frontend.compat; print(wavecore.__file__)"
    out = subprocess.run([sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(tmp_path / "site")},
                         capture_output=True, text=True, cwd=tmp_path, check=True)  # fmt: skip
    assert out.stdout.startswith(str(tmp_path))


def test_sdist_builds_again(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {n.split("/", 1)[1] for n in sdist.getnames()}
    assert modules() <= names
    assert {"pyproject.toml", "README.md", "LICENSE", "src/wavecore/__init__.py"} <= names
