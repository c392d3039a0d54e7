"""Every script says what it is for when it is asked, and does nothing else then."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from documents import ROOT

TAKES_ARGUMENTS = re.compile(r"ArgumentParser\(.*__main__|only_checks\(__doc__", re.DOTALL)
SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.py")) if TAKES_ARGUMENTS.search(path.read_text())]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help(script: Path, tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, script, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("usage: ")
    assert not [*tmp_path.iterdir()]
