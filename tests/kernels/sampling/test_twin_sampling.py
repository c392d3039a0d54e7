"""The twin of sampling: distributions against exact probabilities, options one by one, and reproducibility."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from tests.kernels.sampling.sampling_case import INF, biases_far_above_the_logits, drawn, floats, ints
from torch import Tensor

from wavecore.kernels.examples import sampling_rows
from wavecore.kernels.reference import sampling
from wavecore.kernels.reference.sampling import gumbel, gumbel_of_bits
from wavecore.kernels.sampling.rows import NO_LIMIT, SEEN_IN_PROMPT

VOCAB = 24
DRAWS = 50_000
sample = partial(drawn, sampling)


def exact(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Probabilities by a direct reading of the options on float64 [V]: min_p, then top_k, then top_p."""
    p = (logits.double() / temperature).softmax(0)
    p = torch.where(p >= min_p * p.max(), p, 0.0)
    if top_k:
        p = torch.where(p >= p.sort(descending=True).values[min(top_k, len(p)) - 1], p, 0.0)
    p = p / p.sum()
    above = torch.stack([p[p > value].sum() for value in p])  # mass of the tokens more likely than this one
    p = torch.where(above < top_p, p, 0.0)
    return p / p.sum()


TRUNCATIONS = [
    (1.0, 0, 1.0, 0.0),
    (0.6, 0, 1.0, 0.0),
    (1.7, 5, 1.0, 0.0),
    (1.0, 0, 0.7, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.2, 8, 0.8, 0.0),
    (1.0, 6, 1.0, 0.2),
    (1.3, 0, 0.9, 0.05),
    (1.5, 10, 0.85, 0.1),
]


@pytest.mark.parametrize("temperature, top_k, top_p, min_p", TRUNCATIONS)
def test_distribution(temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    """chi-square of 50,000 draws: seeds, choices and positions all vary, as they do between requests."""
    logits = torch.randn(VOCAB) * 2
    want = exact(logits, temperature, top_k, top_p, min_p)
    n = DRAWS
    rows = sampling_rows(
        n,
        VOCAB,
        "cpu",
        temperature=torch.full((n,), temperature),
        top_k=torch.full((n,), top_k, dtype=torch.int32),
        top_p=torch.full((n,), top_p),
        min_p=torch.full((n,), min_p),
        seed=torch.arange(n, dtype=torch.int64) // 50,
        choice=(torch.arange(n, dtype=torch.int32) // 10) % 5,
        positions=torch.arange(n, dtype=torch.int32) % 10,
    )
    tokens, faults = sample(logits.expand(n, VOCAB).clone(), rows)
    assert not faults.any()
    seen = torch.bincount(tokens.long(), minlength=VOCAB).double()
    assert not seen[want == 0].any()
    kept = want > 0
    expected = want[kept] * n
    chi2 = float(((seen[kept] - expected) ** 2 / expected).sum())
    freedom = int(kept.sum()) - 1
    assert chi2 < freedom + 4 * math.sqrt(2 * freedom) + 8  # about 1e-5 by chance; the draws are fixed


def test_ties_at_the_border_are_kept() -> None:
    logits = floats([[3.0, 2.0, 2.0, 2.0, -1.0]]).expand(400, 5).clone()
    rows = sampling_rows(400, 5, "cpu", temperature=torch.ones(400), top_k=torch.full((400,), 2, dtype=torch.int32))
    assert sample(logits, rows)[0].unique().tolist() == [0, 1, 2, 3]


def test_wide_nucleus_needs_the_full_sort() -> None:
    logits = torch.zeros(64, 3000)
    rows = sampling_rows(64, 3000, "cpu", temperature=torch.ones(64), top_p=torch.full((64,), 0.9))
    tokens, faults = sample(logits, rows)
    assert int(tokens.max()) > 1500 and not faults.any()


def test_noise_is_keyed_by_all_four() -> None:
    seed = torch.tensor([1, 1, 1, 2, 1 + (1 << 32), -1, -(1 << 63)])
    choice, position = ints([0, 1, 0, 0, 0, 0, 0]), ints([0, 0, 1, 0, 0, 0, 0])
    noise = gumbel(seed, choice, position, 1000)
    again = gumbel(seed[2:3], choice[2:3], position[2:3], 1000)
    assert torch.equal(noise[2:3], again)
    assert len({tuple(row) for row in noise.tolist()}) == len(seed)
    correlation = torch.corrcoef(noise.double())
    assert float((correlation - torch.eye(len(seed))).abs().max()) < 0.15
    big = gumbel(torch.tensor([7]), ints([0]), ints([3]), 1 << 20)
    assert torch.isfinite(big).all()
    assert abs(float(big.mean()) - 0.5772) < 0.01 and abs(float(big.var()) - math.pi**2 / 6) < 0.02


@pytest.mark.parametrize("tokens, positions", [(1, 0), (2, 0), (64, 0), (1024, 0), (0, 1), (1, 1)])
def test_noise_of_neighbours_is_independent(tokens: int, positions: int) -> None:
    """chi-square over the sixteenths in which the noise of two tokens lies, so far apart in id and position."""
    n, vocab = 64, 8192
    zero = torch.zeros(n, dtype=torch.int32)
    noise = gumbel(zero.long(), zero, torch.arange(n, dtype=torch.int32), vocab)
    part = (torch.exp(-torch.exp(-noise)) * 16).long().clamp(max=15)
    pairs = part[: n - positions, : vocab - tokens] * 16 + part[positions:, tokens:]
    seen = torch.bincount(pairs.flatten(), minlength=256).double()
    mean = pairs.numel() / 256
    assert float(((seen - mean) ** 2 / mean).sum()) < 255 + 4 * math.sqrt(2 * 255)


def test_noise_is_exact_at_both_ends() -> None:
    """Against the formula in float64, for uniform numbers from 2**-57 to 1 - 2**-57."""
    distance = torch.cat((torch.arange(5000), torch.logspace(12, 31, 5000, base=2, dtype=torch.float64).long() - 1))
    bits = torch.cat((distance, -1 - distance)).int()
    for part in (2.0**-25, 0.5, 1 - 2.0**-25):  # of the way to the next distance
        tail = (distance.double() + part) * 2.0**-32
        want = -torch.log(torch.cat((-torch.log1p(-tail), -torch.log(tail))))
        torch.testing.assert_close(
            gumbel_of_bits(bits, torch.tensor(part * 2.0**-32)).double(), want, atol=1e-6, rtol=2e-7
        )


@pytest.mark.parametrize("p", [1e-6, 1e-8, 3e-9, 1e-10, 1e-12])
def test_a_token_of_tiny_probability_is_drawn_as_often_as_it_should_be(p: float) -> None:
    """Counted over all numbers that can decide for it, not by drawing: it wins where its exponential number
    e = exp(-noise) is below p / (1 - p) times that of all the others together, which has probability
    exp(-e (1 - p) / p)."""
    bits = torch.arange(math.ceil(40 * p * 2**32) + 2, dtype=torch.int32)
    parts = min((1 << 22) // len(bits), 1 << 16)
    offset = (torch.arange(parts, dtype=torch.float64)[:, None] + 0.5) / parts * 2.0**-32
    rate = torch.exp(-gumbel_of_bits(bits, offset.float()).double())
    wins = torch.exp(-rate * (1 - p) / p).mean(0).sum() * 2.0**-32
    assert float(wins) == pytest.approx(p, rel=1e-3)


def test_the_offset_of_noise_is_uniform_and_depends_on_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """It belongs to a row; over rows it is spread over its whole span, whatever the bits of a token are."""
    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(sampling, "gumbel_of_bits", lambda bits, offset: seen.append((bits, offset)))
    n = 1 << 16
    zero = torch.zeros(n, dtype=torch.int32)
    gumbel(torch.arange(n), zero, zero + 7, 4)
    ((bits, offset),) = seen
    assert offset.shape == (n, 1) and float(offset.min()) > 0 and float(offset.max()) <= 2.0**-32
    u, v = offset.double() * 2**32, bits.double() * 2.0**-32
    seen_in = torch.histc(u, 64, 0.0, 1.0)
    assert float(((seen_in - n / 64) ** 2 / (n / 64)).sum()) < 63 + 5 * math.sqrt(2 * 63)
    correlation = torch.corrcoef(torch.cat((u, v), 1).T)
    assert float((correlation - torch.eye(5)).abs().max()) < 5 / math.sqrt(n)


def test_greedy_takes_the_first_of_equals_and_ignores_the_rest() -> None:
    logits = floats([[0.0, 5.0, 5.0, 1.0]] * 2)
    rows = sampling_rows(2, 4, "cpu", temperature=floats([0.0, 1e-6]), top_p=floats([0.1, 1.0]), top_k=ints([1, 0]))
    assert sample(logits, rows)[0].tolist() == [1, 1]


def test_row_alone_draws_as_in_a_batch() -> None:
    logits = torch.randn(6, VOCAB)
    columns = {
        "temperature": torch.full((6,), 1.3),
        "seed": torch.arange(6, dtype=torch.int64) * 977,
        "top_p": floats([1.0, 0.9, 1.0, 0.8, 1.0, 0.7]),
    }
    together = sample(logits.clone(), sampling_rows(6, VOCAB, "cpu", **columns))[0]
    for row in range(6):
        rows = sampling_rows(6, VOCAB, "cpu", **columns, slots=ints([row]), positions=ints([4]))
        assert sample(logits[row : row + 1].clone(), rows)[0][0] == together[row]


def test_rows_that_do_not_sample() -> None:
    logits = torch.randn(3, VOCAB)
    logits[1] = math.nan
    rows = sampling_rows(3, VOCAB, "cpu", slots=ints([2, -1, 0]))
    before = rows.token_ids.clone()
    tokens, faults = sample(logits, rows)
    assert tokens.tolist() == [int(logits[0].argmax()), -1, int(logits[2].argmax())] and not faults.any()
    before[2, 4], before[0, 4] = tokens[0], tokens[2]
    assert torch.equal(rows.token_ids, before)


def test_faults_name_rows_with_nan_or_nothing_finite() -> None:
    logits = torch.randn(5, VOCAB)
    logits[1, 7] = math.nan
    logits[2] = -INF
    logits[3, :-1] = -INF
    logits[4, 2] = INF
    for temperature in (0.0, 1.0):
        rows = sampling_rows(5, VOCAB, "cpu", temperature=torch.full((5,), temperature))
        tokens, faults = sample(logits.clone(), rows)
        assert faults.tolist() == [0, 1, 1, 0, 1]
        assert tokens[3] == VOCAB - 1 and ((tokens >= 0) & (tokens < VOCAB)).all()


def test_token_behind_the_table_is_not_written() -> None:
    rows = sampling_rows(1, VOCAB, "cpu", positions=ints([8]))
    before = rows.token_ids.clone()
    sample(torch.randn(1, VOCAB), rows)
    assert torch.equal(rows.token_ids, before)


def test_bias_and_bans_with_a_last_position() -> None:
    logits = torch.zeros(3, VOCAB)
    rows = sampling_rows(
        3,
        VOCAB,
        "cpu",
        positions=ints([4, 5, 4]),
        bias_range=ints([[0, 3], [0, 3], [3, 3]]),
        bias_ids=ints([9, 9, 2]),
        bias_values=floats([3.0, -INF, 1.0]),
        bias_until=ints([NO_LIMIT, 5, NO_LIMIT]),
    )
    assert sample(logits, rows)[0].tolist() == [2, 9, 0]  # 9 is banned before position 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_bias_rounds_nothing(dtype: torch.dtype) -> None:
    """Logits of 16 bits hold no sum of a bias: at 100 their steps are 0.5 in bfloat16."""
    assert sample(*biases_far_above_the_logits("cpu", dtype))[0].tolist() == [9, 9]
    n = 1 << 14
    rows = sampling_rows(
        n,
        VOCAB,
        "cpu",
        temperature=torch.ones(n),
        seed=torch.arange(n, dtype=torch.int64),
        bias_range=ints([[0, 2]] * n),
        bias_ids=ints([3, 9]),
        bias_values=floats([100.0, 100.0]),
        bias_until=ints([NO_LIMIT] * 2),
    )
    logits = torch.zeros(n, VOCAB, dtype=dtype)
    logits[:, 9] = 0.25
    share = float((sample(logits, rows)[0] == 9).double().mean())
    p = 1 / (1 + math.exp(-0.25))
    assert abs(share - p) < 4 * math.sqrt(p * (1 - p) / n)


def test_bad_words() -> None:
    token_ids = ints([[1, 2, 3, 4, 0, 0]] * 4)
    logits = torch.zeros(4, VOCAB)
    logits[:, 7] = 2.0
    logits[:, 8] = 1.0
    rows = sampling_rows(
        4,
        VOCAB,
        "cpu",
        token_ids=token_ids,
        word_range=ints([[0, 1], [1, 2], [2, 3], [0, 3]]),
        word_start=ints([0, 3, 5, 6]),
        word_tokens=ints([3, 4, 7, 9, 7, 8]),  # "3 4 7" has just begun, "9 7" has not, "8" always counts
    )
    assert sample(logits, rows)[0].tolist() == [8, 7, 7, 0]
    assert logits[2, 8] == -INF


def test_allowed_tokens() -> None:
    vocab = 70
    logits = torch.arange(vocab, dtype=torch.float32).repeat(2, 1)
    mask = ints([[1 << 3, -(1 << 31), 1 << 2]])  # tokens 3, 63 and 66
    rows = sampling_rows(2, vocab, "cpu", allowed_row=ints([0, -1]), allowed=mask)
    assert sample(logits, rows)[0].tolist() == [66, 69]
    hot = sampling_rows(2, vocab, "cpu", allowed_row=ints([0, 0]), allowed=mask, temperature=floats([100.0, 100.0]))
    assert set(sample(logits, hot)[0].tolist()) <= {3, 63, 66}


def test_penalties() -> None:
    logits = floats([[2.0, 2.0, 2.0, -1.0, 0.0]])
    counts = ints([[0, 1, 3, 0, 0]])
    counts[0, 0] += SEEN_IN_PROMPT
    counts[0, 3] += SEEN_IN_PROMPT
    rows = sampling_rows(
        1,
        5,
        "cpu",
        count_row=ints([0]),
        counts=counts,
        repetition_penalty=floats([2.0]),
        frequency_penalty=floats([0.5]),
        presence_penalty=floats([0.25]),
        bias_range=ints([[0, 1]]),
        bias_ids=ints([4]),
        bias_values=floats([0.9]),
        bias_until=ints([NO_LIMIT]),
    )
    # 2/2 = 1; 2/2 - .5 - .25; 2/2 - 1.5 - .25; -1 * 2; 0.9
    assert sample(logits, rows)[0].tolist() == [0]
    assert counts.tolist() == [[SEEN_IN_PROMPT + 1, 1, 3, SEEN_IN_PROMPT, 0]]
    assert sample(logits - floats([[0, 0, 0, 0, 0.9]]), rows)[0].tolist() == [4]  # now 0 has 1 - .75
