"""Attach to an engine that somebody else started."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, overload

from wavecore.frontend.async_llm import AsyncLLM
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import ConfigError


@overload
def connect(runtime_dir: str | Path, *, asynchronous: Literal[False] = False, timeout: float = 30.0) -> LLM: ...
@overload
def connect(runtime_dir: str | Path, *, asynchronous: Literal[True], timeout: float = 30.0) -> AsyncLLM: ...
def connect(runtime_dir: str | Path, *, asynchronous: bool = False, timeout: float = 30.0) -> LLM | AsyncLLM:
    """A client of the engine whose deployment lies in `runtime_dir`; any number may attach, from any process.

    Args:
        runtime_dir: as `wavecore engine` prints it, or `LLM.runtime_dir`.
        asynchronous: give an `AsyncLLM` instead of an `LLM`.
        timeout: seconds until the engine must have answered.

    Raises:
        StartError: nothing runs there, or it does not answer.
        EngineDead: what ran there is over; with the cause.
    """
    if not isinstance(runtime_dir, str | Path):
        raise ConfigError(f"runtime_dir must be the path of a runtime directory, not {runtime_dir!r:.60}")
    return AsyncLLM.connect(runtime_dir, timeout) if asynchronous else LLM.connect(runtime_dir, timeout)
