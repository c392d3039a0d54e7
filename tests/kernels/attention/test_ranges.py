"""The map of split-KV attention against the same map made with numpy, also for more rows than one pass handles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from wavecore.kernels.attention.ranges import ROW_COST, make_ranges

TILE = 16


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("rows", [1, 7, 1024, 1025, 2300])
def test_every_range_begins_where_it_should(rows: int, window: int, device: str) -> None:
    draw = np.random.default_rng(rows)
    lengths = draw.integers(0, 200, rows)  # 0 is a padding row
    queries = np.where(draw.random(rows) < 0.1, 3, 1)
    query_start = np.concatenate(([0], queries.cumsum()))
    batch: Any = SimpleNamespace(
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_start=torch.tensor(query_start, dtype=torch.int32, device=device),
    )
    programs = 13
    made = make_ranges(batch, programs, 2, 16, window, TILE, 16, 0)

    tiles = -(-lengths // TILE) - (np.maximum(lengths - window, 0) // TILE if window else 0)
    tiles = np.where((queries == 1) & (lengths > 0), tiles + ROW_COST.value, 0)
    start = np.concatenate(([0], tiles.cumsum()))
    size = max(-(-int(start[-1]) // programs), 1)
    assert made.tile_start.tolist() == start.tolist()
    assert made.size.tolist() == [size]
    begins = range(0, int(start[-1]), size)
    want = [int(np.searchsorted(start, at, side="right")) - 1 for at in begins]
    assert made.first.tolist()[: len(want)] == want
