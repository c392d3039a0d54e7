"""Tile sizes of the attention kernels by the sizes of a model, and what they cannot hold."""

import torch

from wavecore.kernels.device import shared_memory

MAX_HEAD_DIM = 256
MAX_GROUP = 32
"""Query heads that share a KV head; they are rows of one matrix product."""
LEAST_SHARED_MEMORY = 99 << 10
"""Bytes a program: consumer GPUs have them from Ampere (compute capability 8.6) on; the largest tile takes 96 KiB."""
LEAST_BLOCK_D = 16
"""Smaller heads are padded: matrix units multiply at least 16 values at once."""


def refusal(num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device) -> str | None:
    """Why the attention of a model cannot run on a device, with what would; None if it can. A CPU runs every size."""
    if device.type != "cuda":
        return None
    if head_dim > MAX_HEAD_DIM:
        return (
            f"head_dim {head_dim} does not fit the CUDA attention kernels, which hold up to {MAX_HEAD_DIM}; device cpu "
            "runs every size"
        )
    if num_heads > MAX_GROUP * num_kv_heads:
        return (
            f"{num_heads // num_kv_heads} query heads share a KV head, and the CUDA attention kernels hold up to "
            f"{MAX_GROUP}; device cpu runs every size"
        )
    if shared_memory(device) < LEAST_SHARED_MEMORY:
        return (
            f"the GPU gives a program {shared_memory(device) >> 10} KiB of shared memory, and the CUDA attention "
            f"kernels need {LEAST_SHARED_MEMORY >> 10}: take one of compute capability 8.0 or newer"
        )
    return None


def prefill_shape(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[int, int, int, int]:
    """BLOCK_M, BLOCK_N, warps, stages."""
    if dtype == torch.float32:  # exact products run outside the matrix units and want registers
        return (32, 32, 4 if dim <= 128 else 8, 1)
    if dim <= 128:
        return (128, 64, 4, 3)
    # with 64 keys it takes 160 KiB on Hopper and 104 KiB before; consumer GPUs have 99
    return (64, 64 if shared_memory(device) >= 160 << 10 else 32, 8, 2)


def decode_shape(dim: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Keys a tile, warps, stages, and how many programs fit a multiprocessor (registers and shared memory of sm_90).

    Loads go through the block table, so that 5 stages keep two tiles in flight, and 6 three.
    """
    if dtype == torch.float32:
        return (32, 4, 2, 2) if dim <= 128 else (16, 4, 2, 2)
    if dim <= 64:
        return 64, 4, 5, 4
    return (32, 4, 6, 3) if dim <= 128 else (32, 4, 5, 2)


def bundle_width(dim: int, dtype: torch.dtype) -> int:
    """Rows of the product of a tile with the query heads of all rows that share it, which leaves as many programs."""
    if dtype == torch.float32:
        return 16
    return 64 if 64 < dim <= 128 else 32
