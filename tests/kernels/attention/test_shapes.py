"""Which shapes of attention the kernels cannot hold on a device."""

from __future__ import annotations

import re

import pytest
import torch

from wavecore.kernels.attention import prefill_hopper, shapes
from wavecore.kernels.attention.shapes import refusal

CUDA = torch.device("cuda:0")


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "shared", "reason"),
    [
        (32, 1, 256, 99 << 10, None),
        (2, 2, 8, 227 << 10, None),
        (8, 8, 512, 227 << 10, "head_dim 512 .* up to 256"),
        (33, 1, 64, 227 << 10, "33 query heads .* up to 32"),
        (8, 8, 64, 64 << 10, "64 KiB of shared memory, .* compute capability 8.0"),
    ],
)
def test_what_cuda_refuses(
    monkeypatch: pytest.MonkeyPatch, heads: int, kv_heads: int, head_dim: int, shared: int, reason: str | None
) -> None:
    monkeypatch.setattr(shapes, "shared_memory", lambda _device: shared)
    got = refusal(heads, kv_heads, head_dim, CUDA)
    assert got is None if reason is None else re.search(reason, got or ""), got
    assert refusal(heads, kv_heads, head_dim, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("dtype", "head_dim", "block_size", "capability", "held"),
    [
        (torch.bfloat16, 128, 16, 90, True),
        (torch.float16, 64, 128, 90, True),
        (torch.bfloat16, 256, 8, 90, True),
        (torch.float32, 128, 16, 90, False),
        (torch.bfloat16, 96, 16, 90, False),
        (torch.bfloat16, 128, 48, 90, False),
        (torch.bfloat16, 128, 4, 90, False),
        (torch.bfloat16, 128, 16, 80, False),
        (torch.bfloat16, 128, 16, 100, False),
    ],
)
def test_what_the_kernel_for_hopper_holds(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, head_dim: int, block_size: int, capability: int, held: bool
) -> None:
    monkeypatch.setattr(prefill_hopper, "capability", lambda _device: capability)
    q = torch.empty(1, 8, head_dim, dtype=dtype, device="meta")
    kv_cache = torch.empty(2, 1, 2, 2, block_size, head_dim, dtype=dtype, device="meta")
    assert prefill_hopper.holds(q, kv_cache) is held
