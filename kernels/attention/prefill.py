"""Causal attention for rows with several query tokens, over their blocks.

A program handles BLOCK_M = (query tokens) x (query heads of one KV head) rows of the matrix product. Row r's
programs start at query_start[r] // tokens_per_program + r: an upper bound that needs no map and no host lengths.
"""

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.attention.shapes import LEAST_BLOCK_D, MAX_GROUP, prefill_shape
from wavecore.kernels.attention.tile import LOG2E, load_tile, softmax_step
from wavecore.kernels.batch import Batch


def prefill_attention(
    out: Tensor, q: Tensor, kv_cache: Tensor, layer: int, batch: Batch, scale: float, soft_cap: float, window: int
) -> None:
    """Write the tokens of rows with several query tokens into out [T, Hq * D], and zeros for padding tokens."""
    tokens, heads, dim = q.shape
    _, num_layers, _, kv_heads, block_size, _ = kv_cache.shape
    rows = len(batch.seq_lens)
    block_m, block_n, warps, stages = prefill_shape(dim, q.dtype, q.device)
    group = heads // kv_heads
    assert group <= MAX_GROUP
    block_q = block_m // group
    keys = kv_cache, batch.block_tables, batch.block_tables.stride(0), batch.query_start, batch.seq_lens
    numbers = layer, num_layers, rows, tokens, rows.bit_length(), scale * LOG2E, soft_cap * LOG2E
    model = {"HAS_CAP": soft_cap != 0.0, "WINDOW": window, "HQ": heads, "HKV": kv_heads, "DIM": dim}
    blocks = {"KV_BLOCK": block_size, "BLOCK_M": block_m, "BLOCK_Q": block_q, "BLOCK_N": block_n}
    options = {"BLOCK_D": max(LEAST_BLOCK_D, triton.next_power_of_2(dim)), "num_warps": warps, "num_stages": stages}
    _prefill[(tokens // block_q + rows + 1, kv_heads)](q, *keys, out, *numbers, **model, **blocks, **options)


@triton.jit(do_not_specialize=["table_stride", "layer", "num_layers", "num_rows", "num_tokens", "search_steps"])
def _prefill(
    q_ptr, cache_ptr, tables_ptr, table_stride, query_start_ptr, seq_lens_ptr, out_ptr, layer, num_layers, num_rows,
    num_tokens, search_steps, scale, soft_cap,
    HAS_CAP: tl.constexpr, WINDOW: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program (tile of queries, KV head) attends with BLOCK_Q query tokens of one row; spare ones zero the padding.

    m [BLOCK_M]                rows of the matrix product: of query token `query` of the tile, query head `head`
    d [BLOCK_D]                place in a head, DIM of them real
    key [BLOCK_N]              positions of a tile of keys; k, v are [BLOCK_N, BLOCK_D]
    q, acc [BLOCK_M, BLOCK_D]  queries, and the sum of values so far, weighted
    peak, total [BLOCK_M]      largest score so far, and the sum of weights
    """
    # Later tiles of a row see more keys: start them first, so that the last programs to start are short.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    GROUP: tl.constexpr = HQ // HKV
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    query = m // GROUP
    head = kv_head * GROUP + m % GROUP
    real_tokens = tl.load(query_start_ptr + num_rows)
    spare = program - (real_tokens // BLOCK_Q + num_rows)
    if spare >= 0:
        token = (real_tokens + spare * BLOCK_Q + query).to(tl.int64)
        padding = (query < BLOCK_Q) & (token < num_tokens)
        place = out_ptr + ((token * HQ + head) * DIM)[:, None] + d[None, :]
        zeros = tl.zeros([BLOCK_M, BLOCK_D], out_ptr.dtype.element_ty)
        tl.store(place, zeros, mask=padding[:, None] & (d < DIM)[None, :])
        return

    row = tl.full([], 0, tl.int32)  # becomes the last row whose programs start at or before this one
    high = num_rows - 1
    for _ in range(search_steps):
        middle = (row + high + 1) // 2
        starts = tl.load(query_start_ptr + middle) // BLOCK_Q + middle
        row = tl.where(starts <= program, middle, row)
        high = tl.where(starts <= program, high, middle - 1)
    first_token = tl.load(query_start_ptr + row)
    queries = tl.load(query_start_ptr + row + 1) - first_token
    first_query = (program - (first_token // BLOCK_Q + row)) * BLOCK_Q
    if (first_query >= queries) | (queries == 1):
        return

    length = tl.load(seq_lens_ptr + row)
    real = (query < BLOCK_Q) & (first_query + query < queries)
    token = (first_token + first_query + query).to(tl.int64)
    here = real[:, None] & (d < DIM)[None, :]
    place = ((token * HQ + head) * DIM)[:, None] + d[None, :]
    q = tl.load(q_ptr + place, mask=here, other=0.0)
    first_position = length - queries + first_query
    position = first_position + query

    block_stride = num_layers.to(tl.int64) * (2 * HKV * KV_BLOCK * DIM)
    k_offset = (layer.to(tl.int64) * (2 * HKV) + kv_head) * (KV_BLOCK * DIM)
    v_offset = k_offset + HKV * KV_BLOCK * DIM
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    end = tl.minimum(length, first_position + BLOCK_Q)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        free = begin  # a window's lower edge may lie in any tile: mask them all
    else:
        free = (first_position + 1) // BLOCK_N * BLOCK_N  # before it, all queries see all keys
    for start in range(begin, free, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        k = load_tile(cache_ptr, table_ptr, k_offset, block_stride, key, key, False, KV_BLOCK, DIM, BLOCK_D)
        v = load_tile(cache_ptr, table_ptr, v_offset, block_stride, key, key, False, KV_BLOCK, DIM, BLOCK_D)
        acc, peak, total = softmax_step(q, k, v, acc, peak, total, key, scale, soft_cap, HAS_CAP, False, False)
    for start in range(free, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        seen = key < end
        visible = key[None, :] <= position[:, None]
        if WINDOW:
            visible = visible & (key[None, :] > position[:, None] - WINDOW)
        k = load_tile(cache_ptr, table_ptr, k_offset, block_stride, key, seen, True, KV_BLOCK, DIM, BLOCK_D)
        v = load_tile(cache_ptr, table_ptr, v_offset, block_stride, key, seen, True, KV_BLOCK, DIM, BLOCK_D)
        acc, peak, total = softmax_step(
            q, k, v, acc, peak, total, visible & seen[None, :], scale, soft_cap, HAS_CAP, True, GUARD=WINDOW > 0
        )
    # where there is a window, padding rows of the tile can be left without any key
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=here)
