"""The map of split-KV attention: which program handles which keys of which row.

The tiles of all rows form one list, cut into equal ranges, one a program, as many as the GPU runs at once:

    rows      |-- r0 --|- r1 -|------------------ r2 ------------------|
    programs  |---- p0 ----|---- p1 ----|---- p2 ----|---- p3 ----|- p4

To begin a row costs time too: each counts as ROW_COST tiles more, which lie before its real ones. Before all rows lie
the tiles that some of them share, once for each bundle of such rows (see `bundles`), and cut like the others. The map
is made on the device once a step and read by every layer.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.attention.bundles import ROWS_AT_ONCE, decode_length, find_bundles, pack_bundles, shared_tiles
from wavecore.kernels.batch import Batch

ROW_COST = tl.constexpr(2)


class Ranges(NamedTuple):
    """Device tensors of the step's ranges, and room for their partial results, in a form that kernels take.

    A row or a bundle that is cut by a border leaves partial results: that of its first range has a place by the row
    itself; the others one by the range, which begins with them. What a row shares is always a partial result.

        partial   R rows | programs | R places of rows that share | programs x BUNDLE_ROWS, by place % BUNDLE_ROWS

    Attributes:
        tile_start: int32 [R + 1], where each row begins in the list; the last entry is the list's length.
        bundle_start: int32 [R + 1], the same of bundles, by the place of their first row.
        first: int32 [programs], the row that holds the first tile of each range, or the place of the bundle.
        size: int32 [1], tiles a range.
        key: int32 [R], the first row that begins alike, among its thousand, and how many tiles both have; -1 shares
            nothing.
        place: int32 [R], of a row among all that share, those of a bundle side by side.
        member: int32 [R], the row at a place.
        bundle_rows: int32 [R], how many the bundle has that begins at a place; 0 where none does.
        partial: float32 [2 * R + programs * (1 + BUNDLE_ROWS), Hq, D]; [R + programs, Hq, D] where nothing is shared.
        weight_log: float32 [..., Hq] of each, log2 of the sum of exponentials.
    """

    tile_start: Tensor
    bundle_start: Tensor
    first: Tensor
    size: Tensor
    key: Tensor
    place: Tensor
    member: Tensor
    bundle_rows: Tensor
    partial: Tensor
    weight_log: Tensor


def make_ranges(
    batch: Batch, programs: int, heads: int, dim: int, window: int, tile: int, block_size: int, bundle_rows: int
) -> Ranges:
    """Queue the making of the map.

    Args:
        programs: ranges to cut the list into.
        heads, dim: query heads and head_dim, for the partial results.
        window: tokens a query sees, 0 for all: tiles wholly before it are not in the list.
        tile, block_size: keys a tile, and tokens a block.
        bundle_rows: how many rows share one product; with 0 none do.
    """
    device, rows = batch.seq_lens.device, len(batch.seq_lens)

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    sharing = rows if bundle_rows else 0
    places = rows + programs + sharing + programs * bundle_rows
    made = Ranges(
        tile_start=room(rows + 1),
        bundle_start=room(sharing + 1),
        first=room(programs),
        size=room(1),
        key=room(sharing),
        place=room(sharing),
        member=room(sharing),
        bundle_rows=room(sharing),
        partial=room(places, heads, dim, dtype=torch.float32),
        weight_log=room(places, heads, dtype=torch.float32),
    )
    if sharing:
        find_bundles(made.key, batch, block_size, tile)
    options = {"WINDOW": window, "TILE": tile, "BUNDLE_ROWS": bundle_rows, "num_warps": 8 if sharing else 4}
    step = batch.query_start, batch.seq_lens
    _map_ranges[(1,)](*step, made, rows, programs, BLOCK_R=ROWS_AT_ONCE, **options)
    return made


@triton.jit(do_not_specialize=["num_rows", "programs"])
def _map_ranges(
    query_start_ptr, seq_lens_ptr, ranges, num_rows, programs,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BUNDLE_ROWS: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program makes the map, BLOCK_R rows at a time: first the length of the list, then where each range begins."""
    places = 0
    if BUNDLE_ROWS:
        places = pack_bundles(ranges, num_rows, BLOCK_R, BUNDLE_ROWS)
    total = 0
    for start in range(0, places, BLOCK_R):
        total += tl.sum(_bundle_tiles(ranges, start + tl.arange(0, BLOCK_R), places))
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        tiles = _tiles(query_start_ptr, seq_lens_ptr, ranges, row, num_rows, WINDOW, TILE, BUNDLE_ROWS)
        total += tl.sum(tiles)
    size = tl.maximum((total + programs - 1) // programs, 1)
    tl.store(ranges.tile_start + num_rows, total)
    tl.store(ranges.size, size)
    done = 0
    for start in range(0, places, BLOCK_R):
        place = start + tl.arange(0, BLOCK_R)
        tiles = _bundle_tiles(ranges, place, places)
        done += _lay(ranges.bundle_start, ranges.first, place, tiles, place < places, size, done)
    if BUNDLE_ROWS:
        tl.store(ranges.bundle_start + places, done)
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        tiles = _tiles(query_start_ptr, seq_lens_ptr, ranges, row, num_rows, WINDOW, TILE, BUNDLE_ROWS)
        done += _lay(ranges.tile_start, ranges.first, row, tiles, row < num_rows, size, done)


@triton.jit
def _lay(start_ptr, first_ptr, item, tiles, inside, size, done):
    """Store where items begin in the list, behind `done` tiles, and which ranges begin with each; their tiles."""
    last = done + tl.cumsum(tiles)
    first = last - tiles
    tl.store(start_ptr + item, first, mask=inside)
    # the ranges whose first tile lies in an item: from ceil(first / size) to before ceil(last / size)
    program = (first + size - 1) // size
    after = (last + size - 1) // size
    for step in range(0, tl.max(after - program)):
        tl.store(first_ptr + program + step, item, mask=program + step < after)
    return tl.sum(tiles)


@triton.jit
def _tiles(
    query_start_ptr, seq_lens_ptr, ranges, row, num_rows,
    WINDOW: tl.constexpr, TILE: tl.constexpr, BUNDLE_ROWS: tl.constexpr,
):  # fmt: skip
    """Entries of each row in the list, of what it reads alone: none unless it has one query token."""
    length = decode_length(query_start_ptr, seq_lens_ptr, row, num_rows)
    tiles = (length + TILE - 1) // TILE
    if WINDOW:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    if BUNDLE_ROWS:
        tiles -= shared_tiles(ranges, row, row < num_rows)
    return tl.where(length > 0, tiles + ROW_COST, 0)


@triton.jit
def _bundle_tiles(ranges, place, places):
    """Entries in the list of the bundle that begins at each place: none where none does."""
    inside = place < places
    rows = tl.load(ranges.bundle_rows + place, mask=inside, other=0)
    member = tl.load(ranges.member + place, mask=inside, other=0)
    return tl.where(rows > 0, shared_tiles(ranges, member, inside) + ROW_COST, 0)
