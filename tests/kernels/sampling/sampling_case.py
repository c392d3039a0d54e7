"""Cases of sampling for tests on either device: logits and rows that kernel and twin must treat alike, to the token.

All values are drawn on the CPU, so that a case holds the same ones on a GPU.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wavecore.kernels.examples import sampling_rows
from wavecore.kernels.reference import sampling
from wavecore.kernels.sampling import sample as kernels
from wavecore.kernels.sampling.cutoff import CAPACITY, find_cutoff
from wavecore.kernels.sampling.rows import NO_LIMIT, SamplingRows
from wavecore.kernels.sampling.values import values_of

Case = tuple[Tensor, SamplingRows]
I32 = torch.int32
INF = math.inf


def ints(values: object, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def floats(values: object, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


def drawn(operations: Any, logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Tokens and faults, int32 [R], by `draw` and `finish` of a module."""
    rows.tokens.fill_(77)
    rows.faults.fill_(77)
    operations.finish(operations.draw(logits, rows)[None], rows)
    return rows.tokens, rows.faults


def same(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Both draw alike, and leave the same logits, tokens and counts behind; `adjust` agrees, too."""
    ours, theirs = (module.adjust(logits.clone(), rows) for module in (kernels, sampling))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)
    twin_logits, twin_rows = logits.clone(), copy.deepcopy(rows)
    want, got = drawn(sampling, twin_logits, twin_rows), drawn(kernels, logits, rows)
    assert torch.equal(got[1], want[1])
    good = want[1] == 0  # the token of a faulty row means nothing
    assert torch.equal(got[0][good], want[0][good])
    assert torch.equal(logits.nan_to_num(nan=7.0), twin_logits.nan_to_num(nan=7.0))
    assert torch.equal(rows.token_ids[good], twin_rows.token_ids[good])
    assert torch.equal(rows.counts, twin_rows.counts)
    return got[0]


def slots_out_of_order(device: str, dtype: torch.dtype) -> Case:
    """All rows have the same logits; with the parameters of another slot each would draw another token."""
    n, vocab = 4, 3000
    rows = sampling_rows(
        n,
        vocab,
        device,
        slots=ints([2, 0, 3, 1], device),
        positions=ints([3, 5, 4, 2], device),
        temperature=floats([1.0, 0.0, 1.3, 0.7], device),
        choice=ints([0, 1, 2, 3], device),
        seed=torch.tensor([5, 5, 6, 5 + (1 << 32)], device=device),
        bias_range=ints([[0, 1], [1, 2], [2, 3], [0, 0]], device),
        bias_ids=ints([10, 20, 30], device),
        bias_values=floats([0.1, 40.0, 0.3], device),
        bias_until=ints([NO_LIMIT] * 3, device),
    )
    return torch.randn(1, vocab).repeat(n, 1).to(device, dtype), rows


def equal_logits(device: str, dtype: torch.dtype) -> Case:
    """Of the largest, some lie in one program's part of the vocabulary and some in another's."""
    logits = torch.zeros(2, 5000)
    logits[0, [700, 701, 3000, 4999]] = 1.0
    return logits.to(device, dtype), sampling_rows(2, 5000, device)


def hundreds_of_edits(device: str, dtype: torch.dtype) -> Case:
    """More than a program makes at once. Of the biases some have ended, and some end with the token to draw."""
    n, vocab, each = 2, 3000, 600
    values = torch.rand(n, each) * 4 - 2
    values[:, 300::7] = -INF
    until = torch.where(torch.rand(n, each) < 0.5, NO_LIMIT, 4)  # rows are at position 4
    until[:, ::3] = 5
    rows = sampling_rows(
        n,
        vocab,
        device,
        bias_range=ints([[0, each], [each, 2 * each]], device),
        bias_ids=torch.cat([torch.randperm(vocab)[:each] for _ in range(n)]).to(device, I32),
        bias_values=values.flatten().to(device),
        bias_until=until.flatten().to(device, I32),
    )
    return torch.randn(n, vocab).to(device, dtype), rows


def a_word_begun_by_the_first_token(device: str, dtype: torch.dtype) -> Case:
    """All tokens so far are the beginning of a bad word, whose last token has the largest logit."""
    rows = sampling_rows(
        1,
        50,
        device,
        positions=ints([2], device),
        token_ids=ints([[1, 2, 0, 0]], device),
        word_range=ints([[0, 1]], device),
        word_start=ints([0, 3], device),
        word_tokens=ints([1, 2, 7], device),
    )
    logits = torch.zeros(1, 50)
    logits[0, 7] = 5.0
    return logits.to(device, dtype), rows


def a_token_behind_the_table(device: str, dtype: torch.dtype) -> Case:
    """Written nevertheless, it would be the first token of the next slot, which holds none like it."""
    rows = sampling_rows(2, 100, device, positions=ints([8, 7], device))
    rows.token_ids.fill_(1000)
    return torch.randn(2, 100).to(device, dtype), rows


def biases_far_above_the_logits(device: str, dtype: torch.dtype) -> Case:
    """Of two tokens with the same large bias the second has the larger logit; added in 16 bits they would be equal."""
    n, vocab = 2, 40
    rows = sampling_rows(
        n,
        vocab,
        device,
        temperature=floats([0.0, 1e-3], device),
        bias_range=ints([[0, 2]] * n, device),
        bias_ids=ints([3, 9], device),
        bias_values=floats([3000.0, 3000.0], device),
        bias_until=ints([NO_LIMIT] * 2, device),
    )
    logits = torch.zeros(n, vocab)
    logits[:, 3], logits[:, 9] = 0.5, 0.625
    return logits.to(device, dtype), rows


def a_nucleus_of_equal_logits(device: str, dtype: torch.dtype) -> Case:
    """More of them than candidates have room for: as the largest, and as those at the border of the nucleus."""
    n, vocab = 2, CAPACITY + 300
    rows = sampling_rows(n, vocab, device, temperature=floats([0.5] * n, device), top_p=floats([0.5] * n, device))
    logits = torch.zeros(n, vocab)
    logits[1, :50] = 0.5
    return logits.to(device, dtype), rows


EDGES: list[Callable[[str, torch.dtype], Case]] = [
    slots_out_of_order,
    equal_logits,
    hundreds_of_edits,
    a_word_begun_by_the_first_token,
    a_token_behind_the_table,
    biases_far_above_the_logits,
    a_nucleus_of_equal_logits,
]

TRUNCATIONS = [
    (0, 0.3, 0.2),
    (0, 0.6, 0.0),
    (0, 0.95, 0.3),
    (40, 0.5, 0.0),
    (40, 0.9, 0.0),
    (60, 0.7, 0.1),
    (4500, 0.9, 0.0),
]
"""top_k, top_p and min_p."""


def check_cutoff(device: str, spread: float) -> None:
    """The cutoff of each truncation keeps as many tokens as sorting in float64 does. The tokens drawn rarely tell.

    Args:
        spread: standard deviation of the logits: the smaller, the more tokens are kept.
    """
    n, vocab = 2 * len(TRUNCATIONS), 9000  # more than candidates have room for, and than a search reads at once
    logits = torch.randn(n, vocab) * spread
    logits[1::2, ::2] += 4 * spread  # a sample of every second token sees none of the others
    logits[1::2, -1] = logits[1::2].amax(1) + 0.5  # the last token is the first to be kept
    top_k, top_p, min_p = zip(*(options for options in TRUNCATIONS for _ in range(2)), strict=True)
    rows = sampling_rows(
        n,
        vocab,
        device,
        temperature=floats([1.0] * n, device),
        top_k=ints(top_k, device),
        top_p=floats(top_p, device),
        min_p=floats(min_p, device),
    )
    cutoff = find_cutoff(values_of(logits.to(device), rows)).cpu()
    kept = (logits >= cutoff[:, None]).sum(1).tolist()
    for row in range(n):
        want = kept_by_sorting(logits[row], top_k[row], top_p[row], min_p[row])
        # sums of thousands of masses are rounded
        assert abs(kept[row] - want) <= (vocab // 1000 if want > 500 else 0), (row, kept[row], want)


def kept_by_sorting(x: Tensor, top_k: int, top_p: float, min_p: float) -> int:
    best = x.double().sort(descending=True).values
    if min_p:
        best = best[best >= best[0] + math.log(min_p)]
    if top_k:
        best = best[:top_k]
    mass = (best - best[0]).exp()
    return int((mass.cumsum(0) < top_p * mass.sum()).sum()) + 1
