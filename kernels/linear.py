"""The matrix product of every linear layer: of few rows in kernels of ours, of more in the vendor's library.

With few rows a product costs what reading its weights costs, and each is read once. What is whose goes by shapes alone.
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.chain import follow
from wavecore.kernels.device import early, shared_memory

FEW_ROWS = 16
"""Up to so many a kernel of ours may be the faster one."""
WARPS = tl.constexpr(4)
"""Of a program of `_few_rows`."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `reference.layers.linear`; x and weight are contiguous."""
    rows, inner = x.shape
    columns = len(weight)
    if rows != 1 and not holds(x, columns):
        return F.linear(x, weight, bias)
    assert x.is_contiguous() and weight.is_contiguous()
    out = x.new_empty(rows, columns)
    options = early(x.device)
    if rows == 1:
        block_n, block_k, warps = row_shape(inner)
        sizes = {"INNER": inner, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_warps": warps}
        _one_row[(triton.cdiv(columns, block_n),)](x, weight, bias, out, columns, **sizes, **options)
    else:
        block_n, block_k, stages = few_rows_shape(columns, inner)
        sizes = {"ROWS": 8 if rows <= 8 else 16, "BLOCK_N": block_n, "BLOCK_K": block_k, "num_stages": stages}
        whole = inner % (WARPS.value * block_k) == 0
        grid = (triton.cdiv(columns, block_n),)
        _few_rows[grid](
            x, weight, bias, out, rows, columns, inner, WHOLE=whole, num_warps=WARPS.value, **sizes, **options
        )
    return out


def holds(x: Tensor, columns: int) -> bool:
    """Whether `_few_rows` is faster than cuBLAS (on an H200), and can do it: 16 bits, 96 KiB of shared memory."""
    few = len(x) <= 8 or (len(x) <= FEW_ROWS and max(columns, x.shape[1]) <= 4096)  # each program reads all rows again
    return few and x.dtype != torch.float32 and shared_memory(x.device) >= 100 << 10


def row_shape(inner: int) -> tuple[int, int, int]:
    """For one row: columns a program, places of the row at once, warps; measured on an H200."""
    if inner <= 1024:
        return 8, 512, 2
    if inner <= 2048:
        return 8, 1024, 4
    return (4, 2048, 8) if inner <= 4096 else (1, 1024, 4)


def few_rows_shape(columns: int, inner: int) -> tuple[int, int, int]:
    """Columns a program, places of each row that a warp has at once, stages; measured on an H200."""
    if columns <= 2048:
        return 8, 256, 3
    return (32, 64, 4) if columns <= 4096 <= inner else (16, 64, 3)


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


@triton.jit(do_not_specialize=["rows"])
def _few_rows(
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, inner,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program writes BLOCK_N columns of the result. Each of its warps sums up BLOCK_K of every `step` places, as one
    of a batch of products: there are too few rows and columns to share. A row's sums do not depend on other rows."""
    step: tl.constexpr = WARPS * BLOCK_K
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WARPS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    real = (row < rows)[None, None, :]
    inside = (column < columns)[None, :, None]
    x_place = x_ptr + row[None, None, :] * inner + k[:, :, None]
    weight_place = weight_ptr + column.to(tl.int64)[None, :, None] * inner + k[:, None, :]
    follow(EARLY)
    total = tl.zeros((WARPS, BLOCK_N, ROWS), dtype=tl.float32)
    for begin in range(0, inner, step):
        here = k < inner - begin
        weight = tl.load(weight_place + begin, mask=inside if WHOLE else inside & here[:, None, :], other=0.0)
        x = tl.load(x_place + begin, mask=real if WHOLE else real & here[:, :, None], other=0.0)
        total = tl.dot(weight, x, total)
    result = tl.sum(total, axis=0)
    if bias_ptr is not None:
        result += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[:, None]
    place = out_ptr + row[None, :] * columns + column[:, None]
    tl.store(place, result.to(out_ptr.dtype.element_ty), mask=(row < rows)[None, :] & (column < columns)[:, None])
