"""Rows that begin with the same blocks: which are found, what that makes of the list of tiles, what attention says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import pytest
import torch
from tests.kernels.attention.attention_case import check, compare, inputs
from torch import Tensor

from wavecore.kernels.attention import bundles, decode, ranges
from wavecore.kernels.attention.paged import paged_attention
from wavecore.kernels.attention.ranges import Ranges
from wavecore.kernels.batch import Batch

pytestmark = pytest.mark.usefixtures("guarded")

SIZE, TILE = 8, 32  # tokens a block, and keys a tile of heads up to 128 in float32
ROW_COST, LEAST_TILES = ranges.ROW_COST.value, bundles.LEAST_TILES.value
LEAST = LEAST_TILES * TILE // SIZE
"""Blocks that are worth sharing."""
Shared = Sequence[tuple[Sequence[int], int]]


def share(batch: Batch, shared: Shared) -> None:
    """Let rows begin with the blocks of the first of them: (rows, how many blocks)."""
    for rows, blocks in shared:
        batch.block_tables[list(rows[1:]), :blocks] = batch.block_tables[rows[0], :blocks].clone()


def case(
    lengths: Sequence[int],
    shared: Shared,
    device: str,
    shape: tuple[int, int, int] = (16, 1, 2),
    dtype: torch.dtype = torch.float32,
    query_lens: Sequence[int] = (),
    spread: float = 1.0,
) -> tuple[Tensor, Tensor, Batch]:
    q, kv_cache, batch = inputs(query_lens or [1] * len(lengths), lengths, shape, dtype, SIZE, device, spread)
    share(batch, shared)
    return q, kv_cache, batch


def map_of(batch: Batch) -> Ranges:
    [found] = [made for key, made in batch.shared.items() if isinstance(key, tuple) and key[0] == "decode_ranges"]
    return found  # type: ignore[no-any-return]


def found(batch: Batch) -> list[tuple[list[int], int]]:
    """(rows, tiles that they share) of each bundle, as the device found them."""
    made = map_of(batch)
    places = int((made.key >= 0).sum())
    heads = [place for place in range(places) if made.bundle_rows[place]]
    rows = [made.member[place : place + int(made.bundle_rows[place])].tolist() for place in heads]
    tiles = [int(made.key[members[0]]) % bundles.SPAN.value for members in rows]
    assert [*chain(*rows)] == made.member[:places].tolist()
    starts = made.bundle_start.tolist()
    for place, members, shared in zip(heads, rows, tiles, strict=True):
        assert starts[place + len(members)] - starts[place] == shared + ROW_COST
        assert made.place[members].tolist() == [*range(place, place + len(members))]
    assert starts[places] == int(made.tile_start[0])
    return sorted(zip(rows, tiles, strict=True))


LONG = 40 * SIZE
KINDS: dict[str, tuple[list[int], Shared, list[tuple[list[int], int]]]] = {
    "nobody": ([LONG] * 3, [], []),
    "too little": ([LONG] * 3, [((0, 1, 2), LEAST - 1)], []),
    "just enough": ([LONG] * 3, [((2, 0), LEAST)], [([0, 2], LEAST_TILES)]),
    "two groups and others": (
        [LONG, 200, 5, 0, LONG, 180, LONG],
        [((4, 0, 6), 30), ((1, 5), 20)],
        [([0, 4, 6], 7), ([1, 5], 5)],
    ),
    "more than one bundle": (
        [200] * 19,
        [(range(19), 17)],
        [([*range(8)], 4), ([*range(8, 16)], 4), ([16, 17, 18], 4)],
    ),
    # the last token of a row is always its own, and with it the tile that it lies in
    "ends in what is shared": ([LONG, 133, 161, 128], [((0, 1, 2, 3), 40)], [([0, 1, 2], 4)]),
    # each row takes what saves most for it: 16 blocks of two others, or 36 of one; so the last one is left alone
    "a tree": ([LONG] * 3, [((0, 1, 2), 16), ((0, 1), 36)], [([0, 1], 9), ([2], 4)]),
    "mostly alike": ([LONG] * 4, [((0, 1, 2, 3), 32), ((0, 1), 36)], [([0, 1, 2, 3], 8)]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_who_shares(kind: str, device: str) -> None:
    lengths, shared, want = KINDS[kind]
    q, kv_cache, batch = case(lengths, shared, device)
    paged_attention(q, kv_cache, 1, batch, 0.25)
    assert found(batch) == want
    own = [-(-n // TILE) - sum(tiles for rows, tiles in want if row in rows) for row, n in enumerate(lengths) if n]
    spent = sum(own) + ROW_COST * len(own) + sum(tiles + ROW_COST for _, tiles in want)
    assert int(map_of(batch).tile_start[-1]) == spent  # each tile is read once
    check(q, kv_cache, replace(batch, shared={}))


def test_rows_of_another_thousand_share_apart(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (bundles, ranges):
        monkeypatch.setattr(module, "ROWS_AT_ONCE", 8)
    q, kv_cache, batch = case([140] * 18, [((0, 5, 7, 8, 9, 16, 17), 16)], device)
    paged_attention(q, kv_cache, 1, batch, 0.25)
    assert found(batch) == [([0, 5, 7], 4), ([8, 9], 4), ([16, 17], 4)]
    check(q, kv_cache, replace(batch, shared={}))


def test_alike_behind_a_difference_is_not_shared(device: str) -> None:
    """The prefix cache makes no such tables; a search by halves would be fooled."""
    q, kv_cache, batch = case([LONG, LONG, LONG], [((0, 1, 2), 36)], device)
    batch.block_tables[1, 3] = batch.block_tables[1, 37]
    paged_attention(q, kv_cache, 1, batch, 0.25)
    assert not [rows for rows, _ in found(batch) if 1 in rows and len(rows) > 1]
    check(q, kv_cache, replace(batch, shared={}))


@pytest.mark.parametrize(
    "shape, dtype, soft_cap",
    [
        ((64, 2, 1), torch.float16, 0.0),
        ((96, 1, 3), torch.float16, 0.0),
        ((128, 1, 7), torch.float16, 8.0),
        ((128, 2, 2), torch.float32, 8.0),
        ((256, 1, 4), torch.float32, 0.0),
        ((256, 1, 16), torch.float16, 0.0),
        ((32, 1, 32), torch.float16, 0.0),  # too many heads for two rows in one product
    ],
)
def test_shapes(shape: tuple[int, int, int], dtype: torch.dtype, soft_cap: float, device: str) -> None:
    """Scores are spread so widely that shared and own parts of a row weigh very differently, and that a cap bends."""
    lengths = [400, 350, 300, 1, 390, 60, 333]
    check(*case(lengths, [((0, 1, 4, 6), 37), ((2, 5), 7)], device, shape, dtype, spread=4.0), soft_cap)


def test_beside_prompts_and_with_windows(device: str) -> None:
    q, kv_cache, batch = case([300, 290, 310, 320, 200], [((0, 1, 2, 3, 4), 20)], device, query_lens=[1, 1, 1, 3, 200])
    check(q, kv_cache, batch)
    check(q, kv_cache, replace(batch, shared={}), window=30)
    paged_attention(q, kv_cache, 1, batch, 0.25)
    assert found(batch) == [([0, 1, 2], 5)]


@pytest.mark.parametrize("block_size", [1, 4, 48])
def test_block_sizes(block_size: int, device: str) -> None:
    q, kv_cache, batch = inputs([1] * 3, [280, 260, 300], (16, 1, 2), torch.float32, block_size, device)
    share(batch, [((0, 1, 2), 240 // block_size)])
    paged_attention(q, kv_cache, 1, batch, 0.25)
    assert found(batch) == [([0, 1, 2], 7)]
    check(q, kv_cache, replace(batch, shared={}))


def test_parts_of_a_bundle(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges so small that a bundle is cut into more parts than are merged at once."""
    monkeypatch.setattr(decode, "num_multiprocessors", lambda _: 24)
    check(*case([1200, 1150, 1180], [((0, 1, 2), 140)], device, spread=4.0))


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_a_broken_row_harms_no_other(device: str) -> None:
    """A row whose query is NaN shares a product with others: these have the same bits as beside a sound row."""
    q, kv_cache, batch = case([LONG] * 4, [((0, 1, 2, 3), 30)], device)
    outs: list[Any] = []
    for broken in (False, True):
        q[1] = torch.nan if broken else 1.0
        outs.append(paged_attention(q, kv_cache, 1, replace(batch, shared={}), 0.25))
    sound = [row for row in range(len(q)) if row != 1]
    assert outs[1][1].isnan().all() and torch.equal(outs[0][sound], outs[1][sound])
    q[1] = 1.0
    compare(outs[0], q, kv_cache, batch)
