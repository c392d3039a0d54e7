"""The attention kernels against their twin on small shapes (float32, float16), by interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.attention.attention_case import DIMS, GROUPS, Launches, check, check_balance, in_turn, inputs

from wavecore.kernels.attention import decode
from wavecore.kernels.attention.paged import paged_attention
from wavecore.kernels.examples import make_batch, make_kv_cache
from wavecore.kernels.reference import attention

pytestmark = pytest.mark.usefixtures("guarded")

BLOCK_SIZE = 16
DTYPES = [torch.float32, torch.float16]


# The fast tier has groups of every number of rows that a tile is padded to, full and not.
SOME = (1, 2, 3, 4, 6, 8, 11, 16)


@pytest.mark.parametrize("group", [*SOME, *(pytest.param(g, marks=pytest.mark.slow) for g in GROUPS if g not in SOME)])
@pytest.mark.parametrize("dim", DIMS)
def test_grid(device: str, dim: int, group: int) -> None:
    """Every head_dim with every group, one kernel in float32 and the other in float16, in turn.

    So for either kernel every two of head_dim, group and dtype meet, in 4 x 16 of 4 x 16 x 2 cases (tests/gpu has all
    of them). Each case has every block edge, as the length of a decode row or of a whole prompt, chunks that begin at
    the end of a block and at the start of one, and rows of several tiles of keys.
    """
    size, shape = 8, (dim, 2 if group == 3 else 1, group)
    edges, prompts, pasts = [0, 1, size - 1, size, size + 1], [size - 1, size, size + 1], [size - 1, 9 * size]
    decode, prefill = in_turn(dim, group, DTYPES)
    check(*inputs([1] * 6, [*edges, 70], shape, decode, size, device))
    check(*inputs([*prompts, 2, 2], [*prompts, *(2 + past for past in pasts)], shape, prefill, size, device))


@pytest.mark.parametrize("shape", [(2, 2, 1), (8, 1, 2), (16, 1, 32), (80, 1, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_other_heads(device: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(*inputs([1, 1, 20], [33, 1, 40], shape, dtype, BLOCK_SIZE, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap, window", [(15.0, 0), (0.0, 20), (10.0, 1), (0.0, BLOCK_SIZE)])
def test_options(device: str, soft_cap: float, window: int, dtype: torch.dtype) -> None:
    """Scores are spread so widely that a cap bends them."""
    spread = soft_cap / 4 or 1.0
    case = inputs([1, 1, 1, 40, 3], [70, 1, 33, 40, 50], (64, 1, 4), dtype, BLOCK_SIZE, device, spread)
    check(*case, soft_cap, window)


@pytest.mark.parametrize("seq_lens", [[0], [1], [15], [16], [17], [500, 0, 3], [200] * 5])
def test_decode_alone(device: str, seq_lens: list[int]) -> None:
    check(*inputs([1] * len(seq_lens), seq_lens, (64, 2, 2), torch.float32, BLOCK_SIZE, device))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 48])
def test_block_sizes(device: str, block_size: int, dtype: torch.dtype) -> None:
    check(*inputs([1, 5], [70, 60], (64, 1, 2), dtype, block_size, device))


def test_prefill_of_many_short_rows(device: str) -> None:
    query_lens, seq_lens = [2, 3, 17, 2, 33, 4], [2, 30, 17, 64, 33, 5]
    check(*inputs(query_lens, seq_lens, (64, 1, 3), torch.float32, BLOCK_SIZE, device))


@pytest.mark.parametrize("window", [1, 20])
def test_a_window_that_begins_at_any_key(device: str, window: int) -> None:
    """Each place in a tile of keys, twice."""
    check(*inputs([2] * 66, range(2, 68), (16, 1, 1), torch.float32, BLOCK_SIZE, device), 0.0, window)


@pytest.mark.parametrize("length", [544, 1200])
def test_a_row_of_more_parts_than_are_merged_at_once(device: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one part, and by many. Scores are spread so widely that parts of a row weigh very differently."""
    monkeypatch.setattr(decode, "num_multiprocessors", lambda _: 24)  # so many that a part is one tile
    check(*inputs([1, 1], [length, 5], (16, 1, 16), torch.float32, BLOCK_SIZE, device, spread=4.0))


def test_a_long_row_is_split_evenly(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_balance(*inputs([1] * 5, [5, 40, 700, 0, 33], (64, 2, 1), torch.float32, BLOCK_SIZE, device), monkeypatch)


def test_layers_of_a_step_share_one_map(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that makes it runs once a step and window, however many layers there are."""
    launches = Launches(monkeypatch)
    for step, windows in enumerate([(0, 0, 0), (0, 20, 0, 20)]):
        batch, num_blocks = make_batch([1, 1], [40 + step, 9], BLOCK_SIZE, device)
        q = torch.randn(2, 4, 64, device=device)
        kv_cache = make_kv_cache(num_blocks, 4, 2, BLOCK_SIZE, 64, q)
        for layer, window in enumerate(windows):
            got = paged_attention(q, kv_cache, layer, batch, 0.125, window=window)
            want = attention.paged_attention(q, kv_cache, layer, batch, 0.125, window=window)
            torch.testing.assert_close(got, want, atol=2e-5, rtol=2e-5)
        assert launches.count == 1 + 2 * step
