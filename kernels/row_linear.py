"""The product of one row with a weight matrix (GEMV). Each weight is read once, which is all that it costs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.chain import follow
from wavecore.kernels.device import early


def row_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.layers.row_linear`; x and weight are contiguous."""
    columns, inner = weight.shape
    assert x.shape == (1, inner) and x.is_contiguous() and weight.is_contiguous()
    out = x.new_empty(1, columns)
    block_n, block_k, warps = row_shape(inner)
    shape = {"INNER": inner, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps}
    _row_linear[(triton.cdiv(columns, block_n),)](x, weight, bias, out, columns, **shape, **early(x.device))
    return out


def row_shape(inner: int) -> tuple[int, int, int]:
    """Columns a program, places of the row at once, warps; measured on an H200."""
    if inner <= 1024:
        return 8, 512, 2
    if inner <= 2048:
        return 8, 1024, 4
    return (4, 2048, 8) if inner <= 4096 else (1, 1024, 4)


@triton.jit
def _row_linear(
    x_ptr, weight_ptr, bias_ptr, out_ptr, columns,
    INNER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program writes BLOCK_N columns of the result. Its first weights are on their way before the row is there."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    inside = column < columns
    place = weight_ptr + column.to(tl.int64)[:, None] * INNER + k[None, :]
    weight = tl.load(place, mask=inside[:, None] & (k < INNER)[None, :], other=0.0)
    follow(EARLY)
    total = weight.to(tl.float32) * tl.load(x_ptr + k, mask=k < INNER, other=0.0).to(tl.float32)[None, :]
    for begin in range(BLOCK_K, INNER, BLOCK_K):
        if INNER % BLOCK_K == 0:
            weight = tl.load(place + begin, mask=inside[:, None], other=0.0)
            x = tl.load(x_ptr + begin + k)
        else:
            weight = tl.load(place + begin, mask=inside[:, None] & (begin + k < INNER)[None, :], other=0.0)
            x = tl.load(x_ptr + begin + k, mask=begin + k < INNER, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    result = tl.sum(total, axis=1)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, result.to(out_ptr.dtype.element_ty), mask=inside)
