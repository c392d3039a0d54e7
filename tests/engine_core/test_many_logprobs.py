"""Log-probabilities of more alternatives than each token of a step has room for, up to the whole vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.checkpoints import VOCAB, load_reference, make_config, prompts, save_model
from tests.support.model_engine import ModelEngine, Output
from tests.support.thread_ranks import ThreadRanks

from wavecore.engine_core import plan
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import PendingStep, StepPlan, report_values, room_for_many

ASKED = (
    SamplingParams(temperature=1.0, seed=1, max_tokens=6, n=2, logprobs=-1, prompt_logprobs=-1),
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=0.7, seed=2, max_tokens=6, logprobs=100, logit_bias={5: 9.0}),
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=5, prompt_logprobs=3),
    SamplingParams(temperature=0.0, max_tokens=4, logprobs=0, prompt_logprobs=65),
    SamplingParams(temperature=1.0, seed=3, max_tokens=5, logprobs=VOCAB, repetition_penalty=1.4),
)
TIGHT = {"num_gpu_blocks_override": 16, "max_num_seqs": 5}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), make_config("Llama"))


@pytest.mark.parametrize(
    ("ranks", "values", "settings"),
    [
        (1, plan.MANY_VALUES, {}),
        (1, 1, {**TIGHT, "max_num_batched_tokens": 24}),
        (1, 1, {**TIGHT, "swap_space_gib": 0.01, "async_scheduling": False}),
        (1, 1, {"enable_chunked_prefill": False, "max_num_batched_tokens": 64}),
        (2, plan.MANY_VALUES, {"max_num_batched_tokens": 32}),
    ],
    ids=["plenty", "recompute in chunks", "swap", "whole prompts", "two ranks"],
)
def test_they_are_those_of_transformers(
    model: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, values: int, settings: dict[str, Any]
) -> None:
    """Beside rows that ask for few or none; also where a step has room for one position of a prompt and one token."""
    monkeypatch.setattr(plan, "MANY_VALUES", values)
    engine = ModelEngine(model, ranks, max_logprobs=-1, **settings)
    texts = prompts(2 * len(ASKED), longest=28, seed=5)
    handles = [engine.add(text, ASKED[i % len(ASKED)]) for i, text in enumerate(texts)]
    outputs = engine.run()
    if isinstance(engine.runner, ThreadRanks):
        engine.runner.close()
    assert (engine.preempted > 0) == ("num_gpu_blocks_override" in settings)
    reference = load_reference(model)
    for i, (text, handle) in enumerate(zip(texts, handles, strict=True)):
        params = ASKED[i % len(ASKED)].of_model(VOCAB)
        for choice in range(params.n):
            got = outputs[handle + choice]
            assert len(got.tokens) == params.max_tokens
            check(reference, text, params, got, first=choice == 0)


@torch.inference_mode()
def check(reference: Any, prompt: list[int], params: SamplingParams, got: Output, first: bool) -> None:
    tokens = [*prompt, *got.tokens]
    want = reference(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1).numpy()
    asked = (
        (params.prompt_logprobs if first else None, got.prompt_logprobs, range(1, len(prompt))),
        (params.logprobs, got.logprobs, range(len(prompt), len(tokens))),
    )
    for count, reports, positions in asked:
        if count is None or not positions:
            assert not reports
            continue
        ids, values, ranks = (np.concatenate(column) for column in zip(*reports, strict=True))
        assert ids.shape == values.shape == (len(positions), 1 + count)
        for place, position in enumerate(positions):
            row = want[position - 1]
            assert ids[place, 0] == tokens[position]
            np.testing.assert_allclose(values[place], row[ids[place]], rtol=0, atol=1e-4)
            assert len(set(ids[place, 1:].tolist())) == count and (np.diff(values[place, 1:]) <= 0).all()
            np.testing.assert_allclose(values[place, 1:], np.sort(row)[::-1][:count], rtol=0, atol=1e-4)
            likelier = row - row[tokens[position]]
            assert (likelier > 1e-4).sum() < ranks[place] <= 1 + (likelier > -1e-4).sum()


def test_without_max_logprobs_they_take_no_memory_and_with_it_two_positions_fit(model: Path) -> None:
    plain, many = (ModelEngine(model, max_logprobs=most).runner for most in (64, -1))
    sizes = [runner.out.vector.numel() for runner in (plain, many)]  # type: ignore[attr-defined]
    assert sizes[1] - sizes[0] == room_for_many(many.info) == plan.MANY_VALUES and not room_for_many(plain.info)
    assert report_values(64) == report_values(None) == 0 and report_values(65) == 2 * 66 + 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_request_may_begin_in_a_step_without_rows(model: Path, ranks: int) -> None:
    """Its client has much to read: it takes its slot and its blocks, and its first row comes later."""
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=6, n=2, logprobs=-1, repetition_penalty=1.4)
    want, _ = generated(model, params, ranks=1, waits=0)
    got, rows = generated(model, params, ranks, waits=4)
    assert rows[0] == 0 < rows[1]
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens and len(one.tokens) == 6
        np.testing.assert_allclose(one.logprobs[-1][1], other.logprobs[-1][1], rtol=0, atol=1e-4)


def generated(model: Path, params: SamplingParams, ranks: int, waits: int) -> tuple[list[Output], list[int]]:
    """The output of a request whose client reads after so many tries to give it a row, and the rows of each plan."""
    engine = ModelEngine(model, ranks, max_logprobs=-1)
    behind, launch, rows = iter([True] * waits), engine.runner.launch, []

    def noting(plan: StepPlan) -> PendingStep:
        rows.append(plan.num_rows)
        return launch(plan)

    engine.core.scheduler.is_behind = lambda _client: next(behind, False)
    engine.runner.launch = noting  # type: ignore[method-assign]
    engine.add([5, 9, 140, 33, 7, 61], params)
    outputs = list(engine.run().values())
    if isinstance(engine.runner, ThreadRanks):
        engine.runner.close()
    return outputs, rows
