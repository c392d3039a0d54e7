"""Attention on a GPU over the full grid of shapes, against the twin in float64, with NaN wherever no row has keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.gpu.steps import make, prompt
from tests.kernels.attention.attention_case import (
    DIMS,
    GROUPS,
    Launches,
    check,
    check_balance,
    compare,
    in_turn,
    inputs,
    poisoned,
)
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import ModelDriver

from wavecore.kernels import ops
from wavecore.kernels.examples import make_batch, make_kv_cache, rope_table
from wavecore.kernels.reference import layers

BLOCK_SIZE, LONG = 64, 32768
EDGES = [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("dim", DIMS)
def test_grid(dim: int, group: int) -> None:
    """Every head_dim with every group in every dtype: 4 x 16 x 3.

    Block edges are lengths of decode rows and of whole prompts, and the past of chunks. Of each head_dim and group one
    dtype, in turn, also sees 32k keys in both kernels, so that each head_dim does in each dtype.
    """
    shape = dim, 2 if group <= 4 else 1, group
    prompts, pasts = [*EDGES[2:], 200], [*EDGES[1:], 500]
    query_lens = [1] * 6 + prompts + [3] * len(pasts)
    seq_lens = [*EDGES, 1000, *prompts, *(3 + past for past in pasts)]
    dtypes = in_turn(dim, group, DTYPES)
    for dtype in dtypes:
        check(*inputs(query_lens, seq_lens, shape, dtype, BLOCK_SIZE, "cuda"))
    check(*inputs([1, 1, 70], [LONG, 20_000, LONG], shape, dtypes[0], BLOCK_SIZE, "cuda"))


@pytest.mark.parametrize(
    "soft_cap, window, dim, dtype",
    [
        (30.0, 0, 256, torch.bfloat16),
        (8.0, 0, 64, torch.float32),
        (20.0, 0, 128, torch.float16),
        (0.0, 100, 64, torch.bfloat16),
        (0.0, 100, 96, torch.float32),
        (0.0, 4096, 256, torch.float16),
        (50.0, BLOCK_SIZE, 128, torch.bfloat16),
        (8.0, BLOCK_SIZE, 256, torch.float32),
        (0.0, 1, 64, torch.float16),
        (0.0, 1, 128, torch.float32),
    ],
)
def test_options(soft_cap: float, window: int, dim: int, dtype: torch.dtype) -> None:
    """Caps and windows, over short rows and chunks of long ones. Scores are spread so widely that a cap bends them."""
    query_lens, seq_lens = [1, 1, 1, 1, 300, 17, 70], [1, 99, 2000, LONG, 300, 1100, LONG]
    spread = soft_cap / 4 or 1.0
    check(*inputs(query_lens, seq_lens, (dim, 2, 2), dtype, BLOCK_SIZE, "cuda", spread), soft_cap, window)


@pytest.mark.parametrize("shape", [(8, 2, 2), (16, 1, 32), (80, 2, 4), (256, 1, 32)])
def test_other_heads(shape: tuple[int, int, int]) -> None:
    """The smallest heads, one between two sizes of block, and the largest group."""
    check(*inputs([1, 1, 77], [BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 200], shape, torch.bfloat16, BLOCK_SIZE, "cuda"))


@pytest.mark.parametrize("block_size", [8, 16, 32, 48, 128, 256])
def test_block_sizes(block_size: int) -> None:
    check(*inputs([1, 1, 77], [block_size, 3 * block_size + 1, 200], (128, 2, 4), torch.bfloat16, block_size, "cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 20])
def test_a_window_that_begins_at_any_key(window: int, dtype: torch.dtype) -> None:
    """Each place in a tile of keys, twice or more."""
    check(*inputs([2] * 130, range(2, 132), (64, 1, 2), dtype, BLOCK_SIZE, "cuda"), 0.0, window)


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_prompts_have_the_same_bits_every_time(dim: int) -> None:
    """Warps of Hopper's kernel hand tiles over by barriers alone: one that came too early would differ now and then.

    Rows end in any place of a tile, with NaN behind them, and there are more than are looked through at once.
    """
    lengths = [*range(2, 150), 700, 1300, 3000]
    q, kv_cache, batch = inputs(lengths, [7 * n for n in lengths], (dim, 2, 4), torch.bfloat16, 16, "cuda")
    ill = poisoned(kv_cache, 1, batch)
    first = ops.paged_attention(q, ill, 1, batch, dim**-0.5)
    compare(first, q, kv_cache, batch)
    for _ in range(300):
        assert torch.equal(ops.paged_attention(q, ill, 1, batch, dim**-0.5), first)


def test_many_rows_of_mixed_lengths() -> None:
    lengths = torch.randint(0, 3000, (1024,)).tolist()
    check(*inputs([1] * 1024, lengths, (64, 1, 4), torch.bfloat16, BLOCK_SIZE, "cuda"))


@pytest.mark.parametrize("group", [1, 2, 4, 7, 16])
@pytest.mark.parametrize("dim", DIMS)
def test_rows_that_begin_alike(dim: int, group: int) -> None:
    """A hundred rows in a tree of three levels, some alone and some without a token behind what they share."""
    shape, size = (dim, 2, group), 16
    for dtype in in_turn(dim, group, DTYPES)[:2]:
        lengths = torch.randint(1, 1500, (100,)).tolist()
        q, kv_cache, batch = inputs([1] * 100, lengths, shape, dtype, size, "cuda", spread=2.0)
        tables = batch.block_tables
        full = torch.arange(tables.shape[1], device="cuda") < batch.seq_lens[:, None] // size
        for rows in (slice(0, 90), slice(20, 70), slice(50, 60)):
            longest = tables[rows][batch.seq_lens[rows].argmax()].clone()
            tables[rows] = torch.where(full[rows], longest, tables[rows])
        order = torch.randperm(100, device="cuda")
        tables[:100], batch.seq_lens[:100] = tables[order], batch.seq_lens[order]
        check(q, kv_cache, batch)


def test_a_long_row_is_split_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds most of all keys; the others are short."""
    lengths = torch.randint(1, 40, (32,)).tolist()
    lengths[20] = LONG
    check_balance(*inputs([1] * 32, lengths, (128, 2, 4), torch.bfloat16, BLOCK_SIZE, "cuda"), monkeypatch)


def test_a_step_makes_one_map_for_all_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers, of which every other one has a window: a map for either kind."""
    changes = {"num_hidden_layers": 6, "sliding_window": 12, "query_pre_attn_scalar": 48, "tie_word_embeddings": True}
    runner = make(save_model(tmp_path, make_config("Gemma2", **changes), scale=0.08))
    runner.graphs.most = 0  # a capture would make a map, too
    driver = ModelDriver(runner)
    rows = [driver.add(prompt(i, 30 + i), 5, i) for i in range(3)]
    driver.step(rows)
    launches = Launches(monkeypatch)
    for step in range(1, 4):
        driver.step(rows)
        assert launches.count == 2 * step


def test_blocks_beyond_two_to_the_31_elements() -> None:
    """Write keys and values to the last blocks of a cache of 2.6e9 elements, and read them back."""
    heads, kv_heads, dim, num_layers, num_blocks = 16, 8, 128, 2, 10_000
    batch, _ = make_batch([1, 1, 130], [65, 500, 130], BLOCK_SIZE, "cuda")
    offset = num_blocks - 1 - int(batch.block_tables.max())
    tables = torch.where(batch.block_tables > 0, batch.block_tables + offset, 0)
    kv_slots = batch.kv_slots + offset * BLOCK_SIZE
    batch = replace(batch, block_tables=tables, kv_slots=kv_slots, shared={})
    kv_cache = torch.zeros(num_blocks, num_layers, 2, kv_heads, BLOCK_SIZE, dim, dtype=torch.bfloat16, device="cuda")
    assert kv_cache.numel() > 1 << 31
    kv_cache[offset + 1 :] = torch.randn_like(kv_cache[offset + 1 :])
    before = kv_cache[offset + 1 :].clone()
    qkv = torch.randn(132, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
    table = rope_table(512, dim, "cuda")
    q = ops.qk_norm_rope_kv_write(qkv, None, None, 1e-6, table, batch, kv_cache, 1, heads, kv_heads)
    want = before.clone()
    small = replace(batch, kv_slots=kv_slots - (offset + 1) * BLOCK_SIZE, shared={})
    layers.qk_norm_rope_kv_write(qkv, None, None, 1e-6, table, small, want, 1, heads, kv_heads)
    torch.testing.assert_close(kv_cache[offset + 1 :], want, atol=2e-2, rtol=2e-2)
    assert not kv_cache[: offset + 1].any()
    compare(ops.paged_attention(q, kv_cache, 1, batch, dim**-0.5), q, kv_cache, batch)
    pairs_ = torch.tensor([[num_blocks - 1, 3], [4, num_blocks - 2]], dtype=torch.int32, device="cuda")
    last = kv_cache[-1].clone()
    ops.copy_blocks(kv_cache, pairs_)
    assert torch.equal(kv_cache[3], last) and not kv_cache[-2].any()


def test_one_graph_serves_every_mix_of_rows() -> None:
    """Captured for a bucket, replayed with other lengths, tables and numbers of rows, alone and with beginnings in
    common: the device decides all, and each time alike."""
    rows, width, kv_heads, group, dim = 16, 40, 2, 4, 128
    live, _ = make_batch([1] * rows, [width * BLOCK_SIZE] * rows, BLOCK_SIZE, "cuda")
    q = torch.randn(rows, kv_heads * group, dim, device="cuda").bfloat16()
    kv_cache = make_kv_cache(rows * width + 1, 1, kv_heads, BLOCK_SIZE, dim, q)
    ops.paged_attention(q, kv_cache, 0, replace(live, shared={}), dim**-0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.paged_attention(q, kv_cache, 0, live, dim**-0.5)
    mixed = torch.randint(10 * BLOCK_SIZE, width * BLOCK_SIZE, (16,)).tolist()
    for lengths, alike in (
        (mixed, 0),
        (mixed, 10),
        ([77], 0),
        ([width * BLOCK_SIZE, 1, 1, 0, 7], 0),
        (mixed, 4),
        ([], 0),
    ):
        step, _ = make_batch([1] * len(lengths) or [0], lengths or [0], BLOCK_SIZE, "cuda", rows - max(len(lengths), 1))
        if alike:
            step.block_tables[2:12, :alike] = step.block_tables[2, :alike].clone()
        live.seq_lens.copy_(step.seq_lens)
        live.query_start.copy_(step.query_start)
        live.block_tables.zero_()
        live.block_tables[:, : step.block_tables.shape[1]] = step.block_tables
        graph.replay()
        first = out.clone()
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first) and not out[len(lengths) :].any()
        if lengths:
            compare(out[: len(lengths)], q[: len(lengths)], kv_cache, step, layer=0)
