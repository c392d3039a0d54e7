"""The documents that are made from the code are current, and what they name exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from documents import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("script", ["file_table", "settings_page"])
def test_made_from_the_code(script: str) -> None:
    run = subprocess.run([sys.executable, f"scripts/{script}.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, f"run scripts/{script}.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    """Paths in backquotes, and targets of links, from the root or from the document's folder."""
    text = path.read_text()
    names = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|sh|toml|txt|json))(?:::\w+)?`", text)
    names += [name for name in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in name]
    missing = [name for name in names if not (ROOT / name).exists() and not (path.parent / name).exists()]
    assert not missing


def test_the_rule_for_names_sees_the_documents() -> None:
    assert {"ARCHITECTURE.md", "README.md", "faults.md"} <= {path.name for path in DOCUMENTS}


def test_hooks_run_what_ci_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert len(hooks) > 5
    assert not [hook["entry"] for hook in hooks if hook["entry"] not in ci]
