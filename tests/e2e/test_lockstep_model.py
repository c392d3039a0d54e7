"""A real (tiny, random, dense) model in lockstep: the tokens that one engine gives, with dummies beside its steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import make_config, save_model
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM

SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "disable_tqdm": True}


@pytest.mark.slow
def test_the_same_tokens_as_one_engine(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", make_config("Llama"))
    prompts = [{"prompt_token_ids": [number + 3, 5, 7]} for number in range(6)]
    greedy = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    answers = []
    for lockstep in ({}, {"data_parallel_size": 2, "dp_lockstep": True}):
        with LLM(model, kv_cache_memory_gib=0.01, **SETTINGS, **lockstep) as llm:
            outputs = [*llm.generate(prompts, greedy), *llm.generate(prompts[:1], greedy)]
            answers.append([output.outputs[0].token_ids for output in outputs])
            if lockstep:
                until(lambda llm=llm: len({s["steps"] + s["dummy_steps"] for s in llm.step_stats()}) == 1)
                assert sum(stat["dummy_steps"] for stat in llm.step_stats()) >= 20
    assert answers[0] == answers[1]
