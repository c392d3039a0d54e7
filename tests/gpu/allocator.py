"""What torch's allocator of CUDA memory keeps: given back between tests, or grown before a step that may not ask the
driver for more."""

from __future__ import annotations

import gc
from typing import Any

import torch


def give_back_memory() -> None:
    """Whatever nothing refers to any more, and what the allocator has cached."""
    gc.collect()
    torch.cuda.empty_cache()


def grow_allocator(runner: Any) -> None:
    """Free blocks of both kinds, above 1 MiB and not, on every stream that allocates.

    Where the allocator has none that fits it asks the driver, which may wait for the device; and each test leaves its
    cache empty. Whether steady steps ask for memory is counted elsewhere.
    """
    for stream in (torch.cuda.current_stream(), runner.state.uploads.stream):
        with torch.cuda.stream(stream):
            blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in (1 << 29, *[1 << 19] * 128)]
        del blocks
    torch.cuda.synchronize()
