"""Triton's compilations of a start: in another process while weights load, and what the warm-up still meets.

Needs no torch, and begins before that is imported.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, Self

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import THREADS, visible_gpus
from wavecore.engine_core.models.files import Progress

MODULE = "wavecore.engine_core.startup.kernel_compiler"
MOST_SECONDS = 60.0  # behind the weights; all kernels in turn take half of that
logger = logging.getLogger(__name__)


def compiler_beside(config: EngineConfig) -> AbstractContextManager[KernelCompiler | None]:
    """A compiler where there is a GPU; that of rank 0 serves all ranks that share a model."""
    on_gpu = config.device.startswith("cuda") or (config.device == "auto" and visible_gpus(os.environ))
    return KernelCompiler(config) if on_gpu and not config.model.startswith("scripted:") else nullcontext()


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
        try:
            status = self._process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("kernels were not compiled after %g s; the rest compile as they are launched", MOST_SECONDS)
        else:
            if status:
                logger.warning("what compiles kernels ended with status %d; they compile as they are launched", status)


@contextmanager
def compilation_told(progress: Progress, phase: str) -> Iterator[None]:
    """Run a phase of the start, of which compilations are told as phase "compile"; what lies in Triton's cache is only
    read then."""
    from triton import knobs  # slow to import, and a CPU needs none

    def tell(name: str) -> Any:
        return lambda *_, **__: progress(name, 0.0)

    progress(phase, 0.0)
    with knobs.runtime.scope():
        knobs.runtime.jit_cache_hook, knobs.runtime.jit_post_compile_hook = tell("compile"), tell(phase)
        yield
