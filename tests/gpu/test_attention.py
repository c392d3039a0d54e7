"""Attention on a GPU over the full grid of shapes, against the twin in float64 on the pages in use."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from wavecore.kernels import ops, reference
from wavecore.kernels.batch import Batch
from wavecore.kernels.examples import make_batch, make_pages, rope_table

PAGE = 64
ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(30)


def twin(q: Tensor, pages: Tensor, layer: int, batch: Batch, soft_cap: float = 0.0, window: int = 0) -> Tensor:
    """The twin in float64 on a copy of the used pages of one layer."""
    used, tables = batch.block_tables.unique(return_inverse=True)
    small = pages[used.long(), layer : layer + 1].double()
    moved = replace(batch, block_tables=tables.view_as(batch.block_tables).int(), shared={})
    return reference.paged_attention(q.double(), small, 0, moved, q.shape[2] ** -0.5, soft_cap, window)


def check(q: Tensor, pages: Tensor, layer: int, batch: Batch, soft_cap: float = 0.0, window: int = 0) -> None:
    got = ops.paged_attention(q, pages, layer, batch, q.shape[2] ** -0.5, soft_cap, window).double()
    want = twin(q, pages, layer, batch, soft_cap, window)
    error = float((got - want).norm() / want.norm().clamp(min=1e-12))
    assert error < ERROR[q.dtype], error
    rows = (got - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-3)  # no single token may hide in the norm
    assert float(rows.max()) < 4 * ERROR[q.dtype]


def inputs(
    query_lens: list[int],
    seq_lens: list[int],
    dim: int,
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
    page: int = PAGE,
) -> tuple[Tensor, Tensor, Batch]:
    batch, num_pages = make_batch(query_lens, seq_lens, page, "cuda", pad_rows=1, pad_tokens=5)
    q = torch.randn(len(batch.token_ids), kv_heads * group, dim, device="cuda").to(dtype)
    return q, make_pages(num_pages, 2, kv_heads, page, dim, q), batch


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_grid(dim: int, group: int, dtype: torch.dtype) -> None:
    lengths = [0, 1, PAGE - 1, PAGE, PAGE + 1, 1000]
    q, pages, batch = inputs([1] * 6 + [70, 3, 200], [*lengths, 70, 500, 333], dim, 2, group, dtype)
    check(q, pages, 1, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("soft_cap, window", [(30.0, 0), (0.0, 100), (50.0, 64), (0.0, 1)])
@pytest.mark.parametrize("dim", [64, 256])
def test_options(dim: int, soft_cap: float, window: int, dtype: torch.dtype) -> None:
    q, pages, batch = inputs([1, 1, 1, 300, 17], [1, 99, 2000, 300, 1100], dim, 2, 2, dtype)
    check(q, pages, 1, batch, soft_cap, window)


@pytest.mark.parametrize("page", [16, 32, 48, 128])
def test_page_sizes(page: int) -> None:
    q, pages, batch = inputs([1, 1, 77], [page, 3 * page + 1, 200], 128, 2, 4, torch.bfloat16, page)
    check(q, pages, 1, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_long(dtype: torch.dtype) -> None:
    q, pages, batch = inputs([1, 1, 1, 600], [32768, 7, 20000, 32768], 128, 2, 4, dtype)
    check(q, pages, 1, batch)


def test_many_rows_of_mixed_lengths() -> None:
    lengths = torch.randint(0, 3000, (1024,)).tolist()
    q, pages, batch = inputs([1] * 1024, lengths, 64, 1, 4, torch.bfloat16)
    check(q, pages, 0, batch)


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """Write keys and values to the last pages of a cache of 2.6e9 elements, and read them back."""
    heads, kv_heads, dim, layers, num_pages = 16, 8, 128, 2, 10_000
    batch, _ = make_batch([1, 1, 130], [65, 500, 130], PAGE, "cuda")
    offset = num_pages - 1 - int(batch.block_tables.max())
    tables = torch.where(batch.block_tables > 0, batch.block_tables + offset, 0)
    slots = batch.slot_mapping + offset * PAGE
    batch = replace(batch, block_tables=tables, slot_mapping=slots, shared={})
    pages = torch.zeros(num_pages, layers, 2, kv_heads, PAGE, dim, dtype=torch.bfloat16, device="cuda")
    assert pages.numel() > 1 << 31
    pages[offset + 1 :] = torch.randn_like(pages[offset + 1 :])
    before = pages[offset + 1 :].clone()
    qkv = torch.randn(132, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16, device="cuda")
    q = ops.qk_norm_rope_kv_write(qkv, None, None, 1e-6, rope_table(512, dim, "cuda"), batch, pages, 1, heads, kv_heads)
    want = before.clone()
    small = replace(batch, slot_mapping=slots - (offset + 1) * PAGE, shared={})
    reference.qk_norm_rope_kv_write(
        qkv, None, None, 1e-6, rope_table(512, dim, "cuda"), small, want, 1, heads, kv_heads
    )
    torch.testing.assert_close(pages[offset + 1 :], want, atol=2e-2, rtol=2e-2)
    assert not pages[: offset + 1].any()
    check(q, pages, 1, batch)
    pairs = torch.tensor([[num_pages - 1, 3], [num_pages - 2, 4]], device="cuda")
    ops.copy_blocks(pages, pairs)
    assert torch.equal(pages[3], pages[-1]) and torch.equal(pages[4], pages[-2])


def test_one_graph_serves_every_mix_of_rows() -> None:
    """Captured for a bucket, replayed with other lengths, tables and numbers of rows: the device decides all."""
    rows, width, kv_heads, group, dim = 16, 40, 2, 4, 128
    buffers_like, _ = make_batch([1] * rows, [width * PAGE] * rows, PAGE, "cuda")
    live = replace(buffers_like, num_tokens=rows, num_rows=rows, num_decode_rows=rows, max_query_len=1, shared={})
    q = torch.randn(rows, kv_heads * group, dim, device="cuda").bfloat16()
    pages = make_pages(rows * width + 1, 1, kv_heads, PAGE, dim, q)
    ops.paged_attention(q, pages, 0, replace(live, shared={}), dim**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(q, pages, 0, live, dim**-0.5)
    for count in (16, 1, 5, 0):
        lengths = torch.randint(1, width * PAGE, (count,)).tolist()
        if count == 5:
            lengths = [width * PAGE, 1, 1, 0, 7]
        step, _ = make_batch([1] * count or [0], lengths or [0], PAGE, "cuda", pad_rows=rows - max(count, 1))
        live.seq_lens.copy_(step.seq_lens)
        live.query_start.copy_(step.query_start)
        live.block_tables.zero_()
        live.block_tables[:, : step.block_tables.shape[1]] = step.block_tables
        out.fill_(float("nan"))
        graph.replay()
        real = max(count, 0)
        if real:
            want = twin(q[:real], pages, 0, step)
            torch.testing.assert_close(out[:real].double(), want, atol=2e-2, rtol=2e-2)
        assert not out[real:].any()
