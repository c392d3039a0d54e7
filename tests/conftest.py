"""Shared by all tests: hardware markers, a clean environment, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

if not Path("/dev/nvidiactl").exists():
    # Triton's interpreter stands in for a GPU (tests/kernels). It is chosen when triton is first imported, which any
    # test module may cause.
    os.environ["TRITON_INTERPRET"] = "1"


# Started in the background (nohup, a script's &) a process ignores these, and so would all that tests start from it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Other processes may own the cores: no property fails for being slow.
settings.register_profile("loaded machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests/gpu and tests/multi_gpu by their folder, and skip them where the hardware is missing."""
    gpus = None
    for item in items:
        folder = item.path.parent.name
        if folder not in ("gpu", "multi_gpu"):
            continue
        if gpus is None:
            gpus = _count_gpus()
        need = 1 if folder == "gpu" else 2
        item.add_marker(folder)
        if gpus < need:
            item.add_marker(pytest.mark.skip(reason=f"needs {need} CUDA GPU(s), found {gpus}"))


def _count_gpus() -> int:
    """Asked in a child, so that collecting tests neither imports torch nor starts CUDA in this process."""
    code = "import torch; print(torch.cuda.device_count())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(out.stdout or 0)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the caller's settings, reaches a model hub, or oversubscribes the cores."""
    for name in [n for n in os.environ if n.startswith("WAVECORE_") and n != "WAVECORE_CACHE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    source = str(Path(__file__).parent.parent / "src")
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{source}{os.pathsep}{path}" if path else source)


@pytest.fixture
def own_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations that a test replaces are the built-in ones again behind it."""
    from wavecore.kernels import ops

    monkeypatch.setattr(ops, "_custom", {})
    monkeypatch.setattr(ops, "_chosen", {})


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests read and do not change: three layers, random weights, no tokenizer."""
    from tests.support.checkpoints import make_config, save_model

    return save_model(tmp_path_factory.mktemp("tiny") / "model", make_config("Llama"))
