"""Pinned host memory of exactly the size asked for: torch's own allocator rounds up to a power of two."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor


def pinned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros on the host, pinned until the tensor goes: copies to and from a GPU run beside the program.

    Raises:
        RuntimeError: it cannot be had, or not be pinned.
    """
    memory = torch.zeros(shape, dtype=dtype)
    if memory.nbytes:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if code := int(cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
            raise torch.cuda.CudaError(code)
        unpin = weakref.finalize(memory, cudart.cudaHostUnregister, memory.data_ptr())
        unpin.atexit = False  # the end of the process does it, and CUDA may be gone by then
    return memory
