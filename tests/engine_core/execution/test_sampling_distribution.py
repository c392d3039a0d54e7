"""50,000 draws a case against the exact distribution (chi-square), through the columns that the runner fills."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution.sampling_state import COLUMN_SIZE, SamplingState
from wavecore.engine_core.execution.uploads import Uploads
from wavecore.engine_core.plan import NewRequest
from wavecore.parallel.collectives import ALONE as ALONE_RANK
from wavecore.parallel.sampler import sample

VOCAB, DRAWS = 50, 50_000
ALONE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.12},
    "allowed": {"allowed_token_ids": list(range(0, VOCAB, 3))},
    "logit_bias": {"logit_bias": {3: 2.5, 7: -4.0, 11: 1.0}},
    "repetition_penalty": {"repetition_penalty": 1.8},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
}
CASES = [
    # the twin adds bias row by row, which takes seconds for so many rows
    pytest.param(names, marks=pytest.mark.slow if len(names) == 2 and "logit_bias" in names else ())
    for count in range(3)
    for names in itertools.combinations(ALONE, count)
]
PROMPT, OUTPUT = [1, 2, 3, 3], [3, 4, 4, 4, 5]


def exact(logits: np.ndarray[Any, Any], options: dict[str, Any]) -> np.ndarray[Any, Any]:
    """The distribution, in float64 and in the plainest words. Order: bias, allowed, penalties, temperature, min_p,
    top_k, top_p."""
    x = logits.astype(np.float64).copy()
    for token, bias in options.get("logit_bias", {}).items():
        x[token] += bias
    if "allowed_token_ids" in options:
        x[[i for i in range(VOCAB) if i not in options["allowed_token_ids"]]] = -np.inf
    seen = sorted({*PROMPT, *OUTPUT})
    penalty = options.get("repetition_penalty", 1.0)
    x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    for token in set(OUTPUT):
        x[token] -= options.get("presence_penalty", 0.0) + options.get("frequency_penalty", 0.0) * OUTPUT.count(token)
    x /= options.get("temperature", 1.0)
    x[x < x.max() + np.log(options.get("min_p", 0.0) or 1e-300)] = -np.inf
    if "top_k" in options:
        x[x < np.sort(x)[-options["top_k"]]] = -np.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    order = np.argsort(-p)
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= options.get("top_p", 1.0)]] = 0.0
    return p / p.sum()


@pytest.mark.parametrize("names", CASES, ids=lambda names: "+".join(names) or "plain")
def test_draws_follow_the_exact_distribution(names: tuple[str, ...]) -> None:
    total = DRAWS // 5 if "logit_bias" in names else DRAWS  # the twin adds bias row by row
    options = {k: v for name in names for k, v in ALONE[name].items()}
    logits = np.random.default_rng(1).normal(0, 1.5, VOCAB).astype(np.float32)
    ids = torch.tensor([PROMPT + OUTPUT], dtype=torch.int32)
    columns = torch.zeros(COLUMN_SIZE, dtype=torch.int32)
    state = SamplingState(ids, VOCAB, range(VOCAB), (), columns, Uploads(torch.device("cpu")))
    counted = []
    for chunk in range(5):  # a new request a chunk: `sample` counts what it draws, which must not feed back
        new = NewRequest(0, ids[0].numpy(), len(PROMPT), SamplingParams(seed=7, **options))
        truncates, edits = state.begin(new)
        state.uploads.join()
        state.count(new)
        draws = total // 5
        positions = torch.arange(draws, dtype=torch.int32) + 10 + chunk * draws
        slots, tokens, faults = torch.zeros((3, draws), dtype=torch.int32)
        rows = state.rows(truncates, edits, slots=slots, positions=positions, tokens=tokens, faults=faults)
        sample(torch.from_numpy(np.tile(logits, (draws, 1))), rows, VOCAB, ALONE_RANK)
        assert not faults.any()
        counted.append(np.bincount(tokens.numpy(), minlength=VOCAB))
    seen = np.sum(counted, axis=0)
    p = exact(logits, options)
    assert not seen[p == 0].any(), "a token that truncation drops was drawn"
    common = p * total >= 5
    expected = np.append(p[common] * total, p[~common].sum() * total)
    found = np.append(seen[common], seen[~common].sum())
    keep = expected > 0
    statistic = float((((found - expected) ** 2)[keep] / expected[keep]).sum())
    freedom = int(keep.sum()) - 1
    chance = float(torch.special.gammaincc(torch.tensor(max(freedom, 1) / 2.0), torch.tensor(statistic / 2.0)))
    assert chance > 1e-3, f"chi-square {statistic:.1f} with {freedom} degrees of freedom"
