"""Runs every kind of step, what is plain before the first request comes, so that none waits for what happens only once.

A Triton kernel is compiled at its first launch. Every kernel is loaded at its first launch, torch's own and those of
matrix products as well, which depend on the shape; and loading waits until the device has nothing to do. And the
largest steps show how much memory steps need.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS, SamplingParams
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.execution.step_shape import MAX_BUCKET, Bucket, Buckets
from wavecore.engine_core.plan import LOGPROB_CHUNK, NewRequest, StepPlan, int_table, report_values, room_for_many

LONGEST = 4096  # position of decode rows: none needs more memory, the last ones of a long context only take longer
REPORTED = 2 * LOGPROB_CHUNK  # positions of a prompt with log-probabilities: more only take longer
PLAIN = SamplingParams(temperature=0.0, seed=0)
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


def warm_up(runner: ModelRunner, config: EngineConfig) -> None:
    """Run the largest steps with every option and without, and plain ones of every order of size; all positions on the
    null block. Other sizes and rare kernels come in idle turns, sizes first: what rare ones launch, another process may
    still compile. Of ranks in lockstep, which must not run alone, they come at once.

    Needs a KV cache of two blocks or more. Leaves no request's state behind.

    Raises:
        OutOfMemory: the largest step does not fit.
    """
    sizes = Sizes(config.max_num_batched_tokens, config.max_num_seqs, runner.info.max_model_len)
    everything = _everything(runner)
    largest = _largest(sizes, everything, runner.info.hidden_size)  # first, as they need most memory
    for plan in chain(largest, _many_alternatives(sizes, everything, runner), _orders_of_size(sizes)):
        runner.start(plan).wait()
    runner.unmet.extend(every_size(sizes.tokens, runner.buckets or Buckets(sizes.tokens, sizes.rows)))
    runner.unmet.extend(_rare_kernels(sizes, everything, runner.state.block_table.shape[1]))
    runner.unmet.extend(_few_options(sizes))
    while config.dp_lockstep and runner.unmet:
        runner.meet()


def _largest(sizes: Sizes, everything: SamplingParams, hidden_size: int) -> Iterator[StepPlan]:
    """Prefill, decode and mixed steps of all that a plan may hold; together they ask for all that a request may."""
    prefill, decode, mixed = sizes.prefill(sizes.tokens), sizes.decode(sizes.rows), sizes.mixed()
    embeds = np.zeros((min(sizes.length, sizes.tokens), hidden_size), np.float32)
    copies = int_table([(0, 1)], 2)
    yield replace(_beginning(prefill, PLAIN, samples=False, prompt_embeds=embeds, pooling="mean"), copies=copies)
    yield _beginning(mixed, everything)
    yield _beginning(decode, everything)
    yield _beginning(mixed, PLAIN)


def _rare_kernels(sizes: Sizes, everything: SamplingParams, max_blocks: int) -> Iterator[StepPlan]:
    """Steps for kernels that no largest one launches: torch has several of an operation, and takes one by size."""
    # Log-probabilities: how topk selects depends on the positions, if the vocabulary is small (ATen's TensorTopK.cu: up
    # to 20, 40, more), how it sorts on the alternatives (Sort.cu: up to 32, more, and so on to a sort of all), and one
    # position is a case of its own for most operations. A prompt with a token more than its row reports as many
    # positions as the row is long.
    for count in (min(2, everything.logprobs or 0), everything.logprobs):
        yield from _reports(sizes, replace(everything, logprobs=count, prompt_logprobs=count), sizes.tokens)
    # A request that comes back has its output counted: up to 16 tokens, and more (Indexing.cu's index_add_).
    for length in (min(2, sizes.length), min(18, sizes.length)):
        yield _plan([(0, 1)], [_new_request(0, length, everything, output=length - 1)])
    # A prompt pooled in two steps: the second one adds what the first has kept.
    yield _beginning([(0, 1)], PLAIN, samples=False, pooling="last")
    if sizes.length > 1:
        yield _plan([(0, 1)], [_new_request(0, 2, everything, pooling="mean")], samples=False)
        yield _plan([(1, 1)], samples=False)
    # Experts have kernels by the number of their tokens.
    for size in (1 << i for i in range(MAX_BUCKET.bit_length(), sizes.tokens.bit_length())):
        yield _beginning(sizes.prefill(size), PLAIN)
    # A sequence gets all its blocks at once; no other step here changes the block table.
    yield replace(_beginning([(0, 1)], everything), table=int_table([(0, i, 0) for i in range(max_blocks)], 3))


def _many_alternatives(sizes: Sizes, everything: SamplingParams, runner: ModelRunner) -> Iterator[StepPlan]:
    """Where that is allowed, reports of as many positions as fit into a step; sorting them takes memory."""
    room, vocab = room_for_many(runner.info), runner.info.vocab_size
    for doubling in range(1, 1 + (vocab // MAX_LOGPROBS).bit_length()) if room else ():
        count = min(MAX_LOGPROBS << doubling, vocab)
        fit = room // report_values(count)
        yield from _reports(sizes, replace(everything, logprobs=count, prompt_logprobs=count), fit)


def _reports(sizes: Sizes, params: SamplingParams, fit: int) -> Iterator[StepPlan]:
    """Reports of one position, and of as many of a prompt as ATen tells apart."""
    yield _beginning(sizes.decode(1), params)
    for positions in (20, 40, LOGPROB_CHUNK):
        length = min(positions + 1, sizes.length)
        row = 0, min(positions, sizes.tokens, length, fit)
        yield _plan([row], [_new_request(0, length, params)], samples=False)


def _orders_of_size(sizes: Sizes) -> Iterator[StepPlan]:
    """Plain steps of 1, 2, 4, ... rows, and as many tokens: kernels come in kinds for small and large ones. The largest
    have run."""
    yield _beginning(sizes.decode(sizes.rows), PLAIN)  # leaves no option behind
    for limit, rows_of in ((sizes.rows, sizes.decode), (min(sizes.tokens, MAX_BUCKET), sizes.prefill)):
        for size in (1 << i for i in range(limit.bit_length())):
            yield _plan(rows_of(size))


def _few_options(sizes: Sizes) -> Iterator[StepPlan]:
    """Decode steps with ever fewer options."""
    truncated = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01, seed=0)
    biased = SamplingParams(temperature=1.0, logit_bias={0: 1.0}, seed=0)
    for params in (replace(truncated, logit_bias={0: 1.0}), truncated, biased, replace(biased, logit_bias=None)):
        yield _beginning(sizes.decode(sizes.rows), params)


def every_size(limit: int, buckets: Buckets) -> Iterator[Bucket]:
    """A decode step of each padded number of rows, a prefill step of each padded number of tokens, and some above."""
    yield from (Bucket(rows, rows, rows, 1) for rows in buckets.rows)
    yield from (buckets.padded(Bucket(tokens, 1, 0, tokens)) for tokens in (*buckets.tokens, *_unpadded(limit)))


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
    prompt = REPORTED if params.prompt_logprobs else max(length for _, length in rows)
    outputs = [max(length - prompt - 1, 0) for _, length in rows]
    new_requests = [
        _new_request(slot, length, params, output=output, **more)
        for slot, ((_, length), output) in enumerate(zip(rows, outputs, strict=True))
    ]
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
