"""Rows with one query token that begin with the same blocks: shared-prefix (cascade) attention reads these once.

Idea: Juravsky et al., "Hydragen" (2024), and FlashInfer's cascades. Blocks of the prefix cache are shared as they lie,
so rows have a beginning in common where their block tables begin with the same entries. The device finds that out once
a step, and the host knows nothing of it: a captured graph meets every kind of sharing, and none.

    block tables   r0 [7 8 9|1]   r1 [7 8 9|4 2]   r2 [5 6]   r3 [7 8 9|3]     | what a row reads alone is behind it
    bundles        r0 r1 r3 with the tiles of 7 8 9: at most as many rows as one product has
    places         0  1  2  of rows that share, those of a bundle side by side
"""

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.batch import Batch

ROWS_AT_ONCE = 1024
"""A row looks for others among its thousand."""
LEAST_TILES = tl.constexpr(4)
"""What is shared must be worth two results more that are merged."""
SPAN = tl.constexpr(1 << 20)  # above the tiles of any row


def find_bundles(key: Tensor, batch: Batch, block_size: int, tile: int) -> None:
    """Queue the search for rows that share; see `Ranges.key`, and `tile` in `make_ranges`."""
    rows = len(key)
    step = batch.block_tables, batch.block_tables.stride(0), batch.query_start, batch.seq_lens
    _find[(rows,)](*step, key, rows, KV_BLOCK=block_size, TILE=tile, BLOCK_R=ROWS_AT_ONCE, num_warps=4)


@triton.jit(do_not_specialize=["table_stride", "num_rows"])
def _find(
    tables_ptr, table_stride, query_start_ptr, seq_lens_ptr, key_ptr, num_rows,
    KV_BLOCK: tl.constexpr, TILE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """A program chooses what a row shares: so many blocks that their number times that of other rows is largest.

    Rows of one beginning mostly choose alike; each choice is right by itself, as its tables are compared.

    other [BLOCK_R]  the rows of the same thousand
    low, high        between them lies how many blocks each has in common with the row
    """
    row = tl.program_id(0)
    first = row // BLOCK_R * BLOCK_R
    lane = tl.arange(0, BLOCK_R)
    other = first + lane
    # the block of the last token a row always reads alone
    most = (decode_length(query_start_ptr, seq_lens_ptr, row, num_rows) - 1) // KV_BLOCK
    theirs = (decode_length(query_start_ptr, seq_lens_ptr, other, num_rows) - 1) // KV_BLOCK
    limit = tl.where(other == row, 0, tl.minimum(theirs, most))
    mine_ptr = tables_ptr + row.to(tl.int64) * table_stride
    their_ptr = tables_ptr + other.to(tl.int64) * table_stride
    alike = tl.load(their_ptr, mask=limit > 0, other=-1) == tl.load(mine_ptr, mask=most > 0, other=-2)
    low = alike.to(tl.int32)
    high = tl.where(alike, limit, 0)
    while tl.max(high - low) > 0:  # where entries are equal, those before them are, too
        middle = (low + high + 1) // 2
        searching = low < high
        theirs = tl.load(their_ptr + middle - 1, mask=searching, other=-1)
        mine = tl.load(mine_ptr + middle - 1, mask=searching, other=-2)
        low = tl.where(theirs == mine, middle, low)
        high = tl.where(searching & (theirs != mine), middle - 1, high)
    low = tl.where(low * KV_BLOCK // TILE >= LEAST_TILES, low, 0)

    sharing = tl.sum((low > 0).to(tl.int32))
    best, blocks, tried = 0, 0, tl.max(low)
    while tried * sharing > best:
        worth = tried * tl.sum((low >= tried).to(tl.int32))
        blocks = tl.where(worth > best, tried, blocks)
        best = tl.maximum(worth, best)
        tried = tl.max(tl.where(low < tried, low, 0))
    leader = tl.minimum(tl.min(tl.where(low >= tl.maximum(blocks, 1), other, row)), row)
    leader_ptr = tables_ptr + leader.to(tl.int64) * table_stride
    different = 0
    for start in range(0, blocks, BLOCK_R):
        inside = start + lane < blocks
        mine = tl.load(mine_ptr + start + lane, mask=inside, other=0)
        different += tl.sum((mine != tl.load(leader_ptr + start + lane, mask=inside, other=0)).to(tl.int32))
    shares = (blocks > 0) & (different == 0)
    tl.store(key_ptr + row, tl.where(shares, (leader - first) * SPAN + blocks * KV_BLOCK // TILE, -1))


@triton.jit
def decode_length(query_start_ptr, seq_lens_ptr, row, num_rows):
    """Tokens of each row; 0 unless it has one query token."""
    inside = row < num_rows
    length = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    begin = tl.load(query_start_ptr + row, mask=inside, other=0)
    end = tl.load(query_start_ptr + row + 1, mask=inside, other=0)
    return tl.where(end - begin == 1, length, 0)


@triton.jit
def pack_bundles(ranges, num_rows, BLOCK_R: tl.constexpr, BUNDLE_ROWS: tl.constexpr):
    """One program gives the rows that share their places, and returns how many these are."""
    done = 0
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        key = tl.load(ranges.key + row, mask=row < num_rows, other=-1)
        shares = key >= 0
        count = tl.sum(shares.to(tl.int32))
        if count > 0:
            smaller = tl.zeros([BLOCK_R], tl.int32)  # rows of smaller keys, of the same, and those of them before
            alike = tl.zeros([BLOCK_R], tl.int32)
            rank = tl.zeros([BLOCK_R], tl.int32)
            for other in range(start, tl.minimum(start + BLOCK_R, num_rows)):
                theirs = tl.load(ranges.key + other)
                same = (key == theirs).to(tl.int32)
                alike += same
                rank += tl.where(row > other, same, 0)
                smaller += ((theirs >= 0) & (theirs < key)).to(tl.int32)
            place = done + smaller + rank
            rows = tl.where(rank % BUNDLE_ROWS == 0, tl.minimum(alike - rank, BUNDLE_ROWS), 0)
            tl.store(ranges.place + row, place, mask=shares)
            tl.store(ranges.member + place, row, mask=shares)
            tl.store(ranges.bundle_rows + place, rows, mask=shares)
        done += count
    tl.debug_barrier()  # what was stored is read by place now
    return done


@triton.jit
def shared_tiles(ranges, row, inside):
    """Tiles that rows share with others."""
    key = tl.load(ranges.key + row, mask=inside, other=-1)
    return tl.where(key >= 0, key % SPAN, 0)
