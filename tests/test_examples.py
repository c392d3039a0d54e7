"""Every example in docs/examples runs, as a reader would run it, and does what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest
from documents import ROOT
from tests.support.scripted_model import ids_of, write_model

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A scripted model that answers everything alike, slowly enough that requests meet."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = str(folder / "tokenizer")
    scripts = {"*": ids_of("capital of France is Paris, and the capital of Italy")}
    return write_model(folder, scripts, tokenizer=tokenizer, step_seconds=0.005)["model"]  # type: ignore[arg-type]


def run(name: str, model: str) -> list[str]:
    command = [sys.executable, f"docs/examples/{name}.py", model]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_every_example_has_a_test() -> None:
    names = "attach draft_and_rewrite embeddings offline priorities streaming write_and_check"
    assert [path.stem for path in EXAMPLES] == names.split()


def test_offline(model: str) -> None:
    lines = run("offline", model)
    assert len(lines) == 3
    assert all("Paris" in line and "failed" not in line for line in lines)


def test_streaming(model: str) -> None:
    lines = run("streaming", model)
    assert sum(line.startswith("'Once upon a time'") for line in lines) > 3
    assert sum(line.startswith("'In the year 2100'") for line in lines) > 3
    assert lines[-1].startswith("'A long story:', its first words: 'capital of France")


def test_attach(model: str) -> None:
    lines = run("attach", model)
    assert len(lines) == 2
    assert "Italy is' ->" in lines[0] and "Spain is' ->" in lines[1]


def test_priorities(model: str) -> None:
    lines = run("priorities", model)
    assert len(lines) == 5
    assert lines[0].startswith("urgent")


def test_embeddings(model: str) -> None:
    lines = run("embeddings", model)
    assert lines[0] == "3 vectors of 8 numbers"
    assert len(lines) == 3


def test_draft_and_rewrite(model: str) -> None:
    lines = run("draft_and_rewrite", model)
    assert sum(line.startswith("draft: ") for line in lines) > 3
    assert sum(line.startswith("rewrite: ") for line in lines) > 3
    assert [line.split(": '")[0] for line in lines[-2:]] == ["whole draft", "whole rewrite"]
    assert all("capital of France is Paris" in line and line.endswith("stop)") for line in lines[-2:])


def test_write_and_check(model: str) -> None:
    lines = run("write_and_check", model)
    tasks = ["adds two numbers", "counts words", "reverses a string"]
    assert [line.partition(": ")[0] for line in sorted(lines)] == tasks
    assert all(line.count("capital of France is Paris") == 2 and " -> " in line for line in lines)
