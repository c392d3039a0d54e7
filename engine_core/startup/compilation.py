"""Where the process is begun that compiles kernels while weights load. Needs no torch: that is not imported yet."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Self

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import THREADS, visible_gpus

MODULE = "wavecore.engine_core.startup.kernel_compiler"
MOST_SECONDS = 60.0  # behind the weights; all kernels in turn take half of that
logger = logging.getLogger(__name__)


def compiler_beside(config: EngineConfig, rank: int) -> AbstractContextManager[KernelCompiler | None]:
    """A compiler where there is a GPU; that of rank 0 serves all ranks that share a model."""
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and visible_gpus(os.environ))
    return KernelCompiler(config) if on_gpu and rank == 0 else nullcontext()


class KernelCompiler:
    """The process of `kernel_compiler`. As a context manager it leaves none behind.

    Whatever goes wrong there costs time alone: a kernel that it did not compile is compiled at its first launch.
    """

    def __init__(self, config: EngineConfig) -> None:
        command = [sys.executable, "-P", "-m", MODULE]
        env = {**os.environ, THREADS: "1"}  # it forks
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, text=True)
        with suppress(BrokenPipeError), self._process.stdin as told:  # type: ignore[union-attr]
            told.write(config.to_json())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> None:
        """Until all is compiled."""
        status: int | None = None
        with suppress(subprocess.TimeoutExpired):
            status = self._process.wait(MOST_SECONDS)
        if status != 0:
            logger.warning("kernels compile as they are launched: nothing did before (exit status %s)", status)
