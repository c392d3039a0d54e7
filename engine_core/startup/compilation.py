"""Triton's compilations of a start: when they happen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wavecore.engine_core.models.files import Progress


@contextmanager
def compilation_told(progress: Progress, phase: str) -> Iterator[None]:
    """Run a phase of the start, of which compilations are told as phase "compile"; what lies in Triton's cache is only
    read then."""
    from triton import knobs  # slow to import, and a CPU needs none

    def tell(name: str) -> Any:
        return lambda *_, **__: progress(name, 0.0)

    hooks = knobs.runtime
    progress(phase, 0.0)
    hooks.jit_cache_hook, hooks.jit_post_compile_hook = tell("compile"), tell(phase)
    try:
        yield
    finally:
        hooks.jit_cache_hook = hooks.jit_post_compile_hook = None
