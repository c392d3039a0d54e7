"""Every kernel compiles for the GPU that it is meant for, also where there is none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    root = Path(__file__).parent.parent.parent
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(root / "src")}
    program = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    launched = re.compile(r"^ +(_\w+)\[.*?\]\(", re.MULTILINE)  # a line that begins with kernel[grid](...)
    expected = {name for file in (root / "kernels").glob("*.py") for name in launched.findall(file.read_text())}
    assert set(done.stdout.split()) == expected and len(expected) > 10
