"""The floors against sums made by hand, and against known sizes of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from floors import H200, Costs, Floor, Rates, decode_seconds, floor_of, prefill_seconds, saved_tokens, shared_tokens
from make_checkpoint import CONFIGS

from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.spec import ModelSpec

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
RATES = Rates(bandwidth=16, matrix=8, attention=4)


def spec(config: dict[str, Any]) -> ModelSpec:
    return from_config(config, Path("config.json"))


def test_costs_by_hand() -> None:
    layer = 4 * (2 + 2) * 4 + 2 * 4 * 4 + 3 * 4 * 6  # q, k, v; o; gate, up, down: 64 + 32 + 72
    assert Costs.of(spec(SMALL)) == Costs(
        layers=2 * layer,
        weights=2 * layer + 40,
        weight_bytes=2 * 376,
        kv_bytes=2 * 2 * 2 * 4,  # bytes, layers, keys and values, head_dim
        pair_flops=2 * 2 * 2 * 2 * 4,  # multiply and add, two products, layers, heads, head_dim
    )


def test_a_tied_head_is_read_too() -> None:
    assert Costs.of(spec({**SMALL, "tie_word_embeddings": True})) == Costs.of(spec(SMALL))


@pytest.mark.parametrize(
    ("prompts", "seconds"),
    [
        ([(0, 10)], 840 + 800),  # 2 x 336 x 10 / 8; 64 x 100 / 2 / 4
        ([(3, 10)], 588 + 728),  # 2 x 336 x 7 / 8; 64 x (100 - 9) / 2 / 4
        ([(0, 10), (3, 10)], 840 + 588 + 800 + 728),
    ],
)
def test_prefill_by_hand(prompts: list[tuple[int, int]], seconds: float) -> None:
    assert prefill_seconds(Costs.of(spec(SMALL)), prompts, RATES) == pytest.approx(seconds)


def test_a_short_prompt_still_reads_the_weights() -> None:
    slow_memory = Rates(bandwidth=1, matrix=8, attention=4)
    assert prefill_seconds(Costs.of(spec(SMALL)), [(0, 1)], slow_memory) == pytest.approx(752 + 8)


def test_decode_by_hand() -> None:
    """Two rows, then one: 2 x 376 x B / 8 each. They see 6 and 8, then 7 tokens of 32 bytes."""
    requests = [(5, 1), (5, 3), (7, 2)]  # the first is done with its prompt
    seconds = 188 + 94 + (6 + 8 + 7) * 32 / 16
    assert decode_seconds(Costs.of(spec(SMALL)), requests, RATES) == pytest.approx(seconds)
    slow_memory = Rates(bandwidth=1, matrix=8, attention=4)
    assert decode_seconds(Costs.of(spec(SMALL)), requests, slow_memory) == pytest.approx(2 * 752 + 21 * 32)


def test_nothing_to_decode() -> None:
    assert decode_seconds(Costs.of(spec(SMALL)), [(5, 1)] * 3, RATES) == 0


def test_shared_tokens_are_whole_blocks_of_an_earlier_prompt() -> None:
    head = list(range(40))
    assert shared_tokens([head, [*head, 1], head, head[:32], [7, *head], head[:8]]) == [0, 32, 32, 31, 0, 0]


def test_what_rows_share_is_read_once_a_step() -> None:
    """Of two rows with two blocks alike the longer one reads them in its 4 steps; a third has the first one alone."""
    head = list(range(32))
    prompts = [[*head, 1], [*head, 2], [*head[:16], *head], [5, *head]]
    assert saved_tokens(prompts[:2], [3, 5]) == 32 * 2
    assert saved_tokens(prompts[:3], [3, 5, 9]) == 32 * 2 + 16 * 4
    assert saved_tokens(prompts[3:] + prompts[:1], [3, 5]) == saved_tokens(prompts, [1] * 4) == 0


def test_the_floor_of_a_batch() -> None:
    head = list(range(32))
    floor = floor_of(spec(SMALL), [head, [*head, 1]], [3, 2], RATES)
    costs = Costs.of(spec(SMALL))
    assert floor == Floor(
        prefill_seconds(costs, [(0, 32), (32, 33)], RATES), decode_seconds(costs, [(32, 3), (33, 2)], RATES, saved=32)
    )
    assert floor.total == floor.prefill + floor.decode


def test_two_gpus_take_half_the_time() -> None:
    asked = [list(range(100))], [5]
    one, two = (floor_of(spec(SMALL), *asked, RATES.of(gpus)) for gpus in (1, 2))
    assert two == Floor(one.prefill / 2, one.decode / 2)


def test_sliding_windows_are_refused() -> None:
    mistral = {**SMALL, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    with pytest.raises(ValueError, match="sliding windows"):
        Costs.of(spec(mistral))


@pytest.mark.parametrize(
    ("name", "gigabytes", "kib", "steps"),
    [
        ("qwen3-0.6b", 1.19, 112, {1: 0.30, 32: 1.15, 256: 7.38}),
        ("llama-3.1-8b", 15.01, 128, {1: 3.52, 32: 4.49, 256: 12.85}),
    ],
)
def test_real_shapes(name: str, gigabytes: float, kib: int, steps: dict[int, float]) -> None:
    """Weights that a step reads, keys and values of a token, and ms a decode step of B rows at 1,024 tokens, from the
    formulas W / BW or 2PB / F, + 1024 B KV / BW, with the published sizes of the models."""
    costs = Costs.of(spec(CONFIGS[name]))
    assert costs.weight_bytes / 1e9 == pytest.approx(gigabytes, abs=0.01)
    assert costs.kv_bytes == kib * 1024
    for rows, ms in steps.items():
        assert 1000 * decode_seconds(costs, [(1023, 2)] * rows, H200) == pytest.approx(ms, abs=0.01)
