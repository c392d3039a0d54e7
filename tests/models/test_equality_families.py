"""Every family equal to transformers in float32: batches, chunks, windows crossed, prefixes shared, rope scaling."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tests.models.checkpoints import VOCAB, assert_greedy, load_reference, make_config, save_model
from tests.models.driver import Driver, load

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


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 60))] for _ in range(count)]


@pytest.mark.parametrize("case", CASES)
def test_equal_to_transformers(tmp_path: Path, case: str) -> None:
    folder = make(tmp_path / "model", case)
    model = load_reference(folder)
    asked = prompts(8)
    driver = Driver(load(folder))
    whole = driver.run([driver.add(p, 24, i) for i, p in enumerate(asked)])
    for prompt, ours in zip(asked, whole, strict=True):
        assert_greedy(model, prompt, ours, case)
    assert len({tuple(o) for o in whole}) > 4, "the model must not say the same to everything"
    chunked = driver.run([driver.add(p, 24, 31 - i) for i, p in enumerate(asked)], chunk=7)
    for prompt, ours in zip(asked, chunked, strict=True):
        assert_greedy(model, prompt, ours, f"{case}, in chunks")
    first = driver.add(asked[0] * 2, 4, 0)
    driver.run([first])
    shared = driver.add(first.tokens, 12, 1)
    hits = len(first.tokens) // 4 - 1
    shared.blocks, shared.computed = first.blocks[:hits], hits * 4
    assert_greedy(model, first.tokens, driver.run([shared])[0], f"{case}, prefix hit")
