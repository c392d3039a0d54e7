"""A case of attention for tests on either device: keys where rows have them, NaN everywhere else, the twin's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from wavecore.kernels.attention import decode, ranges
from wavecore.kernels.attention.paged import paged_attention
from wavecore.kernels.attention.ranges import Ranges, make_ranges
from wavecore.kernels.batch import Batch
from wavecore.kernels.device import num_multiprocessors
from wavecore.kernels.examples import make_batch, make_kv_cache
from wavecore.kernels.reference import attention

ERROR = {torch.float32: 3e-5, torch.float16: 1.5 * 2**-10, torch.bfloat16: 1.5 * 2**-7}
"""Largest error of a token's output, relative to its norm. In 16 bits the output and the weights of the sum are each
rounded by at most half of eps, so that 1.5 eps leaves room for the rest; float32 sums up to 32,768 keys."""
LAYERS = 2
DIMS = (64, 96, 128, 256)
GROUPS = range(1, 17)


def in_turn(dim: int, group: int, dtypes: Sequence[torch.dtype]) -> list[torch.dtype]:
    """The dtypes in an order in which each comes first for a part of all groups with a dim, and dims with a group."""
    first = (DIMS.index(dim) + group) % len(dtypes)
    return [*dtypes[first:], *dtypes[:first]]


def inputs(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    block_size: int,
    device: str,
    spread: float = 1.0,
) -> tuple[Tensor, Tensor, Batch]:
    """q, kv_cache and the batch, with padding; `shape` is head_dim, KV heads, group.

    Args:
        spread: standard deviation of the scores.
    """
    dim, kv_heads, group = shape
    batch, num_blocks = make_batch(query_lens, seq_lens, block_size, device, pad_rows=1, pad_tokens=2)
    q = (torch.randn(len(batch.token_ids), kv_heads * group, dim, device=device) * spread).to(dtype)
    return q, make_kv_cache(num_blocks, LAYERS, kv_heads, block_size, dim, q), batch


def check(q: Tensor, kv_cache: Tensor, batch: Batch, soft_cap: float = 0.0, window: int = 0, layer: int = 1) -> None:
    """The kernel agrees with the twin token by token, whatever lies where no row has keys."""
    got = paged_attention(q, poisoned(kv_cache, layer, batch), layer, batch, q.shape[2] ** -0.5, soft_cap, window)
    compare(got, q, kv_cache, batch, soft_cap, window, layer)


def compare(
    got: Tensor, q: Tensor, kv_cache: Tensor, batch: Batch, soft_cap: float = 0.0, window: int = 0, layer: int = 1
) -> None:
    """`got` is the attention of q; the twin computes it in float64, on the blocks in use."""
    used, tables = batch.block_tables.unique(return_inverse=True)
    compact = replace(batch, block_tables=tables.view_as(batch.block_tables).int(), shared={})
    exact = kv_cache[used.long(), layer : layer + 1].double()
    want = attention.paged_attention(q.double(), exact, 0, compact, q.shape[2] ** -0.5, soft_cap, window)
    assert got.dtype == q.dtype
    norm = want.norm(dim=1)
    error = (got.double() - want).norm(dim=1) / norm.where(norm > 0, 1.0)
    assert float(error.max()) < ERROR[q.dtype], error
    assert not got[norm == 0].any()  # padding, and rows of length 0
    assert int((norm == 0).sum()) >= len(q) - int(batch.query_start[-1])


def poisoned(kv_cache: Tensor, layer: int, batch: Batch) -> Tensor:
    """A copy with NaN in other layers, behind the ends of rows, in blocks of no row, and in the null block."""
    block_size = kv_cache.shape[4]
    key = torch.arange(batch.block_tables.shape[1] * block_size, device=kv_cache.device)
    real = key < batch.seq_lens[:, None]
    places = (batch.block_tables.long() * block_size).repeat_interleave(block_size, 1) + key % block_size
    kept = torch.zeros(len(kv_cache) * block_size, dtype=torch.bool, device=kv_cache.device)
    kept[places[real]] = True
    kept = kept.view(len(kv_cache), 1, 1, block_size, 1)
    ill = torch.full_like(kv_cache, torch.nan)
    ill[:, layer] = torch.where(kept, kv_cache[:, layer], torch.nan)
    return ill


def check_balance(q: Tensor, kv_cache: Tensor, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """All programs that the device runs at once share the keys evenly, so that several of them work on the longest row.

    Programs that held a part of a row are known by the partial results that they left.
    """
    made: list[Ranges] = []

    def noted(*args: Any) -> Ranges:
        found = make_ranges(*args)
        found.weight_log.fill_(torch.nan)
        made.append(found)
        return found

    monkeypatch.setattr(decode, "make_ranges", noted)
    check(q, kv_cache, batch)
    [found] = made
    programs, starts, rows = len(found.first), found.tile_start, len(batch.seq_lens)
    assert programs * kv_cache.shape[3] >= num_multiprocessors(q.device)
    borders = [min(i * int(found.size), int(starts[-1])) for i in range(programs + 1)]
    assert max(b - a for a, b in pairwise(borders)) < int(starts[-1]) / programs + 1
    longest = int(batch.seq_lens.argmax())
    inside = [i for i in range(programs) if borders[i] < starts[longest + 1] and starts[longest] < borders[i + 1]]
    left = found.weight_log.isfinite().all(1)
    parts = int(left[longest]) + int(left[rows : rows + programs][inside].sum())
    assert len(inside) > programs // 4 and parts >= len(inside) - 1  # one may hold only ROW_COST


class Launches:
    """Stands in for the kernel that makes the map, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kernel: Any = ranges._map_ranges
        self.count = 0
        monkeypatch.setattr(ranges, "_map_ranges", self)

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count += 1
        return self.kernel[grid]
