"""What rank 0 tells of all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_engine import ModelEngine

from wavecore.engine_core.api.sampling_params import SamplingParams


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_memory_is_that_of_the_rank_that_holds_most(tmp_path: Path, steps: int) -> None:
    """Asked with no, one or two steps in flight, which it neither loses nor waits for in vain."""
    engine = ModelEngine(save_model(tmp_path, make_config("Qwen3", num_attention_heads=4)), 4)
    runner: Any = engine.runner
    own = runner.ranks[0].memory_stats()
    assert len(own) >= 5
    for rank, use in enumerate(list(own)[1:4], 1):
        runner.ranks[rank].memory_stats = {**own, use: own[use] + rank, "weights_bytes": own["weights_bytes"] - 1}.copy
    for prompt in prompts(3, seed=1):
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=8))
    for _ in range(steps):
        engine.step()
    for _ in range(2):
        assert runner.memory_stats() == own | {use: own[use] + rank for rank, use in enumerate(list(own)[1:4], 1)}
    assert {len(output.tokens) for output in engine.run().values()} == {8}
    runner.close()
