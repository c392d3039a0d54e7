"""Log-probabilities and embeddings of rows: the same however many rows ask, and free of the runner's memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_driver import GREEDY, DrivenSequence, ModelDriver, load

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution import step_extras
from wavecore.engine_core.execution.pinned_copies import CopyOut, Fetched

PROMPT = [5, 9, 140, 33, 7, 61]


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_logprobs_made_a_few_rows_at_a_time_are_the_same(
    broad_llama: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """Beside rows that do not ask, and with bias, bans and penalties, which sampling applies to the logits. Prompts
    have different lengths, so that a token drawn at another row's position shows."""
    sizes: list[int] = []
    put = step_extras.Report.put

    def counting(self: Any, part: slice, logprobs: torch.Tensor, chosen: torch.Tensor) -> None:
        sizes.append(len(logprobs))
        put(self, part, logprobs, chosen)

    def run(rows: int) -> list[DrivenSequence]:
        monkeypatch.setattr(step_extras, "LOGPROB_CHUNK", rows)
        driver = ModelDriver(load(broad_llama))
        params = [
            SamplingParams(
                seed=i,
                temperature=i % 2,
                logprobs=[None, 0, 3, 7][i % 4],
                prompt_logprobs=2 if i % 3 == 0 else None,
                logit_bias={i: 20.0, i + 1: -50.0} if i % 5 == 0 else None,
                repetition_penalty=1.3 if i % 7 == 0 else 1.0,
            )
            for i in range(20)
        ]
        sequences = [driver.add([*PROMPT[: 1 + i % 6], i] * 2, 4, i, params[i]) for i in range(20)]
        driver.run(sequences, chunk=9)
        return sequences

    want = run(1000)
    monkeypatch.setattr(step_extras.Report, "put", counting)
    got = run(chunk)
    assert max(sizes) == min(chunk, 15)
    for one, other in zip(want, got, strict=True):
        assert one.output == other.output
        for left, right in zip(one.logprobs, other.logprobs, strict=True):
            assert left.token_ids.shape == (1, 1 + (one.params.logprobs or 0)), "as many as the row asks for"
            for name in ("token_ids", "logprobs", "ranks"):
                np.testing.assert_array_equal(getattr(right, name), getattr(left, name))
        for left, right in zip(one.prompt_logprobs, other.prompt_logprobs, strict=True):
            np.testing.assert_array_equal(right.token_ids[:, 0], left.token_ids[:, 0])
            # each part is a matrix product of its own here, and products of other sizes round differently
            np.testing.assert_allclose(right.logprobs, left.logprobs, atol=1e-5)


def test_the_rank_counts_what_is_likelier_and_no_equals() -> None:
    room = step_extras.Report(CopyOut(1, 100, torch.device("cpu")), 3, 1)
    room.put(slice(0, 3), torch.tensor([[0.5, 0.5, 0.7]] * 3), torch.arange(3))
    assert room.ranks.tolist() == [2, 2, 1]


@pytest.mark.parametrize("chunk", [1, 64])
def test_logprobs_do_not_see_bias_and_bans(broad_llama: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """They edit the logits in place."""
    monkeypatch.setattr(step_extras, "LOGPROB_CHUNK", chunk)
    driver = ModelDriver(load(broad_llama))
    plain = replace(GREEDY, logprobs=3)
    edited = replace(plain, logit_bias={77: 90.0}, bad_words_token_ids=[[5]], min_tokens=9, stop_token_ids=[6])
    sequences = [driver.add(PROMPT, 1, i, [plain, edited][i % 2]) for i in range(6)]
    driver.run(sequences)
    for other in sequences[1:]:
        want, got = sequences[0].logprobs[0], other.logprobs[0]
        assert got.token_ids[0, 1:].tolist() == want.token_ids[0, 1:].tolist()
        np.testing.assert_allclose(got.logprobs[0, 1:], want.logprobs[0, 1:], atol=1e-5)
        assert (got.token_ids[0, 0] == 77) == (other.params is edited)
        assert (got.ranks[0] > 1) == (other.params is edited)


def test_results_hold_no_memory_of_the_runner(broad_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt log-probabilities are kept until the request's first token: as copies, not as views."""
    driver = ModelDriver(load(broad_llama))
    vectors: list[np.ndarray[Any, Any]] = []
    wait = Fetched.wait
    monkeypatch.setattr(Fetched, "wait", lambda self: vectors.append(wait(self)) or vectors[-1])
    asked = replace(GREEDY, logprobs=2, prompt_logprobs=2)
    sequences = [driver.add(PROMPT, 2, 0, asked), driver.add(PROMPT * 2, 1, 1, pooling="mean")]
    result = driver.step(sequences)
    arrays = [result.tokens, result.faults, *result.pooled.values()]
    for report in (*result.logprobs.values(), *result.prompt_logprobs.values()):
        arrays += [report.token_ids, report.logprobs, report.ranks]
    assert len(arrays) == 9 and len(vectors) == 1
    for array in arrays:
        assert not np.shares_memory(array, vectors[0])
