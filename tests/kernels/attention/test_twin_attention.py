"""The twin of paged attention against the formula, one query at a time in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wavecore.kernels.batch import Batch
from wavecore.kernels.examples import make_batch, make_kv_cache
from wavecore.kernels.reference.attention import paged_attention

BLOCK_SIZE = 4


def formula(
    q: Tensor, kv_cache: Tensor, layer: int, batch: Batch, scale: float, soft_cap: float = 0.0, window: int = 0
) -> Tensor:
    """softmax(soft_cap * tanh(q k / soft_cap)) v, keys and values read token by token through the block table."""
    tokens, heads, dim = q.shape
    kv_heads, block_size = kv_cache.shape[3:5]
    out = torch.zeros(tokens, heads, dim, dtype=torch.float64)
    for row, length in enumerate(batch.seq_lens.tolist()):
        begin, end = batch.query_start[row : row + 2].tolist()
        places = [(int(batch.block_tables[row, i // block_size]), i % block_size) for i in range(length)]
        for token in range(begin, end):
            position = length - (end - begin) + token - begin
            first = max(0, position - window + 1) if window else 0
            for head in range(heads if position >= 0 else 0):
                kv = head // (heads // kv_heads)
                seen = places[first : position + 1]
                k = torch.stack([kv_cache[block, layer, 0, kv, at] for block, at in seen]).double()
                v = torch.stack([kv_cache[block, layer, 1, kv, at] for block, at in seen]).double()
                scores = k @ q[token, head].double() * scale
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                out[token, head] = scores.softmax(0) @ v
    return out.view(tokens, heads * dim)


SHAPES = [(64, 1, 3), (96, 2, 4), (128, 1, 16), (256, 3, 1)]  # head_dim, kv heads, group
OPTIONS = [(0.0, 0), (15.0, 0), (0.0, 6), (20.0, 3)]  # soft_cap, window


@pytest.mark.parametrize("soft_cap, window", OPTIONS)
@pytest.mark.parametrize("dim, kv_heads, group", SHAPES)
def test_mixed_batch(dim: int, kv_heads: int, group: int, soft_cap: float, window: int) -> None:
    batch, num_blocks = make_batch([1, 1, 1, 4, 7], [1, BLOCK_SIZE, 9, 4, 13], BLOCK_SIZE, pad_rows=1, pad_tokens=2)
    q = torch.randn(batch.token_ids.shape[0], kv_heads * group, dim)
    kv_cache = make_kv_cache(num_blocks, 2, kv_heads, BLOCK_SIZE, dim, q)
    want = formula(q, kv_cache, 1, batch, dim**-0.5, soft_cap, window)
    got = paged_attention(q, kv_cache, 1, batch, dim**-0.5, soft_cap, window)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    assert not got[-2:].any()


@pytest.mark.parametrize("lengths", [[0], [1], [BLOCK_SIZE - 1], [BLOCK_SIZE], [BLOCK_SIZE + 1], [17], [0, 3, 1, 40]])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_decode_lengths(lengths: list[int], dtype: torch.dtype) -> None:
    batch, num_blocks = make_batch([1] * len(lengths), lengths, BLOCK_SIZE)
    q = torch.randn(len(lengths), 6, 64).to(dtype)
    kv_cache = make_kv_cache(num_blocks, 3, 2, BLOCK_SIZE, 64, q)
    want = formula(q, kv_cache, 2, batch, 0.125)
    error = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(paged_attention(q, kv_cache, 2, batch, 0.125).double(), want, atol=error, rtol=error)


@pytest.mark.parametrize("query_lens, seq_lens", [([1, 1], [5, 2]), ([3, 5], [6, 5])])
def test_stale_nan_behind_a_row_stays_there(query_lens: list[int], seq_lens: list[int]) -> None:
    batch, num_blocks = make_batch(query_lens, seq_lens, BLOCK_SIZE)
    q = torch.randn(sum(query_lens), 2, 64)
    kv_cache = make_kv_cache(num_blocks, 1, 2, BLOCK_SIZE, 64, q)
    want = paged_attention(q, kv_cache, 0, batch, 0.125)
    for row, length in enumerate(seq_lens):
        last = int(batch.block_tables[row, (length - 1) // BLOCK_SIZE])
        kv_cache[last, :, :, :, (length - 1) % BLOCK_SIZE + 1 :] = math.nan
    torch.testing.assert_close(paged_attention(q, kv_cache, 0, batch, 0.125), want)


def test_one_plan_serves_all_layers() -> None:
    batch, num_blocks = make_batch([1, 3], [6, 3], BLOCK_SIZE)
    q = torch.randn(4, 2, 64)
    kv_cache = make_kv_cache(num_blocks, 2, 1, BLOCK_SIZE, 64, q)
    first = paged_attention(q, kv_cache, 0, batch, 0.125)
    plan = batch.shared[("attention", 0)]
    assert not torch.equal(paged_attention(q, kv_cache, 1, batch, 0.125), first)
    assert batch.shared[("attention", 0)] is plan
    torch.testing.assert_close(paged_attention(q, kv_cache, 0, batch, 0.125), first)
