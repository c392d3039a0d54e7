"""Whether memory was short, on the device or on the host, and what to say of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from wavecore.engine_core.plan import OutOfMemory

Made = TypeVar("Made")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, on either side: torch, cuBLAS and Triton say so in a plain RuntimeError each."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    phrases = ("out of memory", "ALLOC_FAILED", "allocate memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["out of memory"])[0]


def unless_short_of_memory(make: Callable[[], Made]) -> tuple[Made | None, str]:
    """What is made, or the reason why memory was short. The error itself is let go: it holds what was made so far."""
    try:
        return make(), ""
    except Exception as error:
        reason = _shortage(error)
        if not reason:
            raise
        return None, reason


def _shortage(error: BaseException) -> str:
    """What the error says of memory that was short, or its cause: a capture says only that it failed. Else ""."""
    if isinstance(error, OutOfMemory) or is_out_of_memory(error):
        return first_line(error)
    if isinstance(error, RuntimeError) and error.__context__ is not None:
        return _shortage(error.__context__)
    return ""
