"""The attention kernels against their twin on small shapes (float32, float16), by interpreter or on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from wavecore.kernels import reference
from wavecore.kernels.attention import paged_attention
from wavecore.kernels.examples import make_batch, make_pages

# the interpreter computes with numpy, which warns where a GPU gives infinity
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

PAGE = 16
ERROR = {torch.float32: 2e-5, torch.float16: 4e-3}


def check(
    device: str,
    query_lens: list[int],
    seq_lens: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    soft_cap: float = 0.0,
    window: int = 0,
    page: int = PAGE,
) -> None:
    dim, kv_heads, group = shape
    batch, num_pages = make_batch(query_lens, seq_lens, page, device, pad_rows=2, pad_tokens=3)
    like = torch.empty(0, dtype=dtype, device=device)
    q = torch.randn(len(batch.token_ids), kv_heads * group, dim, device=device).to(dtype)
    pages = make_pages(num_pages, 2, kv_heads, page, dim, like)
    for row, length in enumerate(seq_lens):  # what lies behind a row must not matter
        if length % page:
            pages[int(batch.block_tables[row, length // page]), :, :, :, length % page :] = math.nan
    got = paged_attention(q, pages, 1, batch, dim**-0.5, soft_cap, window)
    want = reference.paged_attention(q.double(), pages.double(), 1, batch, dim**-0.5, soft_cap, window)
    torch.testing.assert_close(got.double(), want, atol=ERROR[dtype], rtol=ERROR[dtype])
    assert not got[batch.num_tokens :].any()


SHAPES = [(64, 2, 1), (96, 1, 3), (128, 1, 8), (256, 1, 2), (64, 1, 16)]  # head_dim, kv heads, group


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_mixed_batch(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(device, [1, 1, 40, 3], [70, 1, 40, 50], shape, dtype)


@pytest.mark.parametrize("soft_cap, window", [(15.0, 0), (0.0, 20), (10.0, 1)])
def test_options(device: str, soft_cap: float, window: int) -> None:
    check(device, [1, 1, 40, 3], [70, 1, 40, 50], (64, 1, 4), torch.float32, soft_cap, window)


@pytest.mark.parametrize("seq_lens", [[0], [1], [15], [16], [17], [500, 0, 3], [200] * 5])
def test_decode_lengths(device: str, seq_lens: list[int]) -> None:
    check(device, [1] * len(seq_lens), seq_lens, (64, 2, 2), torch.float32)


@pytest.mark.parametrize("page", [1, 4, 48])
def test_page_sizes(device: str, page: int) -> None:
    check(device, [1, 5], [70, 60], (64, 1, 2), torch.float32, page=page)


def test_prefill_of_many_short_rows(device: str) -> None:
    check(device, [2, 3, 17, 2, 33, 4], [2, 30, 17, 64, 33, 5], (64, 1, 3), torch.float32)


def test_layers_share_one_map(device: str) -> None:
    batch, num_pages = make_batch([1, 1], [40, 9], PAGE, device)
    q = torch.randn(2, 4, 64, device=device)
    pages = make_pages(num_pages, 2, 2, PAGE, 64, q)
    for layer in (0, 1, 0):
        got = paged_attention(q, pages, layer, batch, 0.125)
        want = reference.paged_attention(q, pages, layer, batch, 0.125)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert sum(key[0] == "decode_ranges" for key in batch.shared if isinstance(key, tuple)) == 1
