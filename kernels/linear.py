"""The matrix product of every linear layer: of few rows in kernels of ours, of more in the vendor's library.

With few rows a product costs what reading its weights costs. Each weight is read once, straight into registers, and the
first ones before the kernel's predecessor ends (`chain`). A row is multiplied alike whatever rows are beside it, unless
it is alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from wavecore.kernels.chain import follow
from wavecore.kernels.device import capability, early

FEW_ROWS = 16
"""As many as a product of matrix units has at least; with more of them cuBLAS is as fast."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.layers.linear`; x and weight are contiguous."""
    rows, inner = x.shape
    columns = len(weight)
    holds = rows == 1 or (x.dtype != torch.float32 and capability(x.device) >= 80)
    if rows > FEW_ROWS or not holds:
        return F.linear(x, weight, bias)
    assert x.is_contiguous() and weight.is_contiguous()
    out = x.new_empty(rows, columns)
    options = early(x.device)
    if rows == 1:
        block_n, block_k, warps = row_shape(inner)
        sizes = {"INNER": inner, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps}
        _one_row[(triton.cdiv(columns, block_n),)](x, weight, bias, out, columns, **sizes, **options)
    else:
        block_n, block_k, warps = rows_shape(columns)
        sizes = {"BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps}
        whole = inner % (block_k * warps) == 0
        grid = (triton.cdiv(columns, block_n),)
        _few_rows[grid](x, weight, bias, out, rows, columns, inner, WHOLE=whole, **sizes, **options)
    return out


def row_shape(inner: int) -> tuple[int, int, int]:
    """For one row: columns a program, places of the row at once, warps; measured on an H200."""
    if inner <= 1024:
        return 8, 512, 2
    if inner <= 2048:
        return 8, 1024, 4
    return (4, 2048, 8) if inner <= 4096 else (1, 1024, 4)


def rows_shape(columns: int) -> tuple[int, int, int]:
    """For few rows: columns a program, places of a row a warp has at once, warps; measured on an H200."""
    return (8, 128, 4) if columns <= 1024 else (16, 128, 4)


@triton.jit
def _one_row(
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


@gluon.jit(do_not_specialize=["rows"])
def _few_rows(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, inner,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, WHOLE: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A program writes BLOCK_N columns of the result; each of its warps has BLOCK_K of every `step` places.

    A thread loads 16 bytes at a time of both matrices, just where its share of the product wants them: the sum over
    places has no order, so eight that lie beside each other can stand for the pairs that the instruction takes. (Triton
    would order them, by way of shared memory, whose barriers take longer than these loads.)
    """
    warps: gl.constexpr = gl.num_warps()
    step: gl.constexpr = warps * BLOCK_K
    SUM: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])
    X: gl.constexpr = gl.DotOperandLayout(0, SUM, 8)  # [warps, 16 rows, BLOCK_K]
    W: gl.constexpr = gl.DotOperandLayout(1, SUM, 8)  # [warps, BLOCK_K, BLOCK_N]
    row = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, X)))[None, :, None]
    x_k = gl.arange(0, warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, X)))[:, None, None] * BLOCK_K
    x_k += gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(1, X)))[None, None, :]
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(1, W)))[None, None, :]
    w_k = gl.arange(0, warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, W)))[:, None, None] * BLOCK_K
    w_k += gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, gl.SliceLayout(2, W)))[None, :, None]
    first = gl.program_id(0) * BLOCK_N
    weight_ptr += first.to(gl.int64) * inner
    inside = column < columns - first
    weight = gl.load(weight_ptr + column * inner + w_k, mask=inside if WHOLE else inside & (w_k < inner), other=0.0)
    follow(EARLY)
    real = row < rows
    x = gl.load(x_ptr + row * inner + x_k, mask=real if WHOLE else real & (x_k < inner), other=0.0)
    total = gl.zeros([warps, 16, BLOCK_N], gl.float32, SUM)
    for _ in range(step, inner, step):
        x_k += step
        w_k += step
        w_mask = inside if WHOLE else inside & (w_k < inner)
        x_mask = real if WHOLE else real & (x_k < inner)
        next_weight = gl.load(weight_ptr + column * inner + w_k, mask=w_mask, other=0.0)
        next_x = gl.load(x_ptr + row * inner + x_k, mask=x_mask, other=0.0)
        total = mma_v2(x, weight, total)
        x, weight = next_x, next_weight
    result = gl.sum(mma_v2(x, weight, total), 0)
    OUT: gl.constexpr = result.type.layout
    row = gl.arange(0, 16, layout=gl.SliceLayout(1, OUT))[:, None]
    column = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, OUT))[None, :] + first
    if bias_ptr is not None:
        result += gl.load(bias_ptr + column, mask=column < columns, other=0.0).to(gl.float32)
    place = out_ptr + row * columns + column
    gl.store(place, result.to(out_ptr.dtype.element_ty), mask=(row < rows) & (column < columns))
