"""The scheduler's hardest moves on a real (tiny, random) model: same tokens as with a large cache and no overlap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import VOCAB
from tests.support.model_engine import ModelEngine

from wavecore.engine_core.api.sampling_params import SamplingParams


def tokens(tiny_llama: Path, **settings: Any) -> tuple[dict[int, list[int]], ModelEngine]:
    engine = ModelEngine(tiny_llama, **settings)
    text = [(7 * i + i * i // 3) % VOCAB for i in range(64)]
    for i in range(6):
        params = SamplingParams(
            n=1 + i % 3, max_tokens=20, temperature=0.7 * (i % 2), seed=i, repetition_penalty=1.0 + 0.5 * (i == 3)
        )
        engine.add([*text[: 18 + i], i + 1, i + 2], params, priority=i % 2)
    return {handle: output.tokens for handle, output in engine.run().items()}, engine


@pytest.mark.parametrize(
    "settings",
    [
        {"num_gpu_blocks_override": 300},
        {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 24, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 24, "max_num_seqs": 5, "swap_space_gib": 0.01},
        {"num_gpu_blocks_override": 24, "max_num_seqs": 5, "swap_space_gib": 0.01, "enable_prefix_caching": False},
        {"num_gpu_blocks_override": 24, "max_num_seqs": 5, "scheduling_policy": "priority", "async_scheduling": False},
    ],
    ids=["cached", "recompute", "swap", "swap, uncached", "priority"],
)
def test_same_tokens_under_preemption_swap_and_sharing(tiny_llama: Path, settings: dict[str, Any]) -> None:
    """Seeded sampling and penalties included."""
    expected, _ = tokens(
        tiny_llama, num_gpu_blocks_override=300, async_scheduling=False, enable_prefix_caching=False, max_num_seqs=12
    )
    got, engine = tokens(tiny_llama, **settings)
    assert got == expected
    if settings["num_gpu_blocks_override"] == 24:
        assert engine.core.requests.totals.preemptions > 0
