"""Small kernels on a GPU at the sizes of real models, in every dtype, against float64 twins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.layer_case import close, rounded_once
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.examples import make_batch, make_kv_cache, rope_table
from wavecore.kernels.reference import layers

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens, hidden", [(1, 576), (33, 1024), (257, 4096), (5, 5120), (3, 8192)])
def test_add_rms_norm(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """Also of a vector so small that eps decides, of zeros, and of one whose squares no 16 bits hold."""
    vectors = torch.randn(2, tokens, hidden, device="cuda")
    vectors[:, 0] *= 1e-3
    vectors[:, 2:3] = 0
    vectors[:, 1:2] *= 400
    x, residual = vectors.to(dtype)
    weight = torch.randn(hidden, device="cuda").to(dtype)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    want = layers.add_rms_norm(total.double(), None, weight.double(), 1e-6)[0]
    close(normed, want, dtype)
    if dtype != torch.float32:
        rounded_once(normed, want)  # of the sum as it is stored
    offset, _ = ops.add_rms_norm(x, None, weight, 1e-6, 1.0)
    close(offset, layers.add_rms_norm(x.double(), None, weight.double(), 1e-6, 1.0)[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("op, twin", [(ops.silu_mul, layers.silu_mul), (ops.gelu_tanh_mul, layers.gelu_tanh_mul)])
def test_gated(op: Callable[[Tensor], Tensor], twin: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    for tokens, inner in ((1, 3072), (129, 14336), (7, 1536)):
        x = (torch.randn(tokens, 2 * inner, device="cuda") * 3).to(dtype)
        close(op(x), twin(x.double()), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads, kv_heads, dim, rot",
    [(32, 8, 128, 128), (9, 3, 64, 64), (32, 32, 96, 96), (8, 4, 256, 256), (16, 2, 128, 32)],
)
@pytest.mark.parametrize("with_norm", [False, True])
def test_norm_rope_write(heads: int, kv_heads: int, dim: int, rot: int, with_norm: bool, dtype: torch.dtype) -> None:
    batch, num_blocks = make_batch([1] * 20 + [300, 41], [*range(1, 2000, 100), 300, 77], 64, "cuda", 2, 10)
    qkv = torch.randn(len(batch.token_ids), (heads + 2 * kv_heads) * dim, device="cuda")
    qkv[0], qkv[1], qkv[-10:] = 0, qkv[1] * 1e-3, torch.nan  # eps decides; padding
    qkv = qkv.to(dtype)
    norms: Any = torch.randn(2, dim, device="cuda").to(dtype) if with_norm else (None, None)
    kv_cache = make_kv_cache(num_blocks, 2, kv_heads, 64, dim, qkv)
    kv_cache[0] = 1  # where KV slot -1 would point to
    table = rope_table(2048, rot, "cuda", 500_000.0)
    before, want_cache = kv_cache.clone(), kv_cache.double()
    wide: Any = norms.double() if with_norm else norms
    want = layers.qk_norm_rope_kv_write(qkv.double(), *wide, 1e-6, table, batch, want_cache, 1, heads, kv_heads)
    q = ops.qk_norm_rope_kv_write(qkv, *norms, 1e-6, table, batch, kv_cache, 1, heads, kv_heads)
    close(q, want, dtype)
    assert not q[-10:].any()
    close(kv_cache, want_cache, dtype)
    assert torch.equal(kv_cache[:, 0], before[:, 0])
    assert torch.equal(kv_cache[0], before[0])


def test_many_copies() -> None:
    count = 70_000
    kv_cache = torch.randn(2 * count + 1, 1, 2, 1, 2, 8, device="cuda")
    order = torch.randperm(2 * count, device="cuda") + 1
    pairs = torch.stack((order[:count], order[count:]), 1).int()
    want = kv_cache.clone()
    layers.copy_blocks(want, pairs)
    ops.copy_blocks(kv_cache, pairs)
    assert torch.equal(kv_cache, want)


@pytest.mark.parametrize("columns, inner", [(1024, 2048), (4096, 4096), (3072, 1000)])
def test_linear_of_a_row_beside_any_others(columns: int, inner: int) -> None:
    """From two rows to as many as the kernel has; alone, a row has a kernel of its own."""
    x, weight = (torch.randn(size, inner, device="cuda").bfloat16() for size in (16, columns))
    want = ops.linear(x, weight)
    for rows in (2, 5, 8, 9):
        assert torch.equal(ops.linear(x[:rows], weight), want[:rows])


@pytest.mark.parametrize("columns, inner", [(4096, 1024), (576, 576), (1024, 3072), (4096, 14336), (151_937, 1024)])
@pytest.mark.parametrize(
    "rows, dtype", [*((1, dtype) for dtype in DTYPES), (5, torch.float16), (8, torch.bfloat16), (16, torch.bfloat16)]
)
def test_linear(rows: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    """In a graph of calls that follow each other, as in a step: each waits for the rows that the one before wrote."""
    weight, bias = torch.randn(columns, inner, device="cuda").to(dtype), torch.randn(columns, device="cuda").to(dtype)
    back = (torch.randn(inner, columns, device="cuda") / columns**0.5).to(dtype)
    x = torch.randn(rows, inner, device="cuda").to(dtype)

    def there_and_back() -> tuple[Tensor, Tensor]:
        there = ops.linear(x, weight, bias)
        return there, ops.linear(there, back)

    there_and_back()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = there_and_back()
    for _ in range(20):
        x.normal_()
        for result in results:
            result.fill_(torch.nan)
        graph.replay()
        there, again = results
        close(there, x.double() @ weight.double().T + bias.double(), dtype)
        close(again, there.double() @ back.double().T, dtype)
