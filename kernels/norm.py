"""Add and RMSNorm in one pass. Sums in float32; the norm sees the sum as it is stored, rounded."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.chain import follow
from wavecore.kernels.device import early


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
        _launch(x, residual, weight, normed, None if residual is None else total, None, eps, weight_offset)
    return normed, total


def gather_add_rms_norm(
    x: Tensor, residual: Tensor, index: Tensor, weight: Tensor, eps: float, weight_offset: float, out: Tensor
) -> None:
    """See `reference.layers.gather_add_rms_norm`; x, residual and out are contiguous."""
    assert x.is_contiguous() and residual.is_contiguous() and out.is_contiguous() and residual.shape == x.shape
    assert out.shape == (len(index), x.shape[1]) and weight.shape == x.shape[1:]
    if len(index):
        _launch(x, residual, weight, out, None, index, eps, weight_offset)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, normed: Tensor, *more: Tensor | float | None) -> None:
    """`more` as the kernel takes it: total, index, eps and weight_offset."""
    rows, hidden = normed.shape
    block = triton.next_power_of_2(hidden)
    options = {"num_warps": min(max(block // 512, 1), 16), **early(x.device)}
    _add_rms_norm[(rows,)](x, residual, weight, normed, *more, hidden, BLOCK=block, **options)


@triton.jit
def _add_rms_norm(
    x_ptr, residual_ptr, weight_ptr, normed_ptr, total_ptr, index_ptr, eps, weight_offset, hidden,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program (row of the result) handles the whole vector of the token that `index` names, without it of token row.

    d [BLOCK]   places in the vector, `hidden` of them real
    """
    follow(EARLY)
    row = tl.program_id(0).to(tl.int64)
    token = row
    if index_ptr is not None:
        token = tl.load(index_ptr + row)
    base = token * hidden
    d = tl.arange(0, BLOCK)
    inside = d < hidden
    x = tl.load(x_ptr + base + d, mask=inside, other=0.0)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + base + d, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        if total_ptr is not None:
            tl.store(total_ptr + base + d, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / hidden + eps)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + weight_offset
    tl.store(normed_ptr + row * hidden + d, (x * scale * weight).to(normed_ptr.dtype.element_ty), mask=inside)
