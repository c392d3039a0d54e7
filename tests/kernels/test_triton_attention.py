"""The attention kernels against their twin on small shapes (float32, float16), by interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.attention_case import check, inputs, pairs

from wavecore.kernels import reference
from wavecore.kernels.attention import paged_attention
from wavecore.kernels.examples import make_batch, make_pages

# the interpreter computes with numpy, which warns where a GPU gives infinity
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

PAGE = 16


@pytest.mark.parametrize("dim, group, dtype", pairs((1, 2, 3, 4, 5, 7, 8, 16), [torch.float32, torch.float16]))
def test_grid(device: str, dim: int, group: int, dtype: torch.dtype) -> None:
    """Page edges as decode rows, as whole prompts, and as the past of a chunk; and what needs a second tile of keys."""
    page = 8
    edges = [0, 1, page - 1, page, page + 1]
    prompts, pasts = [page - 1, page, page + 1], [page - 1, page, 65]
    query_lens = [1] * 6 + prompts + [2] * len(pasts)
    seq_lens = [*edges, 70, *prompts, *(2 + past for past in pasts)]
    check(*inputs(query_lens, seq_lens, (dim, 2 if group == 3 else 1, group), dtype, page, device))


@pytest.mark.parametrize("shape", [(2, 2, 1), (8, 1, 2), (16, 1, 32), (80, 1, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_heads(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(*inputs([1, 1, 20], [33, 1, 40], shape, dtype, PAGE, device))


@pytest.mark.parametrize("soft_cap, window", [(15.0, 0), (0.0, 20), (10.0, 1), (0.0, PAGE)])
def test_options(device: str, soft_cap: float, window: int) -> None:
    case = inputs([1, 1, 1, 40, 3], [70, 1, 33, 40, 50], (64, 1, 4), torch.float32, PAGE, device)
    check(*case, soft_cap, window)


@pytest.mark.parametrize("seq_lens", [[0], [1], [15], [16], [17], [500, 0, 3], [200] * 5])
def test_decode_alone(device: str, seq_lens: list[int]) -> None:
    check(*inputs([1] * len(seq_lens), seq_lens, (64, 2, 2), torch.float32, PAGE, device))


@pytest.mark.parametrize("page", [1, 4, 48])
def test_page_sizes(device: str, page: int) -> None:
    check(*inputs([1, 5], [70, 60], (64, 1, 2), torch.float32, page, device))


def test_prefill_of_many_short_rows(device: str) -> None:
    query_lens, seq_lens = [2, 3, 17, 2, 33, 4], [2, 30, 17, 64, 33, 5]
    check(*inputs(query_lens, seq_lens, (64, 1, 3), torch.float32, PAGE, device))


def test_layers_share_one_map(device: str) -> None:
    batch, num_pages = make_batch([1, 1], [40, 9], PAGE, device)
    q = torch.randn(2, 4, 64, device=device)
    pages = make_pages(num_pages, 2, 2, PAGE, 64, q)
    for layer in (0, 1, 0):
        got = paged_attention(q, pages, layer, batch, 0.125)
        want = reference.paged_attention(q, pages, layer, batch, 0.125)
        torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
    assert sum(key[0] == "decode_ranges" for key in batch.shared if isinstance(key, tuple)) == 1
