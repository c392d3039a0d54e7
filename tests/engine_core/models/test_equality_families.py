"""Every family equal to transformers in float32: batches, chunks, windows crossed, prefixes shared, rope scaling."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.support.checkpoints import assert_greedy, load_reference, make_config, prompts, save_model
from tests.support.model_driver import ModelDriver, load

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.transport.errors import ConfigError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "rope_theta": 500000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.01 * i for i in range(32)],
    "long_factor": [1.0 + 0.1 * i for i in range(32)],
    "rope_theta": 10000.0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3 scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "linear scaling": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
    "yarn scaling": ("Qwen2", {"rope_parameters": YARN}),
    "dynamic scaling below the limit": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
    ),
    "mistral": ("Mistral", {"sliding_window": 10}),
    "mistral without window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1, "layer_types": None},
    ),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"sliding_window": 12, "query_pre_attn_scalar": 48, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3Text",
        {
            "sliding_window": 12,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "query_pre_attn_scalar": 48,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True}),
    "gemma2 with biases": ("Gemma2", {"attention_bias": True, "query_pre_attn_scalar": 48}),
    "gemma3 with biases, both ropes scaled": (
        "Gemma3Text",
        {
            "attention_bias": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 3e4},
            },
        },
    ),
    "llama that is told of windows": ("Llama", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}),
    "mistral that is told of biases": ("Mistral", {"sliding_window": 10, "attention_bias": True}),
    "qwen2 moe": (
        "Qwen2Moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen2 moe, some layers dense": (
        "Qwen2Moe",
        {
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [2],
            "decoder_sparse_step": 2,
            "norm_topk_prob": True,
        },
    ),
    "qwen3 moe": (
        "Qwen3Moe",
        {"num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": ("Phi3", {"sliding_window": 20, "hidden_size": 384, "head_dim": None}),
    "phi3 partial rotary": ("Phi3", {"hidden_size": 384, "head_dim": None, "partial_rotary_factor": 0.5}),
    "phi3 long rope": (
        "Phi3",
        {
            "hidden_size": 384,
            "head_dim": None,
            "original_max_position_embeddings": 128,
            "max_position_embeddings": 128,
            "rope_parameters": LONG,
        },
    ),
}


def make(folder: Path, case: str) -> Path:
    family, changes = CASES[case]
    kept = {name: value for name, value in changes.items() if value is not None or name == "sliding_window"}
    config = make_config(family, **kept)
    scale = 0.08 if family in ("Phi3", "Gemma2", "Gemma3Text") else 0.3
    return save_model(folder, config, scale=scale)


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(tmp_path: Path, case: str) -> None:
    folder = make(tmp_path / "model", case)
    model = load_reference(folder)
    asked = prompts(8)
    driver = ModelDriver(load(folder))
    whole = driver.run([driver.add(p, 24, i) for i, p in enumerate(asked)])
    for prompt, ours in zip(asked, whole, strict=True):
        assert_greedy(model, prompt, ours, case)
    assert len({tuple(o) for o in whole}) > 4, "the model must not say the same to everything"
    chunked = driver.run([driver.add(p, 24, 31 - i) for i, p in enumerate(asked)], chunk=7)
    for prompt, ours in zip(asked, chunked, strict=True):
        assert_greedy(model, prompt, ours, f"{case}, in chunks")
    # Log-probabilities see what greedy tokens do not, such as the cap of the final logits.
    first = driver.add(asked[0] * 2, 4, 0, SamplingParams(temperature=0.0, seed=0, max_tokens=4, prompt_logprobs=3))
    driver.run([first])
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([asked[0] * 2]), use_cache=False).logits[0, :-1]
    ours = torch.from_numpy(first.prompt_logprobs[0].logprobs[:, 1:])
    torch.testing.assert_close(ours, logits.float().log_softmax(-1).topk(3).values, atol=1e-3, rtol=1e-3)
    shared = driver.add(first.tokens, 12, 1)
    hits = len(first.tokens) // 4 - 1
    shared.blocks, shared.computed = first.blocks[:hits], hits * 4
    assert_greedy(model, first.tokens, driver.run([shared])[0], f"{case}, prefix hit")


def test_capped_logits_are_rounded_once(tmp_path: Path) -> None:
    """The product of the head is bfloat16, in steps of 0.125 near the cap of 30; what the cap makes of it is not."""
    model = cast(ModelRunner, load(make(tmp_path / "model", "gemma2"), dtype="bfloat16")).model
    hidden = torch.randn(5, 48).bfloat16() * 16
    product = hidden @ model.lm_head.T
    want = 30 * torch.tanh(product.double() / 30)
    assert float(want.abs().max()) > 10, "the cap must matter"
    torch.testing.assert_close(model.logits(hidden).double(), want, atol=1e-5, rtol=1e-6)


def test_dynamic_scaling_past_the_limit_token_by_token(tmp_path: Path) -> None:
    """A key past the limit keeps the base of its own length, as in transformers' generate with a cache."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    folder = save_model(
        tmp_path / "model", make_config("Llama", max_position_embeddings=24, rope_parameters=rope), scale=0.3
    )
    model, driver = load_reference(folder), ModelDriver(load(folder))
    assert driver.runner.info.max_model_len == 96
    for slot, prompt in enumerate(prompts(4)):
        prompt = prompt[:20]
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=60, output_logits=True, return_dict_in_generate=True
        )
        ours = driver.run([driver.add(prompt, 60, slot)])[0]
        for token, expected, logits in zip(ours, out.sequences[0, len(prompt) :].tolist(), out.logits, strict=True):
            if token != expected:
                best = logits[0].topk(2).values
                assert best[0] - best[1] < 1e-4
                break


def test_yarn_past_the_original_length(tmp_path: Path) -> None:
    """As the README of Qwen tells people to write it: four times the length of the file, which is the original one."""
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = save_model(tmp_path / "model", make_config("Qwen2", max_position_embeddings=64, rope_parameters=scaling))
    model, driver = load_reference(folder), ModelDriver(load(folder, max_model_len=256))
    for slot, prompt in enumerate(prompts(4)):
        prompt = (prompt * 200)[:200]
        assert_greedy(model, prompt, driver.run([driver.add(prompt, 50, slot)])[0])
    assert load(folder).info.max_model_len == 256
    with pytest.raises(ConfigError, match=r"max_model_len 257 is above the 256 positions.*rope_scaling"):
        load(folder, max_model_len=257)


def test_long_rope_past_the_original_length(tmp_path: Path) -> None:
    """A model served longer than its original length, which must be asked for, uses the long factors throughout."""
    changes = {"original_max_position_embeddings": 32, "max_position_embeddings": 128, "rope_parameters": LONG}
    config = make_config("Phi3", hidden_size=384, **changes)
    folder = save_model(tmp_path / "model", config, scale=0.08)
    model, driver = load_reference(folder), ModelDriver(load(folder, max_model_len=128))
    for slot, prompt in enumerate(prompts(4)):
        prompt = prompt * 40
        assert_greedy(model, prompt[:40], driver.run([driver.add(prompt[:40], 20, slot)])[0])
    short = ModelDriver(load(folder))
    assert short.runner.info.max_model_len == 32
    assert_greedy(model, [1, 2, 3], short.run([short.add([1, 2, 3], 20, 0)])[0])
