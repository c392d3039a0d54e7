"""For tests of programs that use this package (`wavecore.testing`): GPUs or a skip; deployments that leave nothing.

    from wavecore import connect
    from wavecore.testing import deployment, gpus

    def test_of_mine():
        gpus(2)
        with deployment("torchrun", "./my-model", data_parallel_size=2) as (runtime_dir, _):
            with connect(runtime_dir) as llm:
                ...

Needs pytest where it skips, and nowhere else.
"""

import contextlib
import ctypes
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import psutil

from wavecore.engine_core.api.devices import visible_gpus
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import StartError
from wavecore.transport.processes.runtime_dir import RuntimeDir

Launcher = Literal["python", "wavecore", "launch.py", "torchrun"]
Process = subprocess.Popen[bytes]
START_SECONDS, END_SECONDS = 600.0, 10.0
STOP_SECONDS = 60.0  # of a launcher that was asked to end; what it leaves when it is killed then is named
READY = "ready; runtime directory: "
GPU_MEMORY = "nvidia-smi --query-gpu=uuid,memory.used --format=csv,noheader,nounits"
GPU_SLACK = 64  # MiB that other programs may take of a GPU meanwhile
_SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "launch.py"
_PR_SET_CHILD_SUBREAPER = 36
_ANY = 1 << 20  # of what nothing may be left


def gpus(count: int) -> list[str]:
    """That many of the visible GPUs, as CUDA_VISIBLE_DEVICES names them; the test is skipped where there are fewer."""
    import pytest

    found = visible_gpus(os.environ) or []
    if len(found) < count:
        pytest.skip(f"needs {count} GPUs, and {len(found)} are visible")
    return found[:count]


@contextlib.contextmanager
def deployment(
    launcher: Launcher = "wavecore", model: str | Path = "default", **settings: Any
) -> Iterator[tuple[Path, Process | None]]:
    """Engines that one of the launchers starts. At the end they are stopped by SIGTERM, if they still run.

    Args:
        launcher: "python" (`LLM(...)` in this program), "wavecore" (`wavecore engine`), "launch.py"
            (`scripts/launch.py` of a checkout), or "torchrun".
        settings: of `EngineConfig`.

    Returns:
        The runtime directory, to `connect` to, and the launcher's process (None for "python").

    Raises:
        WavecoreError: it did not start.
        AssertionError: a process, socket, shared memory or GPU memory was left behind; says which.
    """
    how = _embedded(model, settings) if launcher == "python" else _launched(_command(launcher, model, settings))
    prctl, before = ctypes.CDLL(None).prctl, _held()
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # what loses its parent becomes a child of this process
    try:
        with how as (runtime_dir, process):
            yield runtime_dir, process
        RuntimeDir(None).remove()  # what a killed supervisor left in the file system, the next start removes
        by = time.monotonic() + END_SECONDS
        while left := [name for name, more in _held(runtime_dir).items() if more > before.get(name, 0) + GPU_SLACK]:
            if time.monotonic() > by:
                raise AssertionError(f"left behind: {', '.join(left)}")
            time.sleep(0.02)
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@contextlib.contextmanager
def _embedded(model: str | Path, settings: Mapping[str, Any]) -> Iterator[tuple[Path, None]]:
    with LLM(model, **settings) as llm:
        yield llm.runtime_dir, None


def _command(launcher: Launcher, model: str | Path, settings: Mapping[str, Any]) -> list[str]:
    words = [sys.executable, "-m", "wavecore", "engine"]
    if launcher == "torchrun":
        ranks = settings.get("data_parallel_size", 1) * settings.get("tensor_parallel_size", 1)
        words[2:2] = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"]
    elif launcher == "launch.py":
        words[1:] = [str(_SCRIPT)]
    given = {name: value if isinstance(value, str) else json.dumps(value) for name, value in settings.items()}
    return [*words, str(model), *(f"--{name}={text}" for name, text in given.items())]


@contextlib.contextmanager
def _launched(command: list[str]) -> Iterator[tuple[Path, Process]]:
    with (
        tempfile.NamedTemporaryFile(suffix=".log") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        try:
            by = time.monotonic() + START_SECONDS
            while READY not in (said := Path(log.name).read_text(errors="replace")):
                if process.poll() is not None or time.monotonic() > by:
                    raise StartError(f"{command} did not get ready; it said: {said[-4000:]}")
                time.sleep(0.02)
            yield Path(said.partition(READY)[2].splitlines()[0]), process
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()


def _held(runtime_dir: Path | None = None) -> dict[str, int]:
    """Processes below this one, those without a parent too; sockets there; shared memory of ours; MiB of each GPU."""
    sockets = re.findall(r"\S+$", Path("/proc/net/unix").read_text(), re.MULTILINE)
    held = {name: _ANY for name in sockets if Path(name).parent == runtime_dir}
    held |= {str(path): _ANY for path in Path("/dev/shm").glob("*wavecore*")}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(ChildProcessError, psutil.Error):
            if child.status() != psutil.STATUS_ZOMBIE or os.waitpid(child.pid, os.WNOHANG) == (0, 0):
                held[f"process {child.pid}"] = _ANY
    memory = re.findall(r"^(GPU-\S+), (\d+)$", subprocess.getoutput(GPU_MEMORY), re.MULTILINE)
    return held | {f"memory of {gpu}": int(used) for gpu, used in memory}
