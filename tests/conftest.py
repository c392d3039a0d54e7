"""Shared by all tests: hardware markers, a clean environment, equal random numbers, and checks of what stays behind."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

TESTS = Path(__file__).parent

if not Path("/dev/nvidiactl").exists():
    # Triton's interpreter stands in for a GPU (tests/kernels). It is chosen when triton is first imported, which any
    # test module may cause.
    os.environ["TRITON_INTERPRET"] = "1"

# One thread computes, here and in every engine of a test: the models are tiny, and threads that spin for each other on
# cores that others use take several times as long. Libraries read this when they are loaded.
for _library in ("OMP", "OPENBLAS"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")

# What tests start imports the package from here, and what runs scripted models.
_paths = [str(TESTS.parent / folder) for folder in ("src", "scripts")]
os.environ["PYTHONPATH"] = os.pathsep.join([*_paths, *filter(None, [os.environ.get("PYTHONPATH")])])

# A program that compiles every module again takes a third longer to import them, and tests start hundreds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Started in the background (nohup, a script's &) a process ignores these, and so would all that tests start from it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Other processes may own the cores: no property fails for being slow.
settings.register_profile("loaded machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("loaded machine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs GPUs, and skip tests/gpu where there is none; those that need several skip by themselves."""
    gpus = None
    for item in items:
        if "two_gpus" in getattr(item, "fixturenames", ()):
            item.add_marker("multi_gpu")
        if item.path.relative_to(TESTS).parts[0] != "gpu":
            continue
        if gpus is None:
            gpus = _count_gpus()
        item.add_marker("gpu")
        if not gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _count_gpus() -> int:
    """Asked in a child, so that collecting tests neither imports torch nor starts CUDA in this process."""
    code = "import torch; print(torch.cuda.device_count())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    return int(out.stdout or 0)


def pytest_collection_finish() -> None:
    """What is imported by now stays: the garbage collector, which hundreds of tests call, looks at the rest alone."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _log_level() -> None:
    """An engine that an earlier test started here may have asked for another one."""
    logging.getLogger("wavecore").setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on the caller's settings or reaches a model hub."""
    for name in [n for n in os.environ if n.startswith("WAVECORE_") and n != "WAVECORE_CACHE"]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Every test sees the same random numbers, alone and behind others."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(20)


@pytest.fixture
def own_ops() -> Iterator[None]:
    """The operations that a test replaces are the built-in ones again behind it."""
    from wavecore.kernels import ops

    yield
    for operation in ops.OPERATIONS.values():
        operation.replace(None)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that tests read and do not change: three layers, random weights, no tokenizer."""
    from tests.support.checkpoints import make_config, save_model

    return save_model(tmp_path_factory.mktemp("tiny") / "model", make_config("Llama"))


@pytest.fixture(scope="session", autouse=True)
def runtime_folder() -> Iterator[Path]:
    """Runtime directories are made here, so that nobody else's are seen or swept."""
    # short, because ipc paths are limited
    with (
        tempfile.TemporaryDirectory(prefix="wc-", dir="/tmp", ignore_cleanup_errors=True) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@pytest.fixture(scope="session")
def _zero_copy_thread() -> None:
    """pyzmq's thread that frees zero-copy messages starts with the first large one and stays: not a leak of ours."""
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUSH) as push, context.socket(zmq.PULL) as pull:
        pull.bind("inproc://once")
        push.connect("inproc://once")
        push.send(bytes(1 << 20), copy=False)
        pull.recv()


@pytest.fixture
def nothing_left(
    runtime_folder: Path, _zero_copy_thread: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """See `leaks.nothing_left`. Engines that several tests share are older than a test, so they may stay."""
    import tqdm
    from tests.support import leaks

    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)
    with leaks.nothing_left(runtime_folder):
        yield
        caplog.clear()  # logged exceptions hold frames


@pytest.fixture
def quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors look after their engines ten times a second, and start a dead one again after 0.1 s instead of 1, 2,
    4 ... s; the delays have tests of their own."""
    for module in ("stall", "supervisor"):
        monkeypatch.setattr(f"wavecore.transport.processes.{module}.TICK_SECONDS", 0.1)
    monkeypatch.setattr("wavecore.transport.processes.group.MAX_DELAY", 0.1)
