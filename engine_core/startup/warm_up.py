"""Runs every kind of step before the first request comes, so that no request waits for what happens only once.

A Triton kernel is compiled at its first launch. Every kernel is loaded at its first launch, torch's own and those of
matrix products as well, which depend on the shape; and loading waits until the device has nothing to do. And the
largest steps show how much memory steps need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS, SamplingParams
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.execution.step_shape import MAX_BUCKET, Buckets
from wavecore.engine_core.plan import LOGPROB_CHUNK, NewRequest, StepPlan, int_table, report_values, room_for_many

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

    def prefill(self, tokens: int) -> list[Row]:
        """(start, query length) of as few prompts as hold so many tokens."""
        whole, rest = divmod(tokens, self.length)
        lengths = [self.length] * whole + [rest] * (rest > 0)
        return [(0, length) for length in sorted(lengths[: self.rows])]  # a row of one token goes first

    def decode(self, rows: int) -> list[Row]:
        return [(min(self.length, LONGEST) - 1, 1)] * rows

    def mixed(self) -> list[Row]:
        """All rows, as few as can be prompts, and with them all tokens."""
        prompts = min(-(-(self.tokens - self.rows) // max(self.length - 1, 1)), self.rows)
        decode = self.decode(self.rows - prompts)
        return decode + self.prefill(min(self.tokens - len(decode), prompts * self.length))


def warm_up(runner: ModelRunner, config: EngineConfig, every_size: bool = True) -> None:
    """Run the largest steps with every option, steps with rare kernels, one of every size; all positions on block 1.

    Needs a KV cache of two blocks or more, whose contents it spoils. Leaves no request's state behind.

    Args:
        every_size: False where kernels are only compiled, which no size but 1 decides.

    Raises:
        OutOfMemory: the largest step does not fit.
    """
    sizes = Sizes(config.max_num_batched_tokens, config.max_num_seqs, runner.info.max_model_len)
    everything = _everything(runner)
    runner.state.block_table.fill_(1)
    plans = chain(
        _all_options(sizes, everything, runner.info.hidden_size),  # first, as they need most memory
        _rare_kernels(sizes, everything, runner),
        _few_options(sizes),
        _every_size(sizes, runner.buckets) if every_size else (),
    )
    try:
        for plan in plans:
            runner.start(plan).wait()
    finally:
        runner.state.block_table.zero_()


def _all_options(sizes: Sizes, everything: SamplingParams, hidden_size: int) -> Iterator[StepPlan]:
    """Prefill, decode and mixed steps of all that a plan may hold, with all that a request may ask for."""
    prefill, decode, mixed = sizes.prefill(sizes.tokens), sizes.decode(sizes.rows), sizes.mixed()
    embeds = np.zeros((min(sizes.length, sizes.tokens), hidden_size), np.float32)
    for more in ({"prompt_embeds": embeds}, {"pooling": "mean"}, {"pooling": "last"}):
        plan = _beginning(prefill, everything, samples="pooling" not in more, **more)
        yield replace(plan, copies=int_table([(0, 1)], 2))
    for rows in (mixed, prefill, decode):
        yield _beginning(rows, everything)


def _rare_kernels(sizes: Sizes, everything: SamplingParams, runner: ModelRunner) -> Iterator[StepPlan]:
    """Small steps for kernels that no large one launches: torch has several of an operation, and takes one by size."""
    # Log-probabilities: how topk selects depends on the positions, if the vocabulary is small (ATen's TensorTopK.cu: up
    # to 20, 40, more), how it sorts on the alternatives (Sort.cu: up to 32, more, and so on to a sort of all), and one
    # position is a case of its own for most operations. A prompt with a token more than its row reports as many
    # positions as the row is long, if as many of its alternatives fit into a step.
    room, vocab = room_for_many(runner.info), runner.info.vocab_size
    many = [min(MAX_LOGPROBS << i, vocab) for i in range(1, 1 + (vocab // MAX_LOGPROBS).bit_length()) if room]
    for count in (min(2, everything.logprobs or 0), everything.logprobs, *many):
        params = replace(everything, logprobs=count, prompt_logprobs=count)
        yield _beginning(sizes.decode(1), params)
        for positions in (20, 40, LOGPROB_CHUNK):
            length = min(positions + 1, sizes.length)
            fit = room // report_values(count) if count in many else positions
            row = 0, min(positions, sizes.tokens, length, fit)
            yield _plan([row], [_new_request(0, length, params)], samples=False)
    # A request that comes back has its output counted: up to 16 tokens, and more (Indexing.cu's index_add_).
    for length in (min(2, sizes.length), min(18, sizes.length)):
        yield _plan([(0, 1)], [_new_request(0, length, everything, output=length - 1)])
    # A prompt pooled in two steps: the second one adds what the first has kept.
    if sizes.length > 1:
        yield _plan([(0, 1)], [_new_request(0, 2, everything, pooling="mean")], samples=False)
        yield _plan([(1, 1)], samples=False)
    # A sequence gets all its blocks at once; no other step here changes the block table.
    plan = _beginning([(0, 1)], everything)
    yield replace(plan, table=int_table([(0, i, 1) for i in range(runner.state.block_table.shape[1])], 3))


def _few_options(sizes: Sizes) -> Iterator[StepPlan]:
    """Steps of all that a plan may hold with ever fewer options; the last ones leave none behind."""
    prefill, decode, mixed = sizes.prefill(sizes.tokens), sizes.decode(sizes.rows), sizes.mixed()
    for params in (
        SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0),
        SamplingParams(temperature=1.0, logit_bias={0: 1.0}, seed=0),
        SamplingParams(temperature=1.0, seed=0),
        SamplingParams(temperature=0.0, seed=0),
    ):
        for rows in (mixed, prefill, decode):
            yield _beginning(rows, params)
    yield _plan(prefill, samples=False)


def _every_size(sizes: Sizes, buckets: Buckets | None) -> Iterator[StepPlan]:
    """A decode step of each padded number of rows, a prefill step of each padded number of tokens, and some above."""
    buckets = buckets or Buckets(sizes.tokens, sizes.rows)
    for rows in buckets.rows:
        yield _plan(sizes.decode(rows))
    for tokens in (*buckets.tokens, *_unpadded(sizes.tokens)):
        yield _plan(sizes.prefill(tokens))


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


def _new_request(slot: int, length: int, params: SamplingParams, *, output: int = 0, **more: Any) -> NewRequest:
    """A request of so many tokens; the last ones are output, if it comes back after a preemption."""
    if "prompt_embeds" in more:
        more["prompt_embeds"] = more["prompt_embeds"][:length]
    return NewRequest(slot, np.zeros(length, np.int32), length - output, params, **more)


def _beginning(rows: list[Row], params: SamplingParams, *, samples: bool = True, **more: Any) -> StepPlan:
    """Every row begins a request as long as the row; the tokens before the row's start do not matter."""
    new_requests = [_new_request(slot, length, params, **more) for slot, (_, length) in enumerate(rows)]
    return _plan(rows, new_requests, samples=samples)


def _plan(rows: list[Row], new_requests: Sequence[NewRequest] = (), *, samples: bool = True) -> StepPlan:
    starts, lengths = np.array(rows, np.int32).T.copy()
    return StepPlan(
        step_id=0,
        slots=np.arange(len(rows)),
        starts=starts,
        query_lens=lengths,
        samples=np.full(len(rows), samples),
        new_requests=tuple(new_requests),
    )
