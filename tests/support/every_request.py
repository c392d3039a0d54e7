"""Every kind of request that a runner serves, a few steps of each: what tests of compilation and of memory run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tests.support.model_driver import ModelDriver

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution.step_shape import Buckets

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {3: 1.0, 5: -100.0}},
    "bad_words": {"temperature": 0.0, "bad_words_token_ids": [[3], [4, 5]]},
    "min_tokens": {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": [7]},
    "allowed_token_ids": {"allowed_token_ids": [1, 2]},
    "logprobs": {"logprobs": 5},
    "many alternatives": {"logprobs": 40, "prompt_logprobs": 40},
    "no alternatives": {"logprobs": 0, "prompt_logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 3, "temperature": 0.0},
}


def every_request(runner: Any, rows: int, tokens: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each kind by name, as a function that runs some of it.

    Args:
        rows, tokens: max_num_seqs and max_num_batched_tokens; the model's length is 210 or more.
    """

    def run(count: int, steps: int, length: int = 21, **options: Any) -> None:
        driver = ModelDriver(runner)
        params = SamplingParams(seed=1, max_tokens=100, **options)
        sequences = [driver.add([5] * (length + i % 3), 100, i, params, choice=i % 2) for i in range(count)]
        for _ in range(steps):
            driver.step(sequences)

    def in_chunks(length: int) -> None:
        driver = ModelDriver(runner)
        driver.run([driver.add([5] * length, 2, 0)], chunk=50)

    def come_back(said: int) -> None:
        driver = ModelDriver(runner)
        sequence = driver.add([5] * 21, said + 2, 0, SamplingParams(seed=1, max_tokens=100, repetition_penalty=1.2))
        sequence.tokens += [5] * said
        driver.run([sequence])

    def embed(chunk: int = 30, **more: Any) -> None:
        driver = ModelDriver(runner)
        driver.run([driver.add([5] * 30, 1, i, **more) for i in range(3)], chunk)

    for name, options in OPTIONS.items():
        yield name, lambda options=options: run(3, 3, **options)
        yield f"{name}, all rows", lambda options=options: run(min(rows, tokens // 24), 2, **options)
    sizes = Buckets(tokens, rows).rows
    counts = sorted({*range(1, 41), *sizes, *(size - 1 for size in sizes)} & {*range(1, rows + 1)})
    yield "any number of rows", lambda: [run(count, 3, 1) for count in counts]
    longest = min(tokens, runner.info.max_model_len - 3)
    lengths = [n for n in (*range(2, 34), 63, 64, 65, 127, 128, 129, 255, 256, longest) if n <= longest]
    yield "a step of any size", lambda: [run(1, 1, length) for length in lengths]
    yield "a prompt in chunks", lambda: in_chunks(longest)
    yield "requests that come back with output", lambda: [come_back(said) for said in (1, 30)]
    yield "prompt embeddings", lambda: embed(embeds=np.zeros((30, runner.info.hidden_size), np.float32))
    for pooling in ("mean", "last"):
        yield f"pooling {pooling}", lambda pooling=pooling: embed(pooling=pooling)
        yield f"pooling {pooling} in chunks", lambda pooling=pooling: embed(7, pooling=pooling)
    for copies in ([(1, 2)], [(1, 2), (3, 4), (5, 6)]):
        yield f"{len(copies)} copies", lambda copies=copies: ModelDriver(runner).move(copies=copies)
    yield "attention map", lambda: [runner.attention_map([5] * length, 1, 1) for length in (1, 2, 16, 17, 40, 200)]
