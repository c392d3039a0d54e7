"""Where the process is begun that compiles kernels while an engine starts. Needs no torch: that is not imported yet.

Where it has compiled all, a stamp stays in Triton's cache, an empty file, and later starts need no such process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path
from threading import Event, Thread
from typing import Self

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import THREADS, visible_gpus
from wavecore.engine_core.models.spec import ModelSpec

MODULE = "wavecore.engine_core.startup.kernel_process"
FIRST_DONE = "what is launched before the engine is ready is compiled\n"  # what it says; then it goes on
MOST_SECONDS = 60.0  # behind the weights; all kernels in turn take half of that
logger = logging.getLogger(__name__)


def compiler_beside(config: EngineConfig, spec: ModelSpec, rank: int) -> AbstractContextManager[KernelCompiler | None]:
    """A compiler where there is a GPU and no stamp; that of rank 0 serves all ranks that share a model."""
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and visible_gpus(os.environ))
    if not on_gpu or rank > 0 or (stamp := stamp_of(config, spec)).exists():
        return nullcontext()
    return KernelCompiler(config, stamp)


def stamp_of(config: EngineConfig, spec: ModelSpec) -> Path:
    """The file that says that what such a start launches is compiled. Its name is a hash of what decides that, but for
    the kind of GPU; where the stamp is wrong, the warm-up compiles, once."""
    home = os.environ.get("TRITON_HOME") or os.environ.get("HOME", "")
    folder = os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")
    code = b"".join(file.read_bytes() for file in sorted(Path(__file__).parents[2].glob("*/**/*.py")))
    settings = repr((config.to_json(), spec, version("torch")))  # torch's version decides Triton's
    return Path(folder, f"wavecore-{hashlib.sha256(settings.encode() + code).hexdigest()}")


class KernelCompiler:
    """The process of `kernel_compiler`. As a context manager it leaves none behind where the start fails.

    Whatever goes wrong there costs time alone: a kernel that it did not compile is compiled at its first launch.

    Args:
        stamp: made when it is done and nothing went wrong.
    """

    def __init__(self, config: EngineConfig, stamp: Path) -> None:
        command = [sys.executable, "-P", "-m", MODULE]
        env = {**os.environ, THREADS: "1"}  # it forks
        self._stamp, self._has_first = stamp, Event()
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
        with suppress(BrokenPipeError), self._process.stdin as told:  # type: ignore[union-attr]
            told.write(config.to_json())
        Thread(target=self._watch, name="kernel compiler", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if error is not None:
            self._process.kill()
            self._process.wait()

    def wait(self) -> None:
        """Until all is compiled that is launched before the engine is ready."""
        if not self._has_first.wait(MOST_SECONDS):
            self._process.kill()

    def _watch(self) -> None:
        """Hear that process out; it goes on while the engine serves."""
        with self._process.stdout as said:  # type: ignore[union-attr]
            while said.readline() not in (FIRST_DONE, ""):
                pass
            self._has_first.set()
        status = self._process.wait()
        if status != 0:
            logger.warning("kernels may compile as they are launched: not all did before (exit status %s)", status)
            return
        with suppress(OSError):  # no such folder, or a full disk: the next start finds no stamp
            self._stamp.touch()
