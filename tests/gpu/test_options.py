"""Every sampling option on CUDA: it draws the tokens of the CPU, and it is seen to act.

Eight prompts by three seeds for each option, over a vocabulary of real size. What an option bans or allows is chosen
from the tokens that the row says without it. The noise is the same on both devices and logits differ by rounding, so
that tokens differ in near ties only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kernels.sampling.sampling_case import drawn
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_driver import DrivenSequence, ModelDriver, load

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import LOGPROB_CHUNK
from wavecore.kernels import ops
from wavecore.kernels.reference import sampling
from wavecore.kernels.sampling.rows import SamplingRows

VOCAB, TOKENS, SEEDS = 151_936, 8, 3
ASKED = [prompt for prompt in prompts(8) for _ in range(SEEDS)]
FEW = range(50, 62)  # so few that tokens repeat, and penalties show
BASES: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "few": {"temperature": 1.0, "allowed_token_ids": FEW},
}
Change = Callable[[list[int]], dict[str, Any]]
"""Of the tokens that a row says without it."""
OPTIONS: dict[str, tuple[str, Change]] = {
    "temperature": ("sampled", lambda _: {"temperature": 0.5}),
    "greedy": ("sampled", lambda _: {"temperature": 0.0}),
    "top_k": ("sampled", lambda _: {"top_k": 5}),
    "top_p": ("sampled", lambda _: {"top_p": 0.5}),
    "min_p": ("sampled", lambda _: {"min_p": 0.3}),
    "all truncations": ("sampled", lambda _: {"temperature": 1.5, "top_k": 200, "top_p": 0.9, "min_p": 0.02}),
    "presence_penalty": ("few", lambda _: {"presence_penalty": 2.0}),
    "frequency_penalty": ("few", lambda _: {"frequency_penalty": 1.5}),
    "repetition_penalty": ("few", lambda _: {"repetition_penalty": 1.8}),
    "penalties, top_k 1": ("few", lambda _: {"presence_penalty": 1.1, "repetition_penalty": 1.3, "top_k": 1}),
    "logit_bias": ("sampled", lambda said: {"logit_bias": {said[0]: -100.0, said[3]: -100.0, 7: 9.0}}),
    "allowed_token_ids": ("sampled", lambda said: {"allowed_token_ids": said[1::2]}),
    "allowed, top_p": ("few", lambda _: {"top_p": 0.4}),
    "a bad word": ("greedy", lambda said: {"bad_words_token_ids": ((said[0],),)}),
    "bad words of two": (
        "sampled",
        lambda said: {"bad_words_token_ids": (tuple(said[:2]), tuple(said[4:6]), (1, 2, 3))},
    ),
    "min_tokens": ("sampled", lambda said: {"min_tokens": 6, "stop_token_ids": (said[0], said[2], said[5])}),
}


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelDriver]:
    config = make_config("Llama", vocab_size=VOCAB, num_hidden_layers=2)
    folder: Path = save_model(tmp_path_factory.mktemp("options") / "model", config, scale=0.4)
    return {
        device: ModelDriver(load(folder, device=device, dtype="float32", block_size=16)) for device in ("cpu", "cuda")
    }


@pytest.fixture(scope="module")
def bases(drivers: dict[str, ModelDriver]) -> Callable[[str], list[DrivenSequence]]:
    """What the CPU says with a base alone, computed once."""
    known: dict[str, list[DrivenSequence]] = {}

    def base(name: str) -> list[DrivenSequence]:
        if name not in known:
            known[name] = run(drivers["cpu"], [params(BASES[name], row) for row in range(len(ASKED))])
        return known[name]

    return base


def params(options: dict[str, Any], row: int) -> SamplingParams:
    return SamplingParams(**{"seed": row % SEEDS, "max_tokens": TOKENS, "logprobs": row % 4, **options})


def run(driver: ModelDriver, asked: list[SamplingParams]) -> list[DrivenSequence]:
    driver.next_block = 1
    sequences = [driver.add(ASKED[slot % len(ASKED)], TOKENS, slot, p) for slot, p in enumerate(asked)]
    driver.run(sequences, chunk=64)
    assert not any(sequence.fault for sequence in sequences)
    return sequences


def agreement(want: list[DrivenSequence], got: list[DrivenSequence]) -> float:
    return float(np.mean(np.array([s.output for s in want]) == np.array([s.output for s in got])))


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_acts_and_draws_the_tokens_of_the_cpu(
    drivers: dict[str, ModelDriver], bases: Callable[[str], list[DrivenSequence]], name: str
) -> None:
    base, change = OPTIONS[name]
    plain = bases(base)
    asked = [params(BASES[base] | change(plain[row].output), row) for row in range(len(ASKED))]
    want, got = run(drivers["cpu"], asked), run(drivers["cuda"], asked)
    acted = sum(a.output != b.output for a, b in zip(plain, want, strict=True))
    assert acted >= len(ASKED) // 2, acted
    assert agreement(want, got) >= 0.95
    for left, right in zip(want, got, strict=True):
        same_logprobs(left, right)


def same_logprobs(left: DrivenSequence, right: DrivenSequence) -> None:
    """Of the tokens that both have seen the same past of."""
    for i, (a, b) in enumerate(zip(left.logprobs, right.logprobs, strict=True)):
        if left.output[i] != right.output[i]:
            return
        assert a.token_ids.shape == b.token_ids.shape == (1, 1 + (left.params.logprobs or 0))
        np.testing.assert_allclose(b.logprobs, a.logprobs, atol=1e-3)
        assert a.token_ids[0, 0] == b.token_ids[0, 0] == left.output[i]
        assert abs(int(a.ranks[0]) - int(b.ranks[0])) <= 1 + int(a.ranks[0]) // 1000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_all_options_in_16_bits_draw_the_twins_tokens(
    drivers: dict[str, ModelDriver],
    bases: Callable[[str], list[DrivenSequence]],
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
) -> None:
    """The CPU's logits are others in 16 bits, so the twin draws from the GPU's, step by step; the log-probabilities
    that come back are those of the same logits. The rows are more than log-probabilities are made for at once."""
    model = drivers["cuda"].runner.info.model_path
    bounds: dict[str, Any] = {"max_num_seqs": 3 * len(ASKED), "max_num_batched_tokens": 4096}
    driver = ModelDriver(load(model, device="cuda", dtype=dtype, block_size=16, **bounds))
    kinds = list(OPTIONS.values())
    asked = []
    for row in range(3 * len(ASKED)):
        base, change = kinds[row % len(kinds)]
        asked.append(params(BASES[base] | change(bases(base)[row % len(ASKED)].output), row))
    assert len(asked) > LOGPROB_CHUNK
    same: list[bool] = []
    by_place: dict[tuple[int, int], tuple[int, float]] = {}  # by slot and position

    def drawing(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        assert logits.dtype == getattr(torch, dtype)
        wanted.append((logits.float().log_softmax(-1), *drawn(sampling, logits.clone(), copy.deepcopy(rows))))
        return draw(logits, rows)

    def finishing(best: torch.Tensor, rows: SamplingRows) -> None:
        finish(best, rows)
        raw, want, faults = wanted.pop()
        got = rows.tokens
        assert torch.equal(rows.faults, faults) and not faults.any()
        real = rows.slots >= 0
        same.extend((got == want)[real].tolist())
        own = raw.gather(1, got.clamp(min=0).long()[:, None])[:, 0]
        places = zip(rows.slots[real].tolist(), rows.positions[real].tolist(), strict=True)
        by_place.update(zip(places, zip(got[real].tolist(), own[real].tolist(), strict=True), strict=True))

    draw, finish = ops.draw, ops.finish
    wanted: list[tuple[torch.Tensor, ...]] = []
    monkeypatch.setattr(ops, "draw", drawing)
    monkeypatch.setattr(ops, "finish", finishing)
    sequences = run(driver, asked)
    assert len(same) == TOKENS * len(asked) and np.mean(same) > 0.98
    for slot, sequence in enumerate(sequences):
        for i, (token, report) in enumerate(zip(sequence.output, sequence.logprobs, strict=True)):
            there, logprob = by_place[slot, sequence.num_prompt + i]
            assert there == token == report.token_ids[0, 0]
            assert report.token_ids.shape == (1, 1 + (sequence.params.logprobs or 0))
            np.testing.assert_allclose(report.logprobs[0, 0], logprob, atol=1e-5)
