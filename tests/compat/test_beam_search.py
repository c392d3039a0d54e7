"""Beam search over the prefix cache finds the beams of transformers, in their order and with their scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.checkpoints import load_reference, make_config, save_model
from transformers import PreTrainedModel

from wavecore.frontend.client.offline import run_batch
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.client.service import Service
from wavecore.frontend.vllm import beam_search
from wavecore.vllm import LLM, RequestOutput
from wavecore.vllm.sampling_params import BeamSearchParams

PROMPTS = [[5, 6, 9, 10], [100, 20, 30], [*range(40, 180)]]  # the last one is longer than a block
EOS = [1, 3, 8, 11, 40]  # many ends, so that beams finish at several lengths


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"), make_config(request.param, eos_token_id=EOS), seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "kv_cache_memory_gib": 0.1, "block_size": 16}
    made = LLM(str(folder), disable_tqdm=True, **settings)
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def reference(folder: Path) -> PreTrainedModel:
    return load_reference(folder)


def beams_of_transformers(model: PreTrainedModel, prompt: list[int], params: BeamSearchParams) -> list[Any]:
    """Tokens without padding, and scores."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=params.beam_width, do_sample=False,
            num_return_sequences=params.beam_width, max_new_tokens=params.max_tokens, pad_token_id=0,
            length_penalty=params.length_penalty, eos_token_id=[9999] if params.ignore_eos else EOS,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    beams = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        ends = [] if params.ignore_eos else [at for at in range(len(prompt), len(row)) if row[at] in EOS]
        beams.append((row[: ends[0] + 1] if ends else row, score))
    return beams


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize(("beam_width", "max_tokens"), [(1, 6), (2, 12), (4, 10), (8, 5)])
def test_beams_are_those_of_transformers(
    llm: LLM, reference: PreTrainedModel, beam_width: int, max_tokens: int, length_penalty: float
) -> None:
    params = BeamSearchParams(beam_width, max_tokens, length_penalty=length_penalty)
    outputs = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        expected = beams_of_transformers(reference, prompt, params) if beam_width > 1 else None
        assert len(output.sequences) == beam_width
        for beam, (tokens, score) in zip(output.sequences, expected or [], strict=expected is not None):
            length = len(beam.tokens) - len(prompt)
            assert beam.tokens == tokens
            assert beam.cum_logprob / length**length_penalty == pytest.approx(score, abs=1e-4)
            assert beam.finish_reason == ("stop" if tokens[-1] in EOS else "length")
            assert len(beam.logprobs) == length


def test_beams_share_the_blocks_of_what_they_share(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step finds all full blocks of each beam in the prefix cache, and computes the rest of the last one."""
    steps: list[list[tuple[int, int | None]]] = []

    def watched(service: Service, requests: list[EngineRequest], **options: Any) -> list[RequestOutput]:
        outputs = run_batch(service, requests, **options)
        steps.append([(len(output.prompt_token_ids), output.num_cached_tokens) for output in outputs])
        return outputs

    monkeypatch.setattr(beam_search, "run_batch", watched)
    block = llm.llm_engine.vllm_config.cache_config.block_size
    prompt, count = PROMPTS[-1], 2 * block + 3
    llm.reset_prefix_cache()
    llm.beam_search([prompt], BeamSearchParams(4, count, ignore_eos=True))
    assert steps[0] == [(len(prompt), 0)] and len(steps) == count
    for place, step in enumerate(steps[1:], len(prompt)):
        assert step == [(place + 1, place // block * block)] * 4


def test_ends_may_be_ignored(llm: LLM, reference: PreTrainedModel) -> None:
    params = BeamSearchParams(3, 9, ignore_eos=True)
    [output] = llm.beam_search(PROMPTS[0], params)
    assert [beam.tokens for beam in output.sequences] == [
        tokens for tokens, _ in beams_of_transformers(reference, PROMPTS[0], params)
    ]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_of_prompts_at_once_changes_nothing(llm: LLM, limit: int) -> None:
    params = BeamSearchParams(3, 4)
    limited = llm.beam_search(PROMPTS, params, None, False, concurrency_limit=limit, priority=0)
    free = llm.beam_search(PROMPTS, params)
    for one, other in zip(limited, free, strict=True):
        assert [beam.tokens for beam in one.sequences] == [beam.tokens for beam in other.sequences]


def test_a_search_ends_where_the_context_does(llm: LLM) -> None:
    long = [50] * (llm.model_config.max_model_len - 3)
    [output] = llm.beam_search([long], BeamSearchParams(2, 9, ignore_eos=True))
    assert {len(beam.tokens) for beam in output.sequences} == {llm.model_config.max_model_len}
