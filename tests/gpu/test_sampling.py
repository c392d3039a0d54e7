"""Sampling on a GPU at real vocabulary sizes: the twin's tokens, the twin's distribution."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.kernels.sampling.sampling_case import EDGES, Case, check_cutoff, drawn, same
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.examples import sampling_rows
from wavecore.kernels.reference import sampling
from wavecore.kernels.sampling.rows import NO_LIMIT, SEEN_IN_PROMPT, SamplingRows

VOCAB = 151_936
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def agreement(logits: Tensor, rows: SamplingRows) -> float:
    """Share of rows where kernel and twin draw the same token; log differs by rounding, so it may fall short of 1."""
    want, want_faults = drawn(sampling, logits.clone(), copy.deepcopy(rows))
    got, faults = drawn(ops, logits, rows)
    assert torch.equal(faults, want_faults) and not faults.any()
    return float((got == want).float().mean())


def columns(n: int, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Tensor]:
    return {
        "temperature": torch.full((n,), temperature, device="cuda"),
        "top_k": torch.full((n,), top_k, dtype=torch.int32, device="cuda"),
        "top_p": torch.full((n,), top_p, device="cuda"),
        "min_p": torch.full((n,), min_p, device="cuda"),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "temperature, top_k, top_p, min_p",
    [
        (0.0, 0, 1.0, 0.0),
        (1.0, 0, 1.0, 0.0),
        (0.7, 50, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.05),
        (0.8, 50, 0.95, 0.0),
        (1.3, 1000, 0.5, 0.01),
    ],
)
def test_same_tokens_as_the_twin(
    temperature: float, top_k: int, top_p: float, min_p: float, dtype: torch.dtype
) -> None:
    n = 300
    logits = (torch.randn(n, VOCAB, device="cuda") * 3).to(dtype)
    share = agreement(logits, sampling_rows(n, VOCAB, "cuda", **columns(n, temperature, top_k, top_p, min_p)))
    assert share == 1.0 if temperature == 0.0 else share > 0.98, share


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", EDGES)
def test_edges(make: Callable[[str, torch.dtype], Case], dtype: torch.dtype) -> None:
    """Token by token: the largest values lie far enough apart."""
    same(*make("cuda", dtype))


@pytest.mark.parametrize("spread", [0.2, 3.0])
def test_cutoff(spread: float) -> None:
    check_cutoff("cuda", spread)


def ints(shape: tuple[int, ...], low: int, high: int) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.int32, device="cuda")


def penalties(n: int) -> dict[str, Tensor]:
    """Half of the vocabulary has come, in the prompt or up to three times in the output."""
    counts = (ints((n, VOCAB), -3, 4).clamp(min=0)) | (ints((n, VOCAB), -2, 2).clamp(min=0) * SEEN_IN_PROMPT)
    return {
        "count_row": torch.arange(n, dtype=torch.int32, device="cuda"),
        "counts": counts,
        "repetition_penalty": torch.rand(n, device="cuda") + 0.6,
        "frequency_penalty": torch.rand(n, device="cuda") * 4 - 2,
        "presence_penalty": torch.rand(n, device="cuda") * 4 - 2,
    }


def allowed(n: int) -> dict[str, Tensor]:
    """From one token in sixteen down to two tokens."""
    words = ints((n, VOCAB // 32), -(1 << 31), (1 << 31) - 1)
    for _ in range(3):
        words &= ints((n, VOCAB // 32), -(1 << 31), (1 << 31) - 1)
    words[: n // 2] = 0
    words[: n // 2, 7], words[: n // 2, -1] = 1 << 30, 1
    return {"allowed_row": torch.arange(n, dtype=torch.int32, device="cuda"), "allowed": words}


def edits(n: int) -> dict[str, Tensor]:
    """200 biases, 50 bans and two bad words a row: one that has just begun, one that has not."""
    each = 250
    ids = torch.stack([torch.randperm(VOCAB, device="cuda")[:each] for _ in range(n)]).int().flatten()
    values = torch.rand(n, each, device="cuda") * 20 - 10
    values[:, 200:] = -math.inf
    begin = torch.arange(n, dtype=torch.int32, device="cuda")
    token_ids, words = ints((n, 8), 5, 9), ints((n, 2, 3), 5, 9)
    token_ids[:, 2:4] = words[:, 0, :2]
    words[:, 1, 0] = 9
    return {
        "token_ids": token_ids,
        "bias_range": torch.stack((begin, begin + 1), 1) * each,
        "bias_ids": ids,
        "bias_values": values.flatten(),
        "bias_until": torch.full((n * each,), NO_LIMIT, dtype=torch.int32, device="cuda"),
        "word_range": torch.stack((begin, begin + 1), 1) * 2,
        "word_start": torch.arange(2 * n + 1, dtype=torch.int32, device="cuda") * 3,
        "word_tokens": words.flatten(),
    }


OPTIONS: dict[str, Callable[[int], dict[str, Any]]] = {"penalties": penalties, "allowed": allowed, "edits": edits}
TRUNCATIONS = [(1, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (1, 0.9, 0.2), (1000, 0.5, 0.01)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k, top_p, min_p", TRUNCATIONS)
@pytest.mark.parametrize("names", [["penalties"], ["allowed"], ["edits"], [*OPTIONS]], ids="+".join)
def test_options_with_truncation(names: list[str], top_k: int, top_p: float, min_p: float, dtype: torch.dtype) -> None:
    """No row may fault: kernels that see a row one after another must see the same values to the last bit."""
    n = 96
    options = {key: value for name in names for key, value in OPTIONS[name](n).items()}
    rows = sampling_rows(n, VOCAB, "cuda", **options, **columns(n, 0.7, top_k, top_p, min_p))
    share = agreement((torch.randn(n, VOCAB, device="cuda") * 3).to(dtype), rows)
    assert share > 0.97, share


@pytest.mark.parametrize("top_k, top_p", [(0, 1.0), (12, 0.9)])
def test_distribution(top_k: int, top_p: float) -> None:
    """chi-square of 50,000 draws over 40 tokens that matter, inside a vocabulary of thousands."""
    n, vocab, live = 50_000, 4096, 40
    logits = torch.full((vocab,), -math.inf, device="cuda")
    places = torch.randperm(vocab)[:live].cuda()
    logits[places] = torch.randn(live, device="cuda") * 1.5
    p = logits.double().softmax(0)
    if top_k:
        p = torch.where(p >= p.sort(descending=True).values[top_k - 1], p, 0.0)
        p /= p.sum()
        order = p.sort(descending=True)
        before = order.values.cumsum(0) - order.values
        p = torch.zeros_like(p).scatter(0, order.indices, torch.where(before < top_p, order.values, 0.0))
        p /= p.sum()
    rows = sampling_rows(n, vocab, "cuda", **columns(n, 1.0, top_k, top_p, 0.0))
    tokens, faults = drawn(ops, logits.expand(n, vocab).contiguous(), rows)
    assert not faults.any()
    seen = torch.bincount(tokens.long(), minlength=vocab).double()
    kept = p > 0
    assert not seen[~kept].any()
    chi2 = float(((seen[kept] - p[kept] * n) ** 2 / (p[kept] * n)).sum())
    freedom = int(kept.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 8


@pytest.mark.parametrize("top_k", [0, 5])
def test_as_many_rows_as_an_engine_can_have(top_k: int) -> None:
    """More than the 65,535 programs that all axes of a grid but the first can hold."""
    n, vocab = 1 << 16, 64
    logits = torch.randn(n, vocab, device="cuda")
    rows = sampling_rows(n, vocab, "cuda", edits=False, **columns(n, 0.7 if top_k else 0.0, top_k, 1.0, 0.0))
    assert agreement(logits, rows) > 0.9999
