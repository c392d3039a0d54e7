"""Experts spread over the ranks of one engine or several, here threads of this process: what one rank says."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine_core.execution.test_graphs import CalledAgain
from tests.engine_core.models.test_experts import spec_of
from tests.engine_core.models.test_ranks import EVERYTHING, assert_same
from tests.support.checkpoints import make_config, prompts, save_model
from tests.support.model_engine import ModelEngine, Output
from tests.support.thread_engines import thread_engines

from wavecore.engine_core.execution.out_of_memory import shortage
from wavecore.engine_core.execution.step_shape import Bucket, Buckets
from wavecore.engine_core.loop import core, dp_proc
from wavecore.engine_core.models.shard import Shard
from wavecore.engine_core.plan import LeastSize, PendingStep, StepPlan
from wavecore.transport.errors import ConfigError, ResourceError

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_local_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 30, "mlp_only_layers": [1]},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 30,
        "shared_expert_intermediate_size": 40,
    },
}
Models = Callable[[str], Path]
SIZES = {"max_num_batched_tokens": 48, "max_model_len": 120, "max_num_seqs": 8}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    @cache
    def make(family: str) -> Path:
        return save_model(tmp_path_factory.mktemp(family) / "model", make_config(family, **WIDE, **MODELS[family]))

    return make


def ask(engine: ModelEngine, numbers: range) -> None:
    asked = prompts(numbers.stop, seed=3)
    for i in numbers:
        engine.add(asked[i], EVERYTHING[i % len(EVERYTHING)])
    engine.add(asked[numbers[0]], EVERYTHING[0].clone(max_tokens=0, detokenize=False), pooling="mean")


@pytest.mark.parametrize(
    ("family", "engines", "ranks"),
    [
        ("Qwen3Moe", 4, 1),
        ("Mixtral", 1, 2),
        ("Qwen2Moe", 2, 2),
        pytest.param("Qwen3Moe", 2, 2, marks=pytest.mark.slow),
        pytest.param("Mixtral", 4, 1, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens_as_one_rank(models: Models, family: str, engines: int, ranks: int) -> None:
    """Ragged prompts in chunks, more of them on one engine than on another, all sampling options, embeddings."""
    model = models(family)
    parts = [range(3), range(3, 9), range(9, 10), range(10, 16)][:engines]
    expected: list[list[Output]] = []
    for part in parts:
        alone = ModelEngine(model, **SIZES)
        ask(alone, part)
        expected.append(list(alone.run().values()))
    with thread_engines(model, engines, ranks, **SIZES) as spread:
        for engine, part in zip(spread.engines, parts, strict=True):
            ask(engine, part)
        spread.run()
        for engine, right in zip(spread.engines, expected, strict=True):
            assert_same(list(engine.outputs.values()), right)
        steps = {e.core.requests.totals.steps + e.core.requests.totals.dummy_steps for e in spread.engines}
        assert len(steps) == 1


def test_dummies_write_no_block(models: Models) -> None:
    """Not a bit of the KV cache of an engine beside which another works."""
    with thread_engines(models("Qwen3Moe"), 2, 2, **SIZES) as spread:
        idle, busy = spread.runners
        for rank, runner in enumerate(idle):
            runner.kv_cache.copy_(torch.randn_like(runner.kv_cache))
            assert not torch.equal(runner.kv_cache, busy[rank].kv_cache)
        before = [runner.kv_cache.clone() for runner in idle]
        ask(spread.engines[1], range(5))
        spread.run()
        assert spread.engines[0].core.requests.totals.dummy_steps > 12
        for runner, kv_cache in zip(idle, before, strict=True):
            assert torch.equal(runner.kv_cache, kv_cache)


@pytest.mark.parametrize(("engines", "ranks"), [(4, 1), (1, 2), (2, 2)])
def test_a_rank_holds_its_part_of_the_experts(models: Models, engines: int, ranks: int) -> None:
    """And of everything else what it holds without."""
    model = models("Qwen2Moe")
    with thread_engines(model, engines, ranks, **SIZES) as spread:
        runners = [runner for engine in spread.runners for runner in engine]
        whole = ModelEngine(model, **SIZES).runner.model
        for number, runner in enumerate(runners):
            own = {name: tensor.nbytes for name, tensor in runner.model.parameters.items()}
            for name, tensor in whole.parameters.items():
                if ".experts_" in name:
                    part = tensor.chunk(len(runners))[number]
                    torch.testing.assert_close(runner.model.parameters[name], part, rtol=0, atol=0)
            dense = Shard(whole.spec, ranks).spec
            rest = sum(4 * math.prod(shape) for name, shape in dense.shapes().items() if ".experts_" not in name)
            experts = sum(tensor.nbytes for name, tensor in whole.parameters.items() if ".experts_" in name)
            assert sum(own.values()) <= 1.02 * (rest + experts / len(runners))


def test_memory_that_runs_out_in_a_shared_pass_is_the_end(models: Models) -> None:
    """The other engine computes with what did not come; at the start, settings are advised as for one engine."""
    with thread_engines(models("Mixtral"), 2, 1, **SIZES) as spread:
        peers: Any = spread.runners[1][0].model.exchange._peers
        peers.fails_at = peers.calls + 9
        ask(spread.engines[0], range(3))
        with pytest.raises(ResourceError, match="no memory for a step that engines share: CUDA out of memory") as found:
            spread.run()
    assert shortage(found.value).endswith("as this test wants")


class Logged(CalledAgain):
    """Attributes: log: each forward pass that may run from a graph, and whether it did."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[tuple[Any, bool]] = []

    def run(self, function: Callable[..., object], *args: Any) -> None:
        if isinstance(args[0], Bucket):
            self.log.append((args, self._graphs.get((function, args)) is not None))
        super().run(function, *args)


def launch_at_once(runner: Any, plan: StepPlan | None, least: LeastSize | None = None) -> PendingStep:
    """As on a GPU."""
    found: PendingStep = runner.start(StepPlan.empty() if plan is None else plan, least)
    return found


def test_engines_replay_alike(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """And capture together, whatever else they capture; where one has rows that no graph serves, none replays."""
    for module in (core, dp_proc):
        monkeypatch.setattr(module, "CAPTURE_SECONDS", 0.0)
    monkeypatch.setattr(core, "OFTEN", 2)
    model = models("Qwen3Moe")
    with thread_engines(model, 2, 1, async_scheduling=False, **SIZES) as spread:
        logs: list[Logged] = []
        for [runner] in spread.runners:
            runner.buckets, runner.graphs = Buckets(48, 8), Logged()
            runner.launch = partial(launch_at_once, runner)
            logs.append(runner.graphs)
        for turn in range(3):
            ask(spread.engines[0], range(2 + turn))
            ask(spread.engines[1], range(7 * turn + 1))
            spread.run()
        assert logs[0].log == logs[1].log
        assert {replayed for _, replayed in logs[0].log} == {True, False}
        passes = spread.engines[0].core.requests.totals.dummy_steps + spread.engines[0].core.requests.totals.steps
        assert len(logs[0].log) < passes - len(logs[0].captured), "some were eager by their vote"
        assert {part for part in logs[0].captured if isinstance(part[1][0], Bucket)}
        for engine, part in zip(spread.engines, (range(4), range(15)), strict=True):
            alone = ModelEngine(model, **SIZES)
            ask(alone, part)
            assert_same(list(engine.outputs.values())[-len(alone.outputs) :], list(alone.run().values()))


def test_experts_that_do_not_divide_are_refused_with_the_numbers_that_work(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_local_experts=12)
    with pytest.raises(ConfigError, match=r"12 experts do not divide over 8 ranks.* that work: 1, 2, 3, 4, 6, 12$"):
        Shard(spec, expert_ranks=8)
    with pytest.raises(ConfigError, match=r"0 experts do not divide over 2 ranks.*; leave it out$"):
        Shard(spec_of(tmp_path, num_local_experts=0), expert_ranks=2)
    spread = Shard(spec_of(tmp_path, num_attention_heads=8, num_key_value_heads=4), 4, expert_ranks=4)
    assert spread.spec.expert_size == 30, "whole, though it does not divide"
