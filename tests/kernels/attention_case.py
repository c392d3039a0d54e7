"""A case of attention for tests on either device: keys where rows have them, NaN everywhere else, the twin's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from wavecore.kernels import reference
from wavecore.kernels.attention import paged_attention
from wavecore.kernels.batch import Batch
from wavecore.kernels.examples import make_batch, make_pages

ERROR = {torch.float32: 3e-5, torch.float16: 1.5 * 2**-10, torch.bfloat16: 1.5 * 2**-7}
"""Largest error of a token's output, relative to its norm. In 16 bits the output and the weights of the sum are each
rounded by at most half of eps, so that 1.5 eps leaves room for the rest; float32 sums up to 32,768 keys."""
LAYERS = 2
DIMS = (64, 96, 128, 256)


def pairs(groups: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[tuple[int, int, torch.dtype]]:
    """(head_dim, group, dtype) with every pair of two of them."""
    return [(dim, group, dtypes[(i + j) % len(dtypes)]) for i, dim in enumerate(DIMS) for j, group in enumerate(groups)]


def inputs(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    page: int,
    device: str,
) -> tuple[Tensor, Tensor, Batch]:
    """q, pages and the batch, with padding; `shape` is head_dim, KV heads, group."""
    dim, kv_heads, group = shape
    batch, num_pages = make_batch(query_lens, seq_lens, page, device, pad_rows=2, pad_tokens=3)
    q = torch.randn(len(batch.token_ids), kv_heads * group, dim, device=device).to(dtype)
    return q, make_pages(num_pages, LAYERS, kv_heads, page, dim, q), batch


def check(q: Tensor, pages: Tensor, batch: Batch, soft_cap: float = 0.0, window: int = 0, layer: int = 1) -> None:
    """The kernel agrees with the twin token by token, whatever lies where no row has keys."""
    got = paged_attention(q, poisoned(pages, layer, batch), layer, batch, q.shape[2] ** -0.5, soft_cap, window)
    compare(got, q, pages, batch, soft_cap, window, layer)


def compare(
    got: Tensor, q: Tensor, pages: Tensor, batch: Batch, soft_cap: float = 0.0, window: int = 0, layer: int = 1
) -> None:
    """`got` is the attention of q; the twin computes it in float64, on the pages in use."""
    used, tables = batch.block_tables.unique(return_inverse=True)
    compact = replace(batch, block_tables=tables.view_as(batch.block_tables).int(), shared={})
    exact = pages[used.long(), layer : layer + 1].double()
    want = reference.paged_attention(q.double(), exact, 0, compact, q.shape[2] ** -0.5, soft_cap, window)
    assert got.dtype == q.dtype
    norm = want.norm(dim=1)
    error = (got.double() - want).norm(dim=1) / norm.where(norm > 0, 1.0)
    assert float(error.max()) < ERROR[q.dtype], error
    assert not got[norm == 0].any()  # padding, and rows of length 0
    assert int((norm == 0).sum()) >= len(q) - batch.num_tokens


def poisoned(pages: Tensor, layer: int, batch: Batch) -> Tensor:
    """A copy with NaN in other layers, behind the ends of rows, in pages of no row, and in the null page."""
    page = pages.shape[4]
    key = torch.arange(batch.block_tables.shape[1] * page, device=pages.device)
    real = key < batch.seq_lens[:, None]
    places = (batch.block_tables.long() * page).repeat_interleave(page, 1) + key % page
    kept = torch.zeros(len(pages) * page, dtype=torch.bool, device=pages.device)
    kept[places[real]] = True
    kept = kept.view(len(pages), 1, 1, page, 1)
    ill = torch.full_like(pages, torch.nan)
    ill[:, layer] = torch.where(kept, pages[:, layer], torch.nan)
    return ill
