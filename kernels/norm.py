"""Add and RMSNorm in one pass. Sums in float32; the norm sees the sum as it is stored, rounded."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """See `reference.layers.add_rms_norm`; x and residual are contiguous."""
    tokens, hidden = x.shape
    assert x.is_contiguous() and weight.shape == (hidden,)
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    normed = torch.empty_like(x)
    total = x if residual is None else torch.empty_like(x)
    if tokens:
        block = triton.next_power_of_2(hidden)
        _add_rms_norm[(tokens,)](
            x,
            residual if residual is not None else x,
            weight,
            normed,
            total,
            hidden,
            eps,
            weight_offset,
            HAS_RESIDUAL=residual is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
    return normed, total


@triton.jit
def _add_rms_norm(
    x_ptr,
    residual_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    hidden,
    eps,
    weight_offset,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program (token) handles the whole vector; d [BLOCK] are its places, `hidden` of them real."""
    base = tl.program_id(0).to(tl.int64) * hidden
    d = tl.arange(0, BLOCK)
    inside = d < hidden
    x = tl.load(x_ptr + base + d, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + base + d, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + base + d, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / hidden + eps)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + weight_offset
    tl.store(normed_ptr + base + d, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)
