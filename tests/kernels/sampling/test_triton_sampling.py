"""The sampling kernels against their twin: the same tokens, by interpreter or on a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl
from tests.kernels.sampling.sampling_case import EDGES, INF, Case, check_cutoff, floats, ints, same

from wavecore.kernels.examples import sampling_rows
from wavecore.kernels.reference.sampling import _penalise, gumbel_of_bits
from wavecore.kernels.sampling.hash import gumbel, gumbel_bound
from wavecore.kernels.sampling.rows import GOLDEN, MIX_1, MIX_2, NO_LIMIT, SEEN_IN_PROMPT
from wavecore.kernels.sampling.values import row_values, values_of

pytestmark = pytest.mark.usefixtures("guarded")

VOCAB = 5000


@pytest.fixture(params=[torch.float32, torch.float16], ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Of the logits."""
    value: torch.dtype = request.param
    return value


@pytest.mark.parametrize("vocab", [3, 2048, VOCAB])
def test_greedy_and_plain_temperature(device: str, vocab: int, dtype: torch.dtype) -> None:
    temperature = floats([0.0, 0.5, 1.0, 3.0, 1e-6], device)
    same(torch.randn(5, vocab, device=device).to(dtype), sampling_rows(5, vocab, device, temperature=temperature))


@pytest.mark.parametrize(
    "top_k, top_p, min_p",
    [(0, 1.0, 0.3), (1, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.6, 0.0), (40, 0.9, 0.0), (40, 0.9, 0.05), (9999, 0.02, 0.0)],
)
def test_truncation(device: str, top_k: int, top_p: float, min_p: float, dtype: torch.dtype) -> None:
    n = 2
    rows = sampling_rows(
        n,
        VOCAB,
        device,
        temperature=floats([0.8, 1.4], device),
        top_k=ints([top_k] * n, device),
        top_p=floats([top_p] * n, device),
        min_p=floats([min_p] * n, device),
    )
    same((torch.randn(n, VOCAB, device=device) * 3).to(dtype), rows)


def test_truncation_of_equal_and_of_masked_logits(device: str, dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 100, dtype=dtype, device=device)
    logits[1, 3:] = -INF
    logits[2] = -5.0
    logits[2, 50:] = 4.0
    rows = sampling_rows(
        3,
        100,
        device,
        temperature=floats([1.0] * 3, device),
        top_k=ints([5, 60, 10], device),
        top_p=floats([0.5, 0.9, 0.3], device),
    )
    same(logits, rows)


@pytest.mark.parametrize("top_k, top_p", [(0, 0.9), (4500, 0.9), (4500, 1.0)])
def test_a_flat_distribution_is_searched_whole(device: str, top_k: int, top_p: float, dtype: torch.dtype) -> None:
    rows = sampling_rows(
        2,
        VOCAB,
        device,
        temperature=floats([1.0, 1.0], device),
        top_k=ints([top_k, 0], device),
        top_p=floats([top_p, 0.5], device),
        min_p=floats([0.0, 0.8], device),
    )
    same((torch.randn(2, VOCAB, device=device) * 0.2).to(dtype), rows)


def test_edits_penalties_and_allowed_tokens(device: str, dtype: torch.dtype) -> None:
    i32 = torch.int32
    words = (VOCAB + 31) // 32
    rows = sampling_rows(
        5,
        VOCAB,
        device,
        temperature=floats([0.0, 1.0, 0.0, 1.0, 0.0], device),
        token_ids=ints([[1, 2, 3, 4, 0, 0]] * 5, device),
        positions=ints([4, 4, 5, 4, 4], device),
        bias_range=ints([[0, 3], [0, 3], [0, 3], [3, 3], [3, 3]], device),
        bias_ids=ints([9, 9, 2], device),
        bias_values=floats([30.0, -INF, 29.0], device),
        bias_until=ints([NO_LIMIT, 5, NO_LIMIT], device),
        word_range=ints([[0, 0], [0, 1], [0, 3], [0, 3], [2, 3]], device),
        word_start=ints([0, 3, 5, 6], device),
        word_tokens=ints([3, 4, 7, 4, 9, 8], device),
        count_row=ints([0, -1, 1, 2, -1], device),
        counts=torch.randint(0, 3, (3, VOCAB), dtype=i32).to(device)
        + torch.randint(0, 2, (3, VOCAB), dtype=i32).to(device) * SEEN_IN_PROMPT,
        repetition_penalty=floats([1.5, 1.0, 0.7, 1.2, 1.0], device),
        frequency_penalty=floats([0.5, 0.0, -0.25, 0.0, 0.0], device),
        presence_penalty=floats([0.25, 0.0, 1.0, 0.0, 0.0], device),
        allowed_row=ints([-1, -1, -1, -1, 1], device),
        allowed=torch.randint(-(1 << 31), 1 << 31, (2, words)).to(i32).to(device),
    )
    same((torch.randn(5, VOCAB, device=device) * 2).to(dtype), rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_faults_and_rows_that_do_not_sample(device: str, temperature: float, dtype: torch.dtype) -> None:
    logits = torch.randn(6, 3000, device=device).to(dtype)
    logits[1, 2999] = math.nan
    logits[2] = -INF
    logits[3, :-1] = -INF
    logits[4, 2] = INF
    logits[5] = math.nan
    rows = sampling_rows(
        6,
        3000,
        device,
        slots=ints([0, 1, 2, 3, 4, -1], device),
        temperature=floats([temperature] * 6, device),
        top_k=ints([0, 5, 5, 5, 0, 0], device),
    )
    tokens = same(logits, rows)
    assert tokens[3] == 2999 and tokens[5] == -1
    assert bool(((tokens[:5] >= 0) & (tokens[:5] < 3000)).all())


@pytest.mark.parametrize("make", EDGES)
def test_edges(make: Callable[[str, torch.dtype], Case], device: str, dtype: torch.dtype) -> None:
    same(*make(device, dtype))


@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_cutoff(spread: float, device: str) -> None:
    check_cutoff(device, spread)


@triton.jit
def _store_values(v, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    tl.store(out_ptr + row * v.vocab + token, row_values(v, row, tl.load(v.slots + row), token), mask=token < v.vocab)


def test_values_with_penalties(device: str) -> None:
    """Of every token, and not only of the one that is drawn; slots and rows of counts lie in other orders than rows."""
    n, vocab = 4, 300
    counts = torch.randint(0, 3, (n, vocab)) + torch.randint(0, 2, (n, vocab)) * SEEN_IN_PROMPT
    rows = sampling_rows(
        n,
        vocab,
        device,
        slots=ints([2, 0, 3, 1], device),
        temperature=torch.rand(n, device=device) + 0.5,
        count_row=ints([1, 3, -1, 0], device),
        counts=counts.to(device, torch.int32),
        repetition_penalty=torch.rand(n, device=device) + 0.6,
        frequency_penalty=torch.rand(n, device=device) * 2 - 1,
        presence_penalty=torch.rand(n, device=device) * 2 - 1,
    )
    logits = torch.randn(n, vocab, device=device) * 3
    got = torch.empty_like(logits)
    _store_values[(n,)](values_of(logits, rows), got, BLOCK=512)
    slots = rows.slots.long()
    want = _penalise(logits, rows, slots) / rows.temperature[slots, None]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@triton.jit
def _store_noise(token_ptr, key_ptr, out_ptr, bound_ptr, COUNT: tl.constexpr):
    i = tl.arange(0, COUNT)
    key_1, key_2 = tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32)
    tl.store(out_ptr + i, gumbel(tl.load(token_ptr + i), key_1, key_2))
    tl.store(bound_ptr + i, gumbel_bound(tl.load(token_ptr + i), key_1, key_2))


def unmixed(bits: int, key: int) -> int:
    """What MurmurHash3's finaliser turns into `bits` with this key."""
    bits ^= bits >> 16
    bits = bits * pow(MIX_2, -1, 1 << 32) % (1 << 32) ^ key
    bits ^= bits >> 13 ^ bits >> 26
    bits = bits * pow(MIX_1, -1, 1 << 32) % (1 << 32)
    return bits ^ bits >> 16


@pytest.mark.parametrize("keys", [(0, 0), (0x12345678, 0x9ABFFFFF), (0xFFFFFFFF, 0x80000001)])
def test_noise_at_both_ends_and_between(keys: tuple[int, int], device: str) -> None:
    """At the ends lie the uniform numbers that one token in billions meets. The bound is one,
    and near where noise is large."""
    key_1, key_2 = keys
    ends = [0, 1, 2, 300, (1 << 23) - 1, 1 << 23, (1 << 24) + 1, (1 << 31) - 1]
    ends += [int(2 ** (31 * i / 504)) - 1 for i in range(504)]
    bits = [*ends, *((1 << 32) - 1 - distance for distance in ends)]
    mixed = [unmixed(b, key_2) ^ key_1 for b in bits]
    tokens = torch.tensor([t * pow(GOLDEN, -1, 1 << 32) % (1 << 32) for t in mixed], device=device).int()
    got, bound = torch.empty(2, len(bits), device=device)
    _store_noise[(1,)](tokens, torch.tensor(keys, device=device), got, bound, COUNT=len(bits))
    assert torch.isfinite(got).all()
    offset = floats(((key_2 & 0xFFFFFF) + 0.5) * 2.0**-56, device)
    want = gumbel_of_bits(torch.tensor(bits, device=device).int(), offset)
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-6)
    slack = bound - want
    assert float(slack.min()) > -1e-4
    small = torch.tensor([1 << 12 < b < 1 << 22 for b in bits], device=device)
    assert float(slack[small].max()) < 0.061
