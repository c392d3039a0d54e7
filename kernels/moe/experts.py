"""A mixture of experts on a GPU: route, sort by expert, two products over sorted rows, combine.

    route    of each token the experts and their weights; how many tokens each expert has
    sort     the (token, place) pairs by expert, each expert's padded to whole tiles
    up       a tile's tokens through its expert's gate and up, and SiLU
    down     through its down, times the weight, into the pair's own row
    combine  the sum over a token's pairs, always in the same order

Nothing comes back to the host, and the launches depend on the shapes alone, so a CUDA graph can hold all of it. Where a
pair is sorted to among its expert's is decided by atomics and may differ from run to run; what becomes of it does not.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.moe import products_hopper

SCAN_BLOCK = 64
Shape = dict[str, int]
"""How a product over tiles is launched: columns and places at once, warps, stages."""


def moe(
    x: Tensor,
    scores: Tensor,
    gate_up: Tensor,
    down: Tensor,
    kv_slots: Tensor,
    top_k: int,
    normalize: bool,
    first: int = 0,
) -> Tensor:
    """See `reference.moe.moe`; all are contiguous."""
    assert x.is_contiguous() and scores.is_contiguous() and gate_up.is_contiguous() and down.is_contiguous()
    tokens, hidden = x.shape
    experts, inner = len(down) // hidden, down.shape[1]
    out = torch.empty_like(x)
    if not tokens:
        return out
    pairs = tokens * top_k
    many = products_hopper.holds(x, inner, pairs // scores.shape[1])
    rows, shape_up, shape_down = tile_shapes(pairs // scores.shape[1], x.dtype)
    rows = products_hopper.ROWS if many else rows
    tiles = triton.cdiv(pairs, rows) + min(experts, pairs)  # at most: each expert's last one may be part empty
    weights = torch.empty(pairs, dtype=torch.float32, device=x.device)
    chosen = torch.empty(pairs, dtype=torch.int32, device=x.device)
    counts = torch.zeros(2 * experts, dtype=torch.int32, device=x.device)
    tile_expert = torch.empty(tiles + 1, dtype=torch.int32, device=x.device)
    order = torch.full((tiles * rows,), -1, dtype=torch.int32, device=x.device)
    parts = torch.empty(pairs, hidden, dtype=x.dtype, device=x.device)
    block, own_block = triton.next_power_of_2(scores.shape[1]), triton.next_power_of_2(experts)
    routes = weights, chosen, counts, scores.shape[1], first, experts, top_k
    _route[(tokens,)](scores, kv_slots, *routes, NORMALIZE=normalize, BLOCK=block, num_warps=1)
    tile_grid = (triton.cdiv(tiles, SCAN_BLOCK),)
    _tiles[tile_grid](counts, tile_expert, experts, tiles, ROWS=rows, BLOCK=own_block, TILES=SCAN_BLOCK, num_warps=4)
    _sort[(triton.cdiv(pairs, 128),)](chosen, counts, order, experts, pairs, BLOCK=128, num_warps=4)
    if many:
        products_hopper.products(x, gate_up, down, parts, weights, order, tile_expert, top_k)
    else:
        middle = torch.empty(pairs, inner, dtype=x.dtype, device=x.device)
        grid = triton.cdiv(inner, shape_up["BLOCK_N"]), tiles
        _up[grid](x, gate_up, middle, order, tile_expert, top_k, hidden, inner, ROWS=rows, **shape_up)
        grid = triton.cdiv(hidden, shape_down["BLOCK_N"]), tiles
        _down[grid](middle, down, parts, weights, order, tile_expert, hidden, inner, ROWS=rows, **shape_down)
    _combine[(tokens, triton.cdiv(hidden, 1024))](parts, chosen, out, top_k, hidden, BLOCK=1024)
    return out


def tile_shapes(pairs: int, dtype: torch.dtype) -> tuple[int, Shape, Shape]:
    """Rows of a tile, and the shapes of both products, for so many pairs an expert (measured on an H200)."""
    if dtype == torch.float32:  # exact products run outside the matrix units and want registers
        return (16 if pairs <= 64 else 64), _shape(64, 64, 4, 3), _shape(64, 64, 4, 3)
    if pairs <= 24:
        return 16, _shape(64, 128, 4, 4), _shape(64, 128, 4, 3)
    if pairs <= 96:
        return 64, _shape(64, 64, 4, 3), _shape(128, 64, 8, 3)
    return 128, _shape(128, 64, 8, 3), _shape(128, 64, 8, 3)


def _shape(columns: int, places: int, warps: int, stages: int) -> Shape:
    return {"BLOCK_N": columns, "BLOCK_K": places, "num_warps": warps, "num_stages": stages}


@triton.jit(do_not_specialize=["first"])
def _route(
    scores_ptr, kv_slots_ptr, weights_ptr, chosen_ptr, counts_ptr, experts, first, own, top_k,
    NORMALIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program (token) writes its experts and their weights, and counts them. Experts have numbers from the first of
    the `own` ones on; -1 stands for all others, and for those of padding."""
    token = tl.program_id(0)
    live = tl.load(kv_slots_ptr + token) >= 0
    expert = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + token.to(tl.int64) * experts + expert, mask=expert < experts, other=float("-inf"))
    score = score.to(tl.float32)
    share = tl.exp(score - tl.max(score, axis=0))
    share = share / tl.sum(share, axis=0)
    share = tl.where(share == share, share, 0.0)  # NaN is in x, too, and goes on from there
    share = tl.where(expert < experts, share, -1.0)
    place = tl.arange(0, BLOCK)
    taken, weight = tl.full((BLOCK,), -1, tl.int32), tl.zeros((BLOCK,), tl.float32)
    total = 0.0
    for i in range(top_k):
        best = tl.max(share, axis=0)
        chosen = tl.min(tl.where(share == best, expert, BLOCK), axis=0)
        share = tl.where(expert == chosen, -1.0, share)
        taken, weight = tl.where(place == i, chosen, taken), tl.where(place == i, best, weight)
        total += best
    scale = 1.0 / total if NORMALIZE else 1.0
    weight = (weight * scale).to(scores_ptr.dtype.element_ty)
    tl.store(weights_ptr + token * top_k + place, weight.to(tl.float32), mask=place < top_k)
    mine = live & (taken >= first) & (taken < first + own) & (place < top_k)
    tl.store(chosen_ptr + token * top_k + place, tl.where(mine, taken - first, -1), mask=place < top_k)
    tl.atomic_add(counts_ptr + taken - first, 1, mask=mine)


@triton.jit(do_not_specialize=["tiles"])
def _tiles(counts_ptr, tile_expert_ptr, experts, tiles, ROWS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr):
    """A program (TILES tiles) writes the expert of each, -1 for those that are not needed. The first one also writes
    how many are, behind them, and where each expert's rows begin, which takes the second half of the counts."""
    expert = tl.arange(0, BLOCK)
    count = tl.load(counts_ptr + expert, mask=expert < experts, other=0)
    needed = (count + ROWS - 1) // ROWS
    end = tl.cumsum(needed, axis=0)
    total = tl.sum(needed, axis=0)
    first = tl.program_id(0) == 0
    tl.store(counts_ptr + experts + expert, (end - needed) * ROWS, mask=(expert < experts) & first)
    tl.store(tile_expert_ptr + tiles, total, mask=first)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    before = tl.sum(((end[None, :] <= tile[:, None]) & (expert < experts)[None, :]).to(tl.int32), axis=1)
    tl.store(tile_expert_ptr + tile, tl.where(tile < total, before, -1), mask=tile < tiles)


@triton.jit(do_not_specialize=["pairs"])
def _sort(chosen_ptr, counts_ptr, order_ptr, experts, pairs, BLOCK: tl.constexpr):
    """A program (BLOCK pairs) puts each where the next of its expert's goes."""
    pair = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    expert = tl.load(chosen_ptr + pair, mask=inside, other=-1)
    inside &= expert >= 0
    place = tl.atomic_add(counts_ptr + experts + expert, 1, mask=inside)
    tl.store(order_ptr + place, pair, mask=inside)


@triton.jit
def _up(
    x_ptr, gate_up_ptr, middle_ptr, order_ptr, tile_expert_ptr, top_k, hidden, inner,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program (tile of ROWS pairs, BLOCK_N columns) writes middle[pair] = silu(x Wgate) * x Wup."""
    expert = tl.load(tile_expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order_ptr + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
    real = pair >= 0
    token = tl.where(real, pair // top_k, 0).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < inner
    gate_row = (expert * 2 * inner + column) * hidden
    up_row = ((expert * 2 + 1) * inner + column) * hidden
    gate = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for begin in range(0, hidden, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        within = k < hidden
        x = tl.load(x_ptr + token[:, None] * hidden + k[None, :], mask=real[:, None] & within[None, :], other=0.0)
        weight_mask = within[:, None] & inside[None, :]
        gate_weight = tl.load(gate_up_ptr + gate_row[None, :] + k[:, None], mask=weight_mask, other=0.0)
        gate += tl.dot(x, gate_weight, input_precision="ieee")
        up_weight = tl.load(gate_up_ptr + up_row[None, :] + k[:, None], mask=weight_mask, other=0.0)
        up += tl.dot(x, up_weight, input_precision="ieee")
    element = x_ptr.dtype.element_ty
    gate, up = gate.to(element).to(tl.float32), up.to(element).to(tl.float32)  # rounded as by two products
    value = (gate * tl.sigmoid(gate)).to(element).to(tl.float32) * up
    place = pair.to(tl.int64)[:, None] * inner + column[None, :]
    tl.store(middle_ptr + place, value.to(element), mask=real[:, None] & inside[None, :])


@triton.jit
def _down(
    middle_ptr, down_ptr, parts_ptr, weights_ptr, order_ptr, tile_expert_ptr, hidden, inner,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program (tile of ROWS pairs, BLOCK_N columns) writes parts[pair] = weight * middle Wdown."""
    expert = tl.load(tile_expert_ptr + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(order_ptr + tl.program_id(1) * ROWS + tl.arange(0, ROWS))
    real = pair >= 0
    row = tl.where(real, pair, 0).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < hidden
    weight_row = (expert * hidden + column) * inner
    total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
    for begin in range(0, inner, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        within = k < inner
        x = tl.load(middle_ptr + row[:, None] * inner + k[None, :], mask=real[:, None] & within[None, :], other=0.0)
        weight_mask = within[:, None] & inside[None, :]
        weight = tl.load(down_ptr + weight_row[None, :] + k[:, None], mask=weight_mask, other=0.0)
        total += tl.dot(x, weight, input_precision="ieee")
    element = parts_ptr.dtype.element_ty
    weight = tl.load(weights_ptr + row, mask=real, other=0.0)
    value = total.to(element).to(tl.float32) * weight[:, None]
    tl.store(
        parts_ptr + row[:, None] * hidden + column[None, :], value.to(element), mask=real[:, None] & inside[None, :]
    )


@triton.jit
def _combine(parts_ptr, chosen_ptr, out_ptr, top_k, hidden, BLOCK: tl.constexpr):
    """A program (token, BLOCK columns) adds up those of the token's pairs that were computed."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(top_k):
        pair = token * top_k + place
        computed = tl.load(chosen_ptr + pair) >= 0
        total += tl.load(parts_ptr + pair * hidden + column, mask=inside & computed, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * hidden + column, total.to(out_ptr.dtype.element_ty), mask=inside)
