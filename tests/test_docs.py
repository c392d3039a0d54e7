"""The documents that are made from the code are current."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_architecture_lists_every_file() -> None:
    run = subprocess.run([sys.executable, "scripts/file_table.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, "run scripts/file_table.py"
