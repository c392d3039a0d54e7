"""Ranks that share a vocabulary draw what one rank draws of the same logits, to the bit, whatever rows ask for."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.support.thread_ranks import Board, ThreadRank
from torch import Tensor

from wavecore.kernels import ops
from wavecore.kernels.examples import sampling_rows
from wavecore.kernels.sampling.rows import NO_LIMIT, PART, SEEN_IN_PROMPT, SamplingRows
from wavecore.parallel.collectives import ALONE
from wavecore.parallel.sampler import collectives, sample

# The interpreter computes with numpy, which warns where a GPU gives infinity
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
CASES = [(211, 2), (5000, 2), (2 * PART, 2), (211, 8), (5001, 4), (9, 8)]  # vocabulary and ranks


class Recording(ThreadRank):
    """Notes what it gathers."""

    def __init__(self, board: Board, rank: int) -> None:
        super().__init__(board, rank)
        self.gathered: list[Any] = []

    def all_gather(self, x: Tensor) -> Tensor:
        self.gathered.append(("all_gather", tuple(x.shape), x.dtype))
        return super().all_gather(x)


@pytest.fixture
def kernels() -> Iterator[str]:
    """The device of the kernels: a GPU, or a CPU with an interpreter, which is one for all threads."""
    lock = threading.Lock()

    def one_at_a_time(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with lock:
                return function(*args)

        return call

    used = (ops.adjust, ops.draw, ops.finish)
    for operation in used:
        operation.replace(one_at_a_time(operation.kernel))
    yield "cuda" if torch.cuda.is_available() else "cpu"
    for operation in used:
        operation.replace(None)


def asking(vocab: int, truncates: bool) -> SamplingRows:
    """Eight rows of slots out of order; every option on some of them, and near each end of the vocabulary."""
    n, dice = 8, np.random.default_rng(vocab)

    def ints(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def floats(values: Any) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    counts = dice.integers(0, 3, (2, vocab)) + dice.integers(0, 2, (2, vocab)) * SEEN_IN_PROMPT
    places = [0, 1, vocab // 2, vocab - 2, vocab - 1]
    columns: dict[str, Tensor] = {
        "slots": ints([3, 1, 0, -1, 7, 2, 6, 5]),
        "positions": ints([4, 5, 3, 0, 4, 4, 7, 2]),
        "choice": ints([0, 1, 2, 0, 0, 1, 0, 3]),
        "temperature": floats([0.0, 1.0, 0.7, 1.0, 1.3, 0.0, 1.0, 2.0]),
        "count_row": ints([0, -1, -1, -1, -1, 1, -1, -1]),
        "counts": ints(counts),
        "repetition_penalty": floats([1.3] * n),
        "frequency_penalty": floats([0.25] * n),
        "presence_penalty": floats([0.5] * n),
        "allowed_row": ints([-1, 0, -1, 1, -1, -1, -1, -1]),
        "allowed": ints(dice.integers(-(1 << 31), 1 << 31, (2, -(-vocab // 32)))),
        "bias_range": ints([[0, 0], [0, 0], [0, 5], [0, 0], [0, 0], [5, 10], [0, 0], [0, 10]]),
        "bias_ids": ints(places * 2),
        "bias_values": floats([1.0, -2.0, 3.0, 0.5, 4.0, -np.inf, 2.0, 2.5, -np.inf, 3.0]),
        "bias_until": ints([NO_LIMIT] * 8 + [3, 9]),
        "word_range": ints([[0, 0]] * 6 + [[0, 2], [0, 0]]),
        "word_start": ints([0, 1, 3]),
        "word_tokens": ints([vocab - 1, 5, 1]),
    }
    if truncates:
        columns["top_k"] = ints([0, 9, 0, 0, 40, 0, 3, 0])
        columns["top_p"] = floats([1.0, 1.0, 0.8, 0.5, 0.9, 1.0, 1.0, 1.0])
        columns["min_p"] = floats([0.0, 0.0, 0.0, 0.1, 0.0, 0.0, 0.0, 0.05])
    return replace(sampling_rows(n, vocab, "cpu", **columns), truncates=truncates)


def share(rows: SamplingRows, own: range, size: int) -> SamplingRows:
    """What a rank holds."""
    vocab, bits = rows.counts.shape[1], np.unpackbits(rows.allowed.numpy().view(np.uint8), axis=1, bitorder="little")
    bits = np.pad(bits[:, :vocab], ((0, 0), (0, size * len(own) + 32 - vocab)))[:, own.start : own.stop]
    bits = np.pad(bits, ((0, 0), (0, -len(own) % 32)))
    allowed = torch.from_numpy(np.packbits(bits, axis=1, bitorder="little").view(np.int32))
    counts = F.pad(rows.counts, (0, size * len(own) + 1 - vocab))[:, own.start : own.stop + 1].clone()
    return replace(copy.deepcopy(rows), allowed=allowed, counts=counts[:, : len(own)], first=own.start)


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize(("vocab", "size"), CASES)
def test_the_draws_of_one_rank(vocab: int, size: int, truncates: bool) -> None:
    """Some vocabularies end within a rank, and leave others nothing; at some ranks' ends a part ends, too."""
    check_draws(vocab, size, truncates)


@pytest.mark.parametrize("truncates", [False, True])
def test_the_draws_of_one_rank_by_kernels(kernels: str, truncates: bool) -> None:
    check_draws(5001, 2, truncates, kernels)


@pytest.mark.slow
@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize(("vocab", "size"), CASES)
def test_every_case_by_kernels(vocab: int, size: int, truncates: bool, kernels: str) -> None:
    check_draws(vocab, size, truncates, kernels)


def moved(rows: SamplingRows, device: str) -> SamplingRows:
    values = {field.name: getattr(rows, field.name) for field in fields(rows)}
    return replace(rows, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})


def check_draws(vocab: int, size: int, truncates: bool, device: str = "cpu") -> None:
    dice = torch.Generator().manual_seed(7)
    logits = torch.randn(8, vocab, generator=dice) * 3
    logits[7, 3] = torch.nan
    whole = asking(vocab, truncates)
    own = -(-vocab // size)
    padded = F.pad(logits, (0, size * own - vocab), value=-torch.inf).to(device)
    ranges = [range(rank * own, (rank + 1) * own) for rank in range(size)]
    board, shares = Board(size), [moved(share(whole, ids, size), device) for ids in ranges]
    groups = [Recording(board, rank) for rank in range(size)]

    def work(rank: int) -> None:
        try:
            part = padded[:, ranges[rank].start : ranges[rank].stop].clone()
            sample(part, shares[rank], vocab, groups[rank])
        except BaseException:
            board.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(work, range(size)))
    before, whole = whole.counts.clone(), moved(whole, device)
    sample(logits.to(device), whole, vocab, ALONE)
    assert whole.tokens[3] == -1 and whole.faults.tolist() == [0] * 7 + [1]
    good = whole.faults == 0
    for rank, group in zip(shares, groups, strict=True):
        assert torch.equal(rank.faults, whole.faults)
        assert torch.equal(rank.tokens[good], whole.tokens[good])
        assert torch.equal(rank.tokens, shares[0].tokens) and torch.equal(rank.token_ids, shares[0].token_ids)
        assert group.gathered == collectives(8, own, truncates)
    assert torch.equal(torch.cat([rank.counts for rank in shares], 1)[:, :vocab], whole.counts)
    assert (whole.counts != before.to(device)).sum() == 2
