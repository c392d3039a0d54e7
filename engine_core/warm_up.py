"""Runs every kind of step before the first request comes, so that no request waits for what happens only once.

A Triton kernel is compiled at its first launch. A matrix product's kernel is loaded when a shape first needs it, and
loading waits until the device has nothing to do. And the largest steps show how much memory steps need.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from wavecore.engine_core.config import EngineConfig
from wavecore.engine_core.plan import I32, Admission, StepPlan, pairs, table_columns
from wavecore.engine_core.runner import ModelRunner
from wavecore.engine_core.sampling_params import MAX_LOGPROBS, SamplingParams
from wavecore.engine_core.step_shape import MAX_BUCKET, bucket

LONGEST = 4096  # position of decode rows: none needs more memory, the last ones of a long context only take longer
Row = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What bounds the steps.

    Attributes:
        tokens, rows: of a step.
        length: of a sequence.
    """

    tokens: int
    rows: int
    length: int

    @classmethod
    def of(cls, runner: ModelRunner, config: EngineConfig) -> Sizes:
        return cls(config.max_num_batched_tokens, config.max_num_seqs, runner.info.max_model_len)

    def prefill(self, tokens: int) -> list[Row]:
        """(start, query length) of as few prompts as hold so many tokens."""
        whole, rest = divmod(tokens, self.length)
        lengths = [self.length] * whole + [rest] * (rest > 0)
        return [(0, length) for length in lengths[: self.rows]]

    def decode(self, rows: int) -> list[Row]:
        return [(min(self.length, LONGEST) - 1, 1)] * rows

    def mixed(self) -> list[Row]:
        """All rows, as few as can be prompts, and with them all tokens."""
        prompts = min(-(-(self.tokens - self.rows) // max(self.length - 1, 1)), self.rows)
        decode = self.decode(self.rows - prompts)
        return decode + self.prefill(min(self.tokens - len(decode), prompts * self.length))


def warm_up(runner: ModelRunner, config: EngineConfig) -> None:
    """Run the largest steps with every option, then one of every size; all positions lie on block 1.

    Needs a KV cache of two blocks or more, whose contents it spoils. Leaves no request's state behind.

    Raises:
        OutOfMemory: the largest step does not fit.
    """
    sizes = Sizes.of(runner, config)
    runner.state.block_table.fill_(1)
    try:
        for plan in chain(_largest(sizes, runner), _every_size(sizes, runner)):
            runner.start(plan).wait()
    finally:
        runner.state.block_table.zero_()


def full_decode(runner: ModelRunner, config: EngineConfig) -> StepPlan:
    """A decode step of all rows with every option of sampling, on block 0."""
    sizes = Sizes.of(runner, config)
    rows, params = sizes.decode(sizes.rows), replace(_everything(runner), logprobs=None, prompt_logprobs=None)
    return _plan(rows, [_admission(i, row, params) for i, row in enumerate(rows)])


def _largest(sizes: Sizes, runner: ModelRunner) -> Iterator[StepPlan]:
    """Prefill, decode and mixed steps: first with all options, which need most memory, last without any."""
    prefill, decode, mixed = sizes.prefill(sizes.tokens), sizes.decode(sizes.rows), sizes.mixed()
    embeds = np.zeros((min(sizes.length, sizes.tokens), runner.info.hidden_size), np.float32)
    for more in ({"prompt_embeds": embeds}, {"pooling": "mean"}, {"pooling": "last"}):
        admitted = [_admission(i, row, _everything(runner), **more) for i, row in enumerate(prefill)]
        yield _plan(prefill, admitted, samples="pooling" not in more, copies=((1, 1),))
    one = sizes.decode(1)
    yield _plan(one, [_admission(0, one[0], _everything(runner))])
    for params in (
        _everything(runner),
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0),
        SamplingParams(temperature=1.0, seed=0),
        SamplingParams(temperature=0.0, seed=0),
    ):
        for rows in (mixed, prefill, decode):
            admitted = [_admission(i, row, params) for i, row in enumerate(rows)]
            yield _plan(rows, admitted)
    yield _plan(prefill, samples=False)


def _every_size(sizes: Sizes, runner: ModelRunner) -> Iterator[StepPlan]:
    """A decode step of each padded number of rows, a prefill step of each padded number of tokens, and some above."""
    if runner.bucket_limits is None:
        return
    for rows in buckets(sizes.rows):
        yield _plan(sizes.decode(rows))
    for tokens in (*buckets(min(sizes.tokens, MAX_BUCKET)), *_unpadded(sizes.tokens)):
        yield _plan(sizes.prefill(tokens))


def buckets(limit: int) -> list[int]:
    """Every padded size up to `limit`."""
    return sorted({bucket(size, limit) for size in range(1, limit + 1)})


def _unpadded(limit: int) -> Iterator[int]:
    """Four sizes for each doubling above those that are padded."""
    size = MAX_BUCKET
    while size < limit:
        yield from (part * size // 4 for part in range(5, 9) if part * size // 4 <= limit)
        size *= 2


def _everything(runner: ModelRunner) -> SamplingParams:
    """All that a request may ask for at once."""
    vocab = runner.info.vocab_size
    few = min(2, vocab)
    options: dict[str, Any] = {
        "logprobs": min(MAX_LOGPROBS, vocab),
        "prompt_logprobs": min(MAX_LOGPROBS, vocab),
        "logit_bias": {0: 1.0},
        "bad_words_token_ids": [[0, 0]],
        "stop_token_ids": [few - 1],
        "allowed_token_ids": list(range(few)),
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
    }
    return SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, min_tokens=1, seed=0, **options)


def _admission(slot: int, row: Row, params: SamplingParams, **more: Any) -> Admission:
    """A prompt of the row's length; the tokens before the row's start do not matter."""
    _, length = row
    if "prompt_embeds" in more:
        more["prompt_embeds"] = more["prompt_embeds"][:length]
    return Admission(slot, np.zeros(length, np.int32), length, params, **more)


def _plan(
    rows: list[Row], admitted: list[Admission] | None = None, samples: bool = True, copies: tuple[Row, ...] = ()
) -> StepPlan:
    starts, lengths = _columns(rows)
    return StepPlan(
        step_id=0,
        slots=np.arange(len(rows), dtype=np.int32),
        starts=starts,
        query_lens=lengths,
        samples=np.full(len(rows), samples, np.uint8),
        swap_out=pairs(()),
        swap_in=pairs(()),
        copies=pairs(copies),
        admitted=tuple(admitted or ()),
        after=-1,
        **table_columns(()),
    )


def _columns(rows: list[Row]) -> tuple[I32, I32]:
    starts, lengths = np.array(rows, np.int32).T.copy()
    return starts, lengths
