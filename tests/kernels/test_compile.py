"""Every kernel compiles for the GPU that it is meant for, also where there is none, and none after the start."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.environment import environment

ROOT = Path(__file__).parent.parent.parent


def run(program: str, cache: Path, *args: str) -> str:
    """A program of this folder, with an empty cache of kernels and without Triton's interpreter; its output."""
    compiles = environment(TRITON_CACHE_DIR=str(cache))
    compiles.pop("TRITON_INTERPRET", None)
    command = [sys.executable, Path(__file__).with_name(program), *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=compiles)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def launched() -> set[str]:
    """Names of all kernels that the package launches."""
    launch = re.compile(r"^ +(_\w+)\[.*?\]\(", re.MULTILINE)  # a line that begins with kernel[grid](...)
    files = {file: launch.findall(file.read_text()) for file in (ROOT / "kernels").rglob("*.py")}
    assert sum(map(bool, files.values())) == 16, "a file that launches kernels came, went or is no longer seen"
    return {name for names in files.values() for name in names}


@pytest.mark.slow  # the start below compiles all but one
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    compiled = set(run("compile_for_hopper.py", tmp_path).split())
    assert compiled == launched()


def test_no_request_compiles_a_kernel(tmp_path: Path) -> None:
    """The warm-up did, whatever a request asks for: a compilation in a step costs all requests seconds."""
    compiled = json.loads(run("start_for_hopper.py", tmp_path / "cache", str(tmp_path / "model")))
    assert set(compiled.pop("warm-up")) == launched() - {"_prefill"}  # of two ranks; Hopper has one of its own
    assert not any(compiled.values()), {kind: names for kind, names in compiled.items() if names}
    assert len(compiled) > 30
