"""What kernels need to know of a device."""

from __future__ import annotations

from functools import cache

import torch


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; a small number for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return 4
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on a GPU; an H100's for Triton's interpreter on a CPU."""
    if device.type != "cuda":
        return 227 << 10
    from triton.runtime import driver  # not there on every machine that has a CPU alone

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])
