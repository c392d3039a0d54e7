"""Tokens equal to transformers, float32 on a CPU: tiny random Llamas, ragged batches, chunks, preemption."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import assert_greedy, load_reference, make_config, prompts, save_model
from tests.support.model_driver import ModelDriver, load
from tests.support.model_engine import ModelEngine

from wavecore.engine_core.api.sampling_params import SamplingParams

SHAPES: dict[str, dict[str, Any]] = {
    "gqa": {},
    "odd heads": {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3},
    "one head": {"num_attention_heads": 1, "num_key_value_heads": 1},
    "head_dim 128, tied": {
        "head_dim": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "biases": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 6},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_batch_chunks_and_preemption(tmp_path: Path, shape: str) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama", **SHAPES[shape]))
    model = load_reference(folder)
    asked = prompts(24, 70)

    whole = ModelDriver(load(folder))
    outputs = whole.run([whole.add(p, 16, i) for i, p in enumerate(asked)])
    for prompt, ours in zip(asked, outputs, strict=True):
        assert_greedy(model, prompt, ours, shape)
    assert len({tuple(o) for o in outputs}) > 12, "the model must not say the same to everything"

    chunked = ModelDriver(load(folder))
    sequences = [chunked.add(p, 16, i) for i, p in enumerate(asked)]
    draw = random.Random(1)

    def preempt(step: int) -> None:
        if step % 3 == 2:
            chunked.preempt(sequences[draw.randrange(len(sequences))])

    for prompt, ours in zip(asked, chunked.run(sequences, 16, preempt), strict=True):
        assert_greedy(model, prompt, ours, shape)


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_through_the_engine_with_a_cache_so_small_that_it_preempts(
    tmp_path: Path, async_scheduling: bool, prefix_caching: bool
) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    model = load_reference(folder)
    engine = ModelEngine(
        folder,
        max_num_batched_tokens=32,
        max_num_seqs=16,
        num_gpu_blocks_override=50,
        async_scheduling=async_scheduling,
        enable_prefix_caching=prefix_caching,
    )
    asked = prompts(20, 70) + prompts(4, 70)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    for prompt, ours in zip(asked, outputs, strict=True):
        assert len(ours) == 20
        assert_greedy(model, prompt, ours)
    assert engine.preempted > 0
