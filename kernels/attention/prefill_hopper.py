"""Causal attention for rows with several query tokens on Hopper: two warp groups multiply while a warp loads.

The plan of FlashAttention 3 (Shah et al. 2024, arXiv:2407.08608) for keys in blocks, in Gluon, the language below
Triton's in which layouts and barriers are written out. `prefill` serves all that this one does not hold.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wavecore.kernels.attention.tile import LOG2E
from wavecore.kernels.batch import Batch
from wavecore.kernels.device import capability

BLOCK_M = 128
"""Rows of the matrix product a program has, 64 for each warp group."""
SLOTS = gl.constexpr(4)
"""Tiles of keys or values in shared memory."""
SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16))
"""How matrix units read a tile: columns by 64."""
WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
"""How a warp group reads memory: 16 bytes a thread."""
EACH_WARP = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])))


def holds(q: Tensor, kv_cache: Tensor) -> bool:
    """Whether the kernel can do it: 16 bits, whole columns of 64, and blocks that divide a tile or hold several."""
    size, dim = kv_cache.shape[4:]
    fits = dim in (64, 128, 256) and size >= 8 and not size & (size - 1)
    return fits and q.dtype != torch.float32 and capability(q.device) == 90


def prefill_attention(
    out: Tensor, q: Tensor, kv_cache: Tensor, layer: int, batch: Batch, scale: float, soft_cap: float, window: int
) -> None:
    """As `prefill.prefill_attention`, of what it `holds`; `scale` is above 0."""
    tokens, heads, dim = q.shape
    kv_heads, block_size = kv_cache.shape[3:5]
    group, block_n, rows = heads // kv_heads, 128 if dim <= 128 else 64, len(batch.seq_lens)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    cache = TensorDescriptor.from_tensor(kv_cache[:, layer], [1, 1, 1, min(block_n, block_size), 64], layout)
    step = (batch.block_tables, batch.block_tables.stride(0), batch.query_start, batch.seq_lens, rows, tokens)
    sizes = {"GROUP": group, "DIM": dim, "KV_BLOCK": block_size, "BLOCK_Q": BLOCK_M // group, "BLOCK_N": block_n}
    options = {"CAP": soft_cap * LOG2E, "WINDOW": window, "num_warps": 4}
    programs = kv_heads * (tokens // (BLOCK_M // group) + rows + 1)
    _prefill_hopper[(programs,)](q, out, cache, *step, heads * dim, scale * LOG2E, **sizes, **options)


@gluon.jit(do_not_specialize=["table_stride", "num_rows", "num_tokens"])
def _prefill_hopper(
    q_ptr,
    out_ptr,
    cache,
    tables_ptr,
    table_stride,
    query_start_ptr,
    seq_lens_ptr,
    num_rows,
    num_tokens,
    token_stride,
    scale,
    GROUP: gl.constexpr,
    DIM: gl.constexpr,
    KV_BLOCK: gl.constexpr,
    BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAP: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """A program (tile of queries, KV head) attends with BLOCK_Q query tokens of one row, as in `prefill._prefill`.

    One warp loads tiles of BLOCK_N keys and their values, by turns, from the last to the first, into a ring. Two warp
    groups wait until a slot of it is `full`, and count it `empty` when they have read it.
    """
    # Later tiles of a row see more keys: start them first, so that the last programs to start are short.
    index = gl.num_programs(0) - 1 - gl.program_id(0)
    program = index // cache.shape[2]
    kv_head = index % cache.shape[2]
    real_tokens = gl.load(query_start_ptr + num_rows)
    row, first, end, length = 0, 0, 0, 0
    for base in range(0, num_rows, 128):  # all rows at once: loads one after the other would take microseconds
        some = base + gl.arange(0, 128, layout=EACH_WARP)
        starts = gl.load(query_start_ptr + some, mask=some < num_rows, other=0)
        ends = gl.load(query_start_ptr + some + 1, mask=some < num_rows, other=0)
        lengths = gl.load(seq_lens_ptr + some, mask=some < num_rows, other=0)
        mine = (some < num_rows) & (starts // BLOCK_Q + some <= program) & (program <= ends // BLOCK_Q + some)
        row += gl.sum(gl.where(mine, some, 0), 0)
        first += gl.sum(gl.where(mine, starts, 0), 0)
        end += gl.sum(gl.where(mine, ends, 0), 0)
        length += gl.sum(gl.where(mine, lengths, 0), 0)
    spare = program - (real_tokens // BLOCK_Q + num_rows)
    if spare >= 0:
        token = real_tokens + spare * BLOCK_Q
        out_ptr += token.to(gl.int64) * token_stride + kv_head * (GROUP * DIM)
        for half in gl.static_range(2):
            place, real = _places(half, token_stride, gl.minimum(num_tokens - token, BLOCK_Q), GROUP, DIM, WIDE)
            gl.store(out_ptr + place, gl.zeros([64, DIM], out_ptr.dtype.element_ty, WIDE), mask=real)
        return
    token = first + (program - (first // BLOCK_Q + row)) * BLOCK_Q
    if (token >= end) | (end - first == 1):
        return

    position = length - end + token  # of the first query
    last = (gl.minimum(length, position + BLOCK_Q) - 1) // BLOCK_N * BLOCK_N
    begin = gl.maximum(position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N if WINDOW else 0
    q_tiles = gl.allocate_shared_memory(cache.dtype, [2, 64, DIM], SWIZZLED)
    ring = gl.allocate_shared_memory(cache.dtype, [SLOTS, BLOCK_N, DIM], SWIZZLED)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=2)
    keys = (begin, last, length, position)
    tiles = (ring, full, empty)
    start = token.to(gl.int64) * token_stride + kv_head * (GROUP * DIM)
    rows = (q_ptr + start, out_ptr + start, token_stride, gl.minimum(end - token, BLOCK_Q), q_tiles)
    table_ptr = tables_ptr + row * table_stride.to(gl.int64)
    gl.warp_specialize(
        [
            (_attend, (0, keys, rows, tiles, scale, GROUP, CAP, WINDOW)),
            (_attend, (1, keys, rows, tiles, scale, GROUP, CAP, WINDOW)),
            (_load, (keys, tiles, cache, table_ptr, kv_head, KV_BLOCK)),
        ],
        worker_num_warps=[4, 1],
        worker_num_regs=[240, 24],
    )


@gluon.jit
def _places(HALF: gl.constexpr, token_stride, count, GROUP: gl.constexpr, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Where a half of the rows lies in q and out behind the first token and head, and which of them are real."""
    m = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    d = gl.arange(0, DIM, layout=gl.SliceLayout(0, LAYOUT))
    return (m // GROUP * token_stride + m % GROUP * DIM)[:, None] + d[None, :], (m // GROUP < count)[:, None]


@gluon.jit
def _load(keys, tiles, cache, table_ptr, kv_head, KV_BLOCK: gl.constexpr):
    """Keys and values into the ring, through the block table, by pieces of at most a block and 64 columns."""
    begin, last, length, _position = keys
    ring, full, empty = tiles
    BLOCK_N: gl.constexpr = ring.shape[1]
    PARTS: gl.constexpr = ring.shape[2] // 64
    PIECE: gl.constexpr = cache.block_shape[3]
    PIECES: gl.constexpr = BLOCK_N // PIECE
    pieces = ring._reinterpret(cache.dtype, [SLOTS * PARTS * PIECES, 1, 1, 1, PIECE, 64], cache.layout)
    for item in range(2 * ((last - begin) // BLOCK_N + 1)):
        start = last - item // 2 * BLOCK_N
        blocks = ()
        for i in gl.static_range(PIECES):  # behind the last key block 0 stands in
            key = start + i * PIECE
            blocks += (gl.load(table_ptr + key // KV_BLOCK, mask=key < length, other=0),)  # type: ignore[assignment]
        slot = item % SLOTS
        mbarrier.wait(empty.index(slot), item // SLOTS % 2 ^ 1)
        mbarrier.expect(full.index(slot), BLOCK_N * PARTS * 128)
        for i in gl.static_range(PIECES):
            for j in gl.static_range(PARTS):
                place = [blocks[i], item % 2, kv_head, (start + i * PIECE) % KV_BLOCK, j * 64]
                piece = pieces.index((slot * PARTS + j) * PIECES + i)
                hopper.tma.async_copy_global_to_shared(cache, place, full.index(slot), piece)


@gluon.jit
def _attend(HALF: gl.constexpr, keys, rows, tiles, scale, GROUP: gl.constexpr, CAP: gl.constexpr, WINDOW: gl.constexpr):
    """A warp group: 64 rows of the matrix product."""
    begin, last, length, first_position = keys
    q_ptr, out_ptr, token_stride, count, q_tiles = rows
    ring, full, _empty = tiles
    BLOCK_N: gl.constexpr = ring.shape[1]
    DIM: gl.constexpr = ring.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    V: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    q = q_tiles.index(HALF)
    place, real = _places(HALF, token_stride, count, GROUP, DIM, WIDE)
    q.store(gl.load(q_ptr + place, mask=real, other=0.0))
    if last + BLOCK_N > length:  # behind the last key memory may hold anything, NaN included
        mbarrier.wait(full.index(1), 0)
        key = last + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, WIDE))
        ring.index(1).store(gl.where(key[:, None] < length, ring.index(1).load(WIDE), 0.0).to(ring.dtype))
    hopper.fence_async_shared()
    position = first_position + (HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, S))) // GROUP
    acc = gl.zeros([64, DIM], gl.float32, V)
    weights = gl.zeros([64, BLOCK_N], ring.dtype, gl.DotOperandLayout(0, V, 2))
    peak = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
    state = _step(0, q, tiles, (acc, weights, peak, total), position - last, scale, CAP, WINDOW, True)
    # before `free` all queries see all keys; but a window's lower edge may lie in any tile
    free = begin if WINDOW else gl.minimum((first_position + 1) // BLOCK_N * BLOCK_N, last)
    item = 2
    for start in range(last - BLOCK_N, free - 1, -BLOCK_N):
        state = _step(item, q, tiles, state, position - start, scale, CAP, WINDOW, False)
        item += 2
    for start in range(free - BLOCK_N, begin - 1, -BLOCK_N):
        state = _step(item, q, tiles, state, position - start, scale, CAP, None, False)
        item += 2
    acc, weights, peak, total = state
    mbarrier.wait(full.index((item - 1) % SLOTS), (item - 1) // SLOTS % 2)
    acc = warpgroup_mma(weights, ring.index((item - 1) % SLOTS), acc)
    share = 1.0 / gl.where(total == 0.0, 1.0, total)  # where there is a window, padding rows can have seen no key
    acc = acc * gl.convert_layout(share, gl.SliceLayout(1, V))[:, None]
    q.store(acc.to(q.dtype))  # and from there, where rows lie whole, to memory
    gl.store(out_ptr + place, q.load(WIDE), mask=real)


@gluon.jit
def _step(item, q, tiles, state, upto, scale, CAP: gl.constexpr, WINDOW: gl.constexpr, FIRST: gl.constexpr):
    """Scores of the keys in item `item` of the ring, beside the sum of the values before them.

    state: acc [64, DIM], weights [64, BLOCK_N] of the values before, peak and total [64], as in `prefill._prefill`;
    upto [64] is the last key that each query sees, counted from the first of these; WINDOW is None if all are seen.
    """
    acc, weights, peak, total = state
    ring, full, empty = tiles
    BLOCK_N: gl.constexpr = ring.shape[1]
    S: gl.constexpr = peak.type.layout.parent
    slot = item % SLOTS
    before = (item - 1) % SLOTS
    mbarrier.wait(full.index(slot), item // SLOTS % 2)
    scores = gl.zeros([64, BLOCK_N], gl.float32, S)
    scores = warpgroup_mma(q, ring.index(slot).permute((1, 0)), scores, use_acc=False, is_async=True)
    if not FIRST:
        mbarrier.wait(full.index(before), (item - 1) // SLOTS % 2)
        acc = warpgroup_mma(weights, ring.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(0 if FIRST else 1, [scores])
    mbarrier.arrive(empty.index(slot))
    if CAP != 0.0:  # as in `tile.softmax_step`
        scores = CAP * (1.0 - 2.0 / (gl.exp2(scores * (scale * (2.8853900817779268 / CAP))) + 1.0))
        scale = 1.0
    if WINDOW is not None:
        key = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, S))[None, :]
        visible = key <= upto[:, None]
        if WINDOW > 0:
            visible = visible & (key > upto[:, None] - WINDOW)
        scores = gl.where(visible, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale)
    base = (
        gl.where(new_peak == float("-inf"), 0.0, new_peak) if WINDOW is not None else new_peak
    )  # no key may be visible yet
    new_weights = gl.exp2(scores * scale - base[:, None])
    shrink = gl.exp2(peak - base)
    total = total * shrink + gl.sum(new_weights, 1)
    if not FIRST:
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(empty.index(before))
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, gl.convert_layout(new_weights.to(ring.dtype), weights.type.layout), new_peak, total
