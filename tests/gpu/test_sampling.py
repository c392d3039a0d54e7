"""Sampling on a GPU at real vocabulary sizes: the twin's tokens, the twin's distribution."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from wavecore.kernels import ops, reference
from wavecore.kernels.examples import sampling_rows
from wavecore.kernels.sampling_rows import SamplingRows

VOCAB = 151_936


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(31)


def agreement(logits: Tensor, rows: SamplingRows) -> float:
    """Share of rows where kernel and twin draw the same token; log differs by rounding, so it may fall short of 1."""
    want, want_faults = reference.sample(logits.clone(), copy.deepcopy(rows))
    got, faults = ops.sample(logits, rows)
    assert torch.equal(faults, want_faults) and not faults.any()
    return float((got == want).float().mean())


def columns(n: int, temperature: float, top_k: int, top_p: float, min_p: float) -> dict[str, Tensor]:
    return {
        "temperature": torch.full((n,), temperature, device="cuda"),
        "top_k": torch.full((n,), top_k, dtype=torch.int32, device="cuda"),
        "top_p": torch.full((n,), top_p, device="cuda"),
        "min_p": torch.full((n,), min_p, device="cuda"),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    tokens, faults = ops.sample(logits.expand(n, vocab).contiguous(), rows)
    assert not faults.any()
    seen = torch.bincount(tokens.long(), minlength=vocab).double()
    kept = p > 0
    assert not seen[~kept].any()
    chi2 = float(((seen[kept] - p[kept] * n) ** 2 / (p[kept] * n)).sum())
    freedom = int(kept.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 8
