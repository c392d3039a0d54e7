"""The map of split-KV attention: which program handles which keys of which row.

The tiles of all rows form one list, cut into equal ranges, one a program, as many as the GPU runs at once:

    rows      |-- r0 --|- r1 -|------------------ r2 ------------------|
    programs  |---- p0 ----|---- p1 ----|---- p2 ----|---- p3 ----|- p4

To begin a row costs time too: each counts as ROW_COST tiles more, which lie before its real ones. The map is made on
the device once a step and read by every layer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.batch import Batch

ROW_COST = 2
ROWS_AT_ONCE = 1024


class Ranges(NamedTuple):
    """Device tensors of the step's ranges, and room for their partial results, in a form that kernels take.

    Attributes:
        tile_start: int32 [R + 1], where each row begins in the list; the last entry is the list's length.
        first_row: int32 [programs], the row that holds the first tile of each range.
        size: int32 [1], tiles a range.
        partial: float32 [2 * programs, Hq, D]: of the row that a range begins with, of the one it ends with.
        weight_log: float32 [2 * programs, Hq], log2 of the sum of exponentials.
    """

    tile_start: Tensor
    first_row: Tensor
    size: Tensor
    partial: Tensor
    weight_log: Tensor


def make_ranges(batch: Batch, programs: int, heads: int, dim: int, window: int, tile: int) -> Ranges:
    """Queue the making of the map.

    Args:
        programs: ranges to cut the list into.
        heads, dim: query heads and head_dim, for the partial results.
        window: tokens a query sees, 0 for all: tiles wholly before it are not in the list.
        tile: keys a tile.
    """
    device, rows = batch.seq_lens.device, len(batch.seq_lens)

    def room(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    made = Ranges(
        tile_start=room(rows + 1),
        first_row=room(programs),
        size=room(1),
        partial=room(2 * programs, heads, dim, dtype=torch.float32),
        weight_log=room(2 * programs, heads, dtype=torch.float32),
    )
    _map_ranges[(1,)](
        batch.query_start,
        batch.seq_lens,
        made,
        rows,
        programs,
        WINDOW=window,
        TILE=tile,
        ROW_COST=ROW_COST,
        BLOCK_R=ROWS_AT_ONCE,
        num_warps=4,
    )
    return made


@triton.jit(do_not_specialize=["num_rows", "programs"])
def _map_ranges(
    query_start_ptr,
    seq_lens_ptr,
    ranges,
    num_rows,
    programs,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    ROW_COST: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program makes the map, BLOCK_R rows at a time: first the length of the list, then where each range begins."""
    total = 0
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        total += tl.sum(_tiles(query_start_ptr, seq_lens_ptr, row, num_rows, WINDOW, TILE, ROW_COST))
    size = tl.maximum((total + programs - 1) // programs, 1)
    tl.store(ranges.tile_start + num_rows, total)
    tl.store(ranges.size, size)
    done = 0
    for start in range(0, num_rows, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        tiles = _tiles(query_start_ptr, seq_lens_ptr, row, num_rows, WINDOW, TILE, ROW_COST)
        last = done + tl.cumsum(tiles)
        first = last - tiles
        tl.store(ranges.tile_start + row, first, mask=row < num_rows)
        # the ranges whose first tile lies in a row: from ceil(first / size) to before ceil(last / size)
        program = (first + size - 1) // size
        after = (last + size - 1) // size
        for step in range(0, tl.max(after - program)):
            tl.store(ranges.first_row + program + step, row, mask=program + step < after)
        done += tl.sum(tiles)


@triton.jit
def _tiles(query_start_ptr, seq_lens_ptr, row, num_rows, WINDOW: tl.constexpr, TILE: tl.constexpr, COST: tl.constexpr):
    """Entries of each row in the list: none unless it has one query token."""
    inside = row < num_rows
    length = tl.load(seq_lens_ptr + row, mask=inside, other=0)
    begin = tl.load(query_start_ptr + row, mask=inside, other=0)
    end = tl.load(query_start_ptr + row + 1, mask=inside, other=0)
    tiles = (length + TILE - 1) // TILE
    if WINDOW:
        tiles -= tl.maximum(length - WINDOW, 0) // TILE
    return tl.where((end - begin == 1) & (length > 0), tiles + COST, 0)
