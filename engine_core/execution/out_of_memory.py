"""Whether memory was short, on the device or on the host, and what to say of it."""

import torch

from wavecore.engine_core.plan import OutOfMemory
from wavecore.transport.errors import ResourceError


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was short, on either side: torch, cuBLAS and Triton say so in a plain RuntimeError each."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    phrases = ("out of memory", "ALLOC_FAILED", "allocate memory")
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or ["out of memory"])[0]


def shortage(error: BaseException) -> str:
    """What the error says of memory that was short, or its cause: a capture says only that it failed. Else ""."""
    if isinstance(error, OutOfMemory | ResourceError) or is_out_of_memory(error):
        return first_line(error)
    if isinstance(error, RuntimeError) and error.__context__ is not None:
        return shortage(error.__context__)
    return ""
