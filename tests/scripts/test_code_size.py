"""What counts as a line of code, and that every file of the wheel is counted."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import code_size
import pytest
from documents import ROOT, package_files

SOURCE = '''"""A docstring
of two lines."""

import os  # a comment behind code

# a comment
LIMIT = 3
"""What the limit is for."""

TEXT = """three
lines
of text"""


def function() -> str:
    """Says what it does."""

    return os.path.join(
        TEXT,
    )
'''


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    assert code_size.code_lines(SOURCE) == 1 + 1 + 3 + 1 + 3


def test_every_file_of_the_wheel_is_counted(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.endswith(".py")}
    counted = [path.relative_to(ROOT).as_posix().removeprefix("src/wavecore/") for path in package_files()]
    assert len(counted) == len(set(counted))
    assert {f"wavecore/{name}" for name in counted} == held


def test_the_spine_is_what_it_names() -> None:
    spine = [path.relative_to(ROOT).as_posix() for path in package_files() if code_size.is_spine(path)]
    assert {"engine_core/plan.py", "engine_core/request.py", "engine_core/loop/core.py"} <= set(spine)
    assert "engine_core/models/decoder.py" not in spine
    assert all(any(path.startswith(part) for path in spine) for part in code_size.SPINE)


@pytest.fixture
def one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the spine; to count all takes seconds."""
    monkeypatch.setattr(code_size, "package_files", lambda: [ROOT / "engine_core" / "plan.py"])


@pytest.mark.usefixtures("one_file")
def test_check_fails_above_the_budget(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["code_size.py", "--check"])
    monkeypatch.setattr(code_size, "is_current", lambda *_: True)
    monkeypatch.setitem(code_size.BUDGET, "package", 1_000_000)
    monkeypatch.setitem(code_size.BUDGET, "spine", 1_000_000)
    assert code_size.main() == 0
    monkeypatch.setitem(code_size.BUDGET, "spine", 100)
    assert code_size.main() == 1
    assert "its budget is 100" in capsys.readouterr().err


@pytest.mark.usefixtures("one_file")
def test_check_fails_on_a_stale_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["code_size.py", "--check"])
    monkeypatch.setattr(code_size, "BUDGET", {"package": 1_000_000, "spine": 1_000_000})
    monkeypatch.setattr(code_size, "is_current", lambda *_: False)
    assert code_size.main() == 1
    assert "--write" in capsys.readouterr().err
