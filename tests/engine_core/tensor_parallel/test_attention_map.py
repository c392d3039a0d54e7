"""The attention map of a model that ranks share is that of one rank, and what keeps one rank from it ends no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_driver import load
from tests.support.model_engine import ModelEngine
from tests.support.thread_ranks import ThreadRanks

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution import runner as of_one_rank
from wavecore.transport.errors import EngineDead, ResourceError, ValidationError

LAYERS, HEADS = 3, 8
PROMPTS = prompts(LAYERS * HEADS, seed=6)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With windows in some layers, and capped scores."""
    sizes = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "sliding_window": 12, "intermediate_size": 96}
    return save_model(tmp_path_factory.mktemp("model"), make_config("Gemma2", **sizes), scale=0.08)


@pytest.fixture(scope="module")
def maps(model: Path) -> list[Any]:
    """Of one rank: each head with a prompt of its own."""
    alone = load(model)
    return [alone.attention_map(PROMPTS[i], *divmod(i, HEADS)) for i in range(len(PROMPTS))]


@contextmanager
def ranks_of(model: Path, size: int) -> Iterator[ThreadRanks]:
    runner = ThreadRanks(model, size)
    yield runner
    runner.close()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_head(model: Path, maps: list[Any], size: int) -> None:
    """Also where several ranks hold the same KV head."""
    with ranks_of(model, size) as runner:
        for i, expected in enumerate(maps):
            found = runner.attention_map(PROMPTS[i], *divmod(i, HEADS))
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_with_steps_in_flight(model: Path, maps: list[Any], steps: int) -> None:
    """Asked in the middle of requests, which go on."""
    engine, expected = ModelEngine(model, 2), ModelEngine(model).generate(PROMPTS[:3], GREEDY)
    for prompt in PROMPTS[:3]:
        engine.add(prompt, GREEDY.clone(seed=0))
    for _ in range(steps):
        engine.step()
    np.testing.assert_allclose(engine.runner.attention_map(PROMPTS[5], 0, 5), maps[5], rtol=0, atol=1e-5)
    assert [output.tokens for output in engine.run().values()] == expected
    engine.runner.close()


def test_what_is_refused(model: Path, maps: list[Any]) -> None:
    with ranks_of(model, 2) as runner:
        for wrong in ((PROMPTS[0], LAYERS, 0), (PROMPTS[0], 0, HEADS), ([], 0, 0), ([{1: 2}], 0, 0), (5, 0, 0)):
            with pytest.raises(ValidationError):
                runner.attention_map(*wrong)  # type: ignore[arg-type]
        np.testing.assert_allclose(runner.attention_map(PROMPTS[0], 0, 0), maps[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_at_each_collective_of_each_rank(model: Path, maps: list[Any], rank: int) -> None:
    """Every rank does what the others wait for, so that the next map and the next step find them in step."""
    with ranks_of(model, 2) as runner:
        fails = runner.collectives[rank]
        begin = fails.calls
        runner.attention_map(PROMPTS[7], 0, 7)
        calls = fails.calls - begin
        assert calls == 2 * LAYERS + 2
        for call in range(calls):
            fails.fails_at = fails.calls + call
            with pytest.raises(ResourceError, match="no memory for this attention map"):
                runner.attention_map(PROMPTS[7], 0, 7)
            np.testing.assert_allclose(runner.attention_map(PROMPTS[7], 0, 7), maps[7], rtol=0, atol=1e-5)


def test_a_rank_that_leaves_is_the_end(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others would pair its next collective with one of the map."""

    def fails(*_: object) -> None:
        raise ValueError("as this test wants")

    with ranks_of(model, 1) as runner:
        monkeypatch.setattr(of_one_rank, "attention_map", fails)
        with pytest.raises(EngineDead, match="as this test wants"):
            runner.attention_map(PROMPTS[0], 0, 0)
