"""What kernels need to know of a device."""

from __future__ import annotations

from functools import cache
from typing import Any

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
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def early(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """How to launch a kernel that calls `chain.follow`: before its predecessor ends, from compute capability 9.0 on."""
    if wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}
