"""Split-KV attention for rows with one query token, balanced over the GPU whatever the mix of lengths.

A program walks over the bundles and rows in its range of the step's tiles (see `ranges`), for one KV head and the whole
group of query heads that share it, packed into the rows of the matrix product. A row inside one range is written at
once; one cut by a border, or with a beginning that it shares with others, leaves float32 partials, which a second
kernel merges. So the order of a row's sums, and with it the last bits, depends on the other rows of its step.
"""

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.attention.bundles import shared_tiles
from wavecore.kernels.attention.ranges import ROW_COST, Ranges, make_ranges
from wavecore.kernels.attention.shapes import LEAST_BLOCK_D, MAX_GROUP, bundle_width, decode_shape
from wavecore.kernels.attention.tile import LOG2E, load_tile, softmax_step
from wavecore.kernels.batch import Batch
from wavecore.kernels.chain import follow
from wavecore.kernels.device import early, num_multiprocessors, registers

MERGE_BLOCK = 16


def decode_attention(
    out: Tensor,
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    batch: Batch,
    scale: float,
    soft_cap: float,
    window: int,
    zero_padding: bool,
) -> None:
    """Write the tokens of rows with one query token into out [T, Hq * D]; zeros for padding tokens if asked."""
    tokens, heads, dim = q.shape
    _, num_layers, _, kv_heads, block_size, _ = kv_cache.shape
    rows = len(batch.seq_lens)
    group = heads // kv_heads
    assert group <= MAX_GROUP
    tile, warps, stages, resident = decode_shape(dim, q.dtype)
    width = bundle_width(dim, q.dtype)
    # a window hides most of a common beginning, and of each row another part
    bundle_rows = width // group if rows > 1 and width >= 2 * group and not window else 0
    key = ("decode_ranges", window, heads, tile)
    if key not in batch.shared:
        programs = max(1, num_multiprocessors(q.device) * resident // kv_heads)
        batch.shared[key] = make_ranges(batch, programs, heads, dim, window, tile, block_size, bundle_rows)
    ranges: Ranges = batch.shared[key]
    block_d = max(LEAST_BLOCK_D, triton.next_power_of_2(dim))
    # beside the end of another kernel, the programs of many rows would not spread evenly over the multiprocessors
    launch = early(q.device, tokens == 1)
    keys = kv_cache, batch.block_tables, batch.block_tables.stride(0), batch.query_start, batch.seq_lens
    numbers = layer, num_layers, rows, scale * LOG2E, soft_cap * LOG2E
    model = {"HAS_CAP": soft_cap != 0.0, "WINDOW": window, "HKV": kv_heads, "KV_BLOCK": block_size, "TILE": tile}
    both = {"BUNDLE_ROWS": bundle_rows, "HQ": heads, "DIM": dim, "BLOCK_D": block_d, **launch}
    blocks = {"BLOCK_G": max(16, triton.next_power_of_2(group)), "BLOCK_M": width}
    options = {"num_warps": warps, "num_stages": stages, "maxnreg": registers(warps * resident)}
    _decode[(len(ranges.first), kv_heads)](q, *keys, ranges, out, *numbers, **model, **both, **blocks, **options)
    merging = {"ZERO_PADDING": zero_padding, "BLOCK_P": MERGE_BLOCK, "num_warps": 1 if dim <= 128 else 2}
    grid = max(rows, tokens) if zero_padding else rows, heads
    _merge[grid](batch.query_start, ranges, out, rows, tokens, len(ranges.first), **both, **merging)


@triton.jit(do_not_specialize=["table_stride", "layer", "num_layers", "num_rows"])
def _decode(
    q_ptr, cache_ptr, tables_ptr, table_stride, query_start_ptr, seq_lens_ptr, ranges, out_ptr, layer, num_layers,
    num_rows, scale, soft_cap,
    HAS_CAP: tl.constexpr, WINDOW: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, DIM: tl.constexpr,
    KV_BLOCK: tl.constexpr, BUNDLE_ROWS: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program (range of tiles, KV head) attends with one query token of each row that has tiles in its range.

    at, tile                   places in the list of all tiles
    g [BLOCK_G]                query heads of the group, GROUP of them real
    m [BLOCK_M]                of a bundle: query heads of the group of each of its rows
    d [BLOCK_D]                place in a head, DIM of them real
    key [TILE]                 positions of a tile of keys; k, v are [TILE, BLOCK_D]
    q, acc [BLOCK_G, BLOCK_D]  queries, and the sum of values so far, weighted; of a bundle [BLOCK_M, BLOCK_D]
    peak, total [BLOCK_G]      largest score so far, and the sum of weights
    """
    follow(EARLY)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    size = tl.load(ranges.size)
    range_begin = program * size
    range_end = tl.minimum(range_begin + size, tl.load(ranges.tile_start + num_rows))
    if range_begin >= range_end:
        return

    GROUP: tl.constexpr = HQ // HKV
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    here = (g < GROUP)[:, None] & (d < DIM)[None, :]
    head = kv_head * GROUP + g
    block_stride = num_layers.to(tl.int64) * (2 * HKV * KV_BLOCK * DIM)
    k_offset = (layer.to(tl.int64) * (2 * HKV) + kv_head) * (KV_BLOCK * DIM)
    v_offset = k_offset + HKV * KV_BLOCK * DIM

    row = tl.load(ranges.first + program)
    at = range_begin
    if BUNDLE_ROWS:
        shared_end = tl.load(ranges.tile_start)
        m = tl.arange(0, BLOCK_M)
        bundle = row
        row = tl.where(at < shared_end, 0, row)
        while at < tl.minimum(range_end, shared_end):
            bundle_begin = tl.load(ranges.bundle_start + bundle) + ROW_COST
            bundle_end = tl.load(ranges.bundle_start + bundle + 1)
            at = tl.maximum(at, bundle_begin)
            stop = tl.minimum(bundle_end, range_end)
            rows = tl.load(ranges.bundle_rows + bundle)
            if stop > at:
                member = m // GROUP
                real = member < rows
                there = real[:, None] & (d < DIM)[None, :]
                members = tl.load(ranges.member + bundle + member, mask=real, other=0)
                token = tl.load(query_start_ptr + members, mask=real, other=0).to(tl.int64)
                heads = kv_head * GROUP + m % GROUP
                q = tl.load(q_ptr + ((token * HQ + heads) * DIM)[:, None] + d[None, :], mask=there, other=0.0)
                table_ptr = tables_ptr + tl.load(ranges.member + bundle).to(tl.int64) * table_stride
                acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
                peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                for tile in range(at, stop):
                    key = (tile - bundle_begin) * TILE + tl.arange(0, TILE)
                    k = load_tile(cache_ptr, table_ptr, k_offset, block_stride, key, key, False, KV_BLOCK, DIM, BLOCK_D)
                    v = load_tile(cache_ptr, table_ptr, v_offset, block_stride, key, key, False, KV_BLOCK, DIM, BLOCK_D)
                    acc, peak, total = softmax_step(
                        q, k, v, acc, peak, total, key, scale, soft_cap, HAS_CAP, MASKED=False, GUARD=False
                    )
                acc = acc / total[:, None]
                here_first = bundle + member
                later = num_rows + program * BUNDLE_ROWS + here_first % BUNDLE_ROWS
                partial = num_rows + tl.num_programs(0) + tl.where(at == bundle_begin, here_first, later)
                partial = partial.to(tl.int64) * HQ + heads
                tl.store(ranges.partial + (partial * DIM)[:, None] + d[None, :], acc, mask=there)
                tl.store(ranges.weight_log + partial, peak + tl.log2(total), mask=real)
            at = tl.maximum(range_begin, bundle_end)
            bundle += rows
    while at < range_end:
        row_begin = tl.load(ranges.tile_start + row) + ROW_COST
        row_end = tl.load(ranges.tile_start + row + 1)
        at = tl.maximum(at, row_begin)
        stop = tl.minimum(row_end, range_end)
        if stop > at:  # rows without tiles (prefill, padding, length 0) lie between
            length = tl.load(seq_lens_ptr + row)
            token = tl.load(query_start_ptr + row).to(tl.int64)
            place = ((token * HQ + head) * DIM)[:, None] + d[None, :]
            q = tl.load(q_ptr + place, mask=here, other=0.0)
            table_ptr = tables_ptr + row.to(tl.int64) * table_stride
            first_key = 0
            if WINDOW:
                first_key = tl.maximum(length - WINDOW, 0)
            skipped = 0
            if BUNDLE_ROWS:
                skipped = shared_tiles(ranges, row, True)
            tile_offset = first_key // TILE + skipped - row_begin
            acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
            peak = tl.full([BLOCK_G], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_G], tl.float32)
            for tile in range(at, stop):
                key = (tile + tile_offset) * TILE + tl.arange(0, TILE)
                visible = (key < length) & (key >= first_key)  # never empty: every tile of a row holds such keys
                k = load_tile(cache_ptr, table_ptr, k_offset, block_stride, key, visible, True, KV_BLOCK, DIM, BLOCK_D)
                v = load_tile(cache_ptr, table_ptr, v_offset, block_stride, key, visible, True, KV_BLOCK, DIM, BLOCK_D)
                acc, peak, total = softmax_step(
                    q, k, v, acc, peak, total, visible[None, :], scale, soft_cap, HAS_CAP, True, GUARD=False
                )
            acc = acc / total[:, None]
            if (at == row_begin) & (stop == row_end) & (skipped == 0):
                tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=here)
            else:
                partial = tl.where(at == row_begin, row, num_rows + program).to(tl.int64) * HQ + head
                tl.store(ranges.partial + (partial * DIM)[:, None] + d[None, :], acc, mask=here)
                tl.store(ranges.weight_log + partial, peak + tl.log2(total), mask=g < GROUP)
        at = tl.maximum(range_begin, row_end)
        row += 1


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "programs"])
def _merge(
    query_start_ptr, ranges, out_ptr, num_rows, num_tokens, programs,
    ZERO_PADDING: tl.constexpr, BUNDLE_ROWS: tl.constexpr, HQ: tl.constexpr, DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program (index, query head) merges the partial results of row `index`.

    Where ZERO_PADDING, it also zeroes token `index`, if that is padding.

    part [BLOCK_P]             of what the row reads alone, by the program that left it, then of what it shares
    values [BLOCK_P, BLOCK_D]  what a program left, of the weight that its weight_log tells
    """
    follow(EARLY)
    index = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    kind = out_ptr.dtype.element_ty
    if ZERO_PADDING:
        padding = (index < num_tokens) & (index >= tl.load(query_start_ptr + num_rows))
        target = out_ptr + (index.to(tl.int64) * HQ + head) * DIM + d
        tl.store(target, tl.zeros([BLOCK_D], kind), mask=padding & (d < DIM))
    if index >= num_rows:
        return
    token = tl.load(query_start_ptr + index)
    after = tl.load(query_start_ptr + index + 1)
    begin = tl.load(ranges.tile_start + index) + ROW_COST
    end = tl.load(ranges.tile_start + index + 1)
    size = tl.load(ranges.size)
    first = begin // size
    alone = tl.where(end > begin, (end - 1) // size - first + 1, 0)  # a row of length 0 has no range: zero remains
    skipped = 0
    if BUNDLE_ROWS:
        skipped = shared_tiles(ranges, index, True)
    if (after - token != 1) | ((alone == 1) & (skipped == 0)):
        return
    parts = alone
    if BUNDLE_ROWS:
        place = tl.load(ranges.place + index, mask=skipped > 0, other=0)
        bundle_end = tl.load(ranges.bundle_start + place + 1, mask=skipped > 0, other=0)
        bundle_first = (bundle_end - skipped) // size
        parts += tl.where(skipped > 0, (bundle_end - 1) // size - bundle_first + 1, 0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    peak = float("-inf")
    total = 0.0
    for start in range(0, parts, BLOCK_P):
        part = start + tl.arange(0, BLOCK_P)
        there = part < parts
        partial = tl.where(part == 0, index, num_rows + first + part)
        if BUNDLE_ROWS:
            later = num_rows + (bundle_first + part - alone) * BUNDLE_ROWS + place % BUNDLE_ROWS
            shared = num_rows + programs + tl.where(part == alone, place, later)
            partial = tl.where(part < alone, partial, shared)
        partial = partial.to(tl.int64) * HQ + head
        weight_log = tl.load(ranges.weight_log + partial, mask=there, other=float("-inf"))
        new_peak = tl.maximum(peak, tl.max(weight_log))
        weight = tl.exp2(weight_log - new_peak)
        shrink = tl.exp2(peak - new_peak)
        mask = there[:, None] & (d < DIM)[None, :]
        values = tl.load(ranges.partial + (partial * DIM)[:, None] + d[None, :], mask=mask, other=0.0)
        acc = acc * shrink + tl.sum(values * weight[:, None], axis=0)
        total = total * shrink + tl.sum(weight)
        peak = new_peak
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + (token.to(tl.int64) * HQ + head) * DIM + d, acc.to(kind), mask=d < DIM)
