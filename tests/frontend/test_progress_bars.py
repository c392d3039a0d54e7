"""The bar of a start as a user sees it."""

from __future__ import annotations

import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from wavecore.frontend import progress_bars
from wavecore.frontend.progress_bars import PHASES, StartBar


def test_one_bar_that_only_grows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(progress_bars, "_hidden", lambda: False)
    seen: list[float] = []
    with StartBar(disable=False) as bar:
        for phase in PHASES:
            for fraction in (0.0, 0.5, 1.0, 0.0):
                bar(0, phase, fraction)
                seen.append(bar.n)
    assert seen == sorted(seen)
    assert len(set(seen)) > 10
    assert seen[-1] == 100
    shown = capsys.readouterr().err
    for words, _, _ in PHASES.values():
        assert words in shown
    assert "%/s" not in shown and "s/%" not in shown


@pytest.mark.parametrize("stream", ["closed", "a program's own", "none"])
def test_any_standard_error_will_do(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    closed = io.StringIO()
    closed.close()
    writer = SimpleNamespace(write=len, flush=list)
    monkeypatch.setattr(sys, "stderr", {"closed": closed, "a program's own": writer, "none": None}[stream])
    with StartBar(disable=False) as bar:
        bar(0, "load", 0.5)
        assert bar.disable


def test_no_warning_in_a_notebook_without_widgets() -> None:
    code = """
import sys, types, warnings
sys.modules["ipywidgets"] = None
ipython = types.ModuleType("IPython")
ipython.get_ipython = lambda: types.SimpleNamespace(config={"IPKernelApp": {}})
sys.modules["IPython"] = ipython
sys.modules["ipykernel"] = types.ModuleType("ipykernel")
warnings.simplefilter("error")
from wavecore.frontend.progress_bars import StartBar
with StartBar(False) as bar:
    bar(0, "load", 0.5)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "loading weights" in done.stderr
