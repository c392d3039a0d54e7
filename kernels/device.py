"""What kernels need to know of a device."""

from functools import cache
from typing import Any

import torch

STANDS_FOR = {"num_multiprocessors": 4, "shared_memory": 227 << 10, "capability": 0}
"""What is no GPU counts as this one: a small one for Triton's interpreter, or one that kernels are compiled for."""


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return STANDS_FOR["num_multiprocessors"]
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on a GPU."""
    if device.type != "cuda":
        return STANDS_FOR["shared_memory"]
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def capability(device: torch.device) -> int:
    """Compute capability of a GPU, 90 for 9.0."""
    if device.type != "cuda":
        return STANDS_FOR["capability"]
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def registers(warps: int) -> int:
    """Most registers a thread with which so many warps run on a multiprocessor at once, which has 65,536 (CUDA
    programming guide, compute capabilities 8.0 to 12.0)."""
    return min(255, 65536 // (32 * warps) // 8 * 8)


@cache
def early(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """How to launch a kernel that calls `chain.follow`: before its predecessor ends, from compute capability 9.0 on."""
    return {"EARLY": True, "launch_pdl": True} if wanted and capability(device) >= 90 else {"EARLY": False}
