"""What the source files of kernels promise: who is free of Triton, and where mypy expects jitted functions."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

from documents import ROOT
from tests.test_layers import imports

FILES = sorted((ROOT / "kernels").rglob("*.py"))
JITTED = {"triton.jit", "gluon.jit"}
PLAIN = ("batch.py", "device.py", "sampling/rows.py")
"""Data and facts that twins use too."""


def decorators(path: Path) -> Iterator[str]:
    """The decorators of a file's functions, without their arguments."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.FunctionDef):
            for decorator in node.decorator_list:
                yield ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)


def test_mypy_is_told_of_every_file_with_jitted_functions() -> None:
    jitted = [file for file in FILES if not JITTED.isdisjoint(decorators(file))]
    modules = [".".join(("wavecore", *file.relative_to(ROOT).with_suffix("").parts)) for file in jitted]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    [listed] = [entry["module"] for entry in settings if not entry.get("disallow_untyped_decorators", True)]
    assert listed == modules and len(modules) > 10


def test_twins_and_plain_data_know_no_triton() -> None:
    """So that a CPU runs without it, and a twin and its kernel share nothing but numbers."""
    free = [file for file in FILES if file.parent.name == "reference"]
    assert len(free) == 4
    for file in (*free, *(ROOT / "kernels" / name for name in PLAIN)):
        assert not [name for name in imports(file) if name.startswith("triton")], file


def test_no_kernel_takes_anything_from_a_twin() -> None:
    for file in FILES:
        if not JITTED.isdisjoint(decorators(file)):
            assert not [name for name in imports(file) if ".reference" in name], file
