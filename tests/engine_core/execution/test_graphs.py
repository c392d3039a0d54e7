"""CUDA graphs without CUDA: which parts of steps get one, and when; a replay calls the part again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.model_driver import GREEDY, ModelDriver, load
from tests.support.model_engine import ModelEngine

from wavecore.engine_core.execution import graphs
from wavecore.engine_core.execution.graphs import PIECE, Part, StepGraphs
from wavecore.engine_core.execution.step_shape import Bucket, Buckets
from wavecore.engine_core.loop import core
from wavecore.engine_core.plan import StepPlan
from wavecore.engine_core.startup.warm_up import _beginning, every_size

MIB = 1 << 20
PROMPTS = [[1, 2, 3, 4, 5], [7, 8], [9] * 11, [3, 1]]


class CalledAgain(StepGraphs):
    """Graphs on a CPU.

    Attributes:
        captured, replayed: parts, in order.
        fails: raises where a capture shall fail.
        pool, driver, grows: bytes that graphs took, and that the next one adds to the pool.
    """

    def __init__(self, most: int = 100) -> None:
        super().__init__(torch.device("cpu"))
        self.most, self.room = most, 100 * MIB
        self.captured: list[Part] = []
        self.replayed: list[Part] = []
        self.fails: Callable[[Part], object] = lambda part: None
        self.pool = self.driver = self.grows = 0

    def _taken(self) -> tuple[int, int]:
        return self.pool, self.driver

    def _captured(self, part: Part) -> Any:
        self.fails(part)
        self.pool += self.grows
        self.captured.append(part)
        function, args = part

        def replay() -> None:
            self.replayed.append(part)
            function(*args)

        return SimpleNamespace(replay=replay)


def with_graphs(runner: Any, tokens: int, rows: int) -> CalledAgain:
    runner.buckets = Buckets(tokens, rows)
    runner.graphs = CalledAgain()
    return runner.graphs  # type: ignore[no-any-return]


def test_the_part_that_ran_most_often_is_first() -> None:
    ran: list[int] = []
    made = CalledAgain(most=2)
    for size in (1, 2, 2, 3, 2, 3):
        made.run(ran.append, size)
    assert made.wanted(3) and not made.wanted(4)
    made.capture()
    assert made.wanted(2) and not made.wanted(3)
    made.capture()
    assert made.captured == [(ran.append, (2,)), (ran.append, (3,))]
    assert not made.wanted(1), "there is no room for more"
    for size in (1, 2, 3):
        made.run(ran.append, size)
    assert ran == [1, 2, 2, 3, 2, 3, 1, 2, 3] and len(made.replayed) == 2


def test_nothing_is_counted_where_there_are_no_graphs() -> None:
    made = CalledAgain(most=0)
    made.run(list, (1,))
    assert not made.wanted(1)


def test_a_capture_that_fails_is_said_once_and_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_part: Part) -> None:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmore lines")
        finally:
            raise RuntimeError("capture_end failed")

    made, ran = CalledAgain(), list[int]()
    made.fails = fail
    made.run(ran.append, 5)
    made.capture()
    for _ in range(3):
        made.run(ran.append, 5)
    assert not made.wanted(1) and ran == [5] * 4
    [record] = caplog.records
    assert "no CUDA graph of append(5,)" in record.getMessage() and "Tried to allocate 9 GiB." in record.getMessage()
    assert "more lines" not in record.getMessage()


def test_captures_end_when_the_reserve_is_used_up(caplog: pytest.LogCaptureFixture) -> None:
    """Graphs that are there stay; the other parts run as they are, and one line says so."""
    ran: list[int] = []
    made = CalledAgain()
    made.grows = 40 * MIB
    for size in range(9):
        made.run(ran.append, size)
        if made.wanted(1):
            made.capture()
    assert [args for _, args in made.captured] == [(0,), (1,), (2,)], "the third took more than was left"
    for size in range(9):
        made.run(ran.append, size)
    assert ran == [*range(9)] * 2 and len(made.replayed) == 3 and not made.wanted(1)
    [record] = caplog.records
    assert record.getMessage() == "3 CUDA graphs took the memory reserved for them: no more are made"


@pytest.mark.parametrize("mine", [True, False])
def test_ranks_end_together(mine: bool) -> None:
    """Another rank's reserve is used up, or a capture broke there."""
    made, asked = CalledAgain(), list[int]()

    def least(own: int) -> int:
        asked.append(own)
        return own if mine or len(asked) % 2 else 0

    made.run(list, (1,))
    made.capture(least)
    made.run(list, (1, 2))
    assert made.wanted(1) == mine and asked == [1, 1]


@pytest.mark.parametrize("others", [0, 900 * MIB])
def test_what_others_take_meanwhile_hardly_counts(others: int) -> None:
    made = CalledAgain()
    made.fails = lambda _part: setattr(made, "driver", made.driver + others)
    made.run(list, (1,))
    made.capture()
    assert 100 * MIB - made.room == min(others, 2 * PIECE)


@pytest.mark.parametrize("each", [100 << 10, 190 << 10, 700 << 10])
def test_what_the_driver_takes_for_a_graph_is_measured_over_its_pieces(each: int) -> None:
    """The first graphs fit into what it has."""
    left, made = 5 * MIB, CalledAgain()
    made.fails = lambda _part: setattr(
        made, "driver", -(-max((len(made.captured) + 1) * each - left, 0) // PIECE) * PIECE
    )
    measured = made._driver_bytes((list, ()))
    assert each <= measured <= 1.5 * each + 40_000


def test_the_reserve_holds_what_the_pool_took_and_the_driver_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the pool may grow by, and the last capture beyond that."""
    made, ran = CalledAgain(most=0), list[str]()
    monkeypatch.setattr(graphs, "gc", SimpleNamespace(collect=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: made.pool)
    monkeypatch.setattr(made, "_driver_bytes", lambda part: {"forward": 3 * MIB, "sample": MIB}[part[1][0]])
    made.grows = 40 * MIB
    reserve = made.reserve([(ran.append, ("forward",))] * 40, [(ran.append, ("sample",))] * 20)
    assert ran == [args[0] for _, args in made.captured] == ["forward"] * 3 + ["sample"] * 2
    assert made.most == 60 and made.room == (100 + 40 * 3 + 20) * MIB
    assert reserve == 200 * MIB + made.room + 40 * MIB


def test_steps_run_from_graphs_once_they_are_there(tiny_llama: Path) -> None:
    """Plain rows, and a row of each option among them: the tokens are those of a runner without graphs."""
    plain, runner = ModelDriver(load(tiny_llama)), load(tiny_llama)
    made = with_graphs(runner, 64, 32)
    driver = ModelDriver(runner)
    truncated = replace(GREEDY, temperature=1.0, top_k=5, seed=3)
    edited = replace(GREEDY, logit_bias={5: 2.0})
    for params in (GREEDY, truncated, edited, replace(GREEDY, logprobs=2), replace(GREEDY, prompt_logprobs=2), GREEDY):
        made.replayed.clear()
        got, want = (
            d.run([d.add(p, 6, i, params if i == 1 else GREEDY) for i, p in enumerate(PROMPTS)])
            for d in (driver, plain)
        )
        assert got == want
    assert len(made.replayed) == 12, "the last round is replayed whole"
    sampled = {args for part, args in made.captured if part == runner.sample}  # type: ignore[attr-defined]
    assert {(4, False, False), (4, True, False), (4, False, True)} <= sampled
    assert not any(True in args[1:] for args in [args for part, args in made.replayed if part == runner.sample])  # type: ignore[attr-defined]


def test_what_no_graph_yields_runs_as_it_is(tiny_llama: Path) -> None:
    runner: Any = load(tiny_llama)
    made = with_graphs(runner, 64, 32)
    driver = ModelDriver(runner)
    embeds = np.zeros((5, runner.info.hidden_size), np.float32)
    for more in ({"pooling": "mean"}, {"embeds": embeds}, {"params": replace(GREEDY, prompt_logprobs=1)}):
        driver.run([driver.add(PROMPTS[0], 1, 0, **more)])  # type: ignore[arg-type]
        assert not any(part == runner.forward for part, _ in [*made.captured, *made._uses])
    for _ in range(2):
        made.replayed.clear()
        driver.run([driver.add(PROMPTS[0], 3, 0, replace(GREEDY, logprobs=1))])
    assert [part for part, _ in made.replayed] == [runner.forward] * 3


def test_an_engine_captures_beside_its_requests_and_when_it_is_idle(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With preemptions, two steps in flight; the tokens are those of an engine without graphs."""
    monkeypatch.setattr(core, "CAPTURE_SECONDS", 0.0)
    limits: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 20, "num_gpu_blocks_override": 14}
    engine, plain = ModelEngine(tiny_llama, **limits), ModelEngine(tiny_llama, **limits)
    made = with_graphs(engine.runner, 20, 6)
    prompts = [prompt * 2 for prompt in PROMPTS * 3]
    params = replace(GREEDY, max_tokens=12, ignore_eos=True)
    want = plain.generate(prompts, params)
    assert engine.generate(prompts, params) == want
    assert made.captured and made.replayed and not made.wanted(1) and engine.preempted
    first = len(made.replayed)
    assert engine.generate(prompts, params) == want
    assert len(made.replayed) - first > first


def test_an_idle_engine_meets_every_size_and_changes_nothing(tiny_llama: Path) -> None:
    """And a size that it met has a graph then, if it may have one."""
    limits: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 20, "num_gpu_blocks_override": 14}
    engine, plain = ModelEngine(tiny_llama, **limits), ModelEngine(tiny_llama, **limits)
    made, runner = with_graphs(engine.runner, 20, 6), engine.runner
    params = replace(GREEDY, max_tokens=6, ignore_eos=True)
    assert engine.generate(PROMPTS, params) == plain.generate(PROMPTS, params)
    while engine.core.has_work:
        engine.core.step()
    forward, captured, cache = runner.forward, len(made.captured), runner.kv_cache.clone()
    sizes, met = list(every_size(20, runner.buckets)), list[Bucket]()

    def noting(bucket: Bucket, *more: Any) -> Any:
        met.append(bucket)
        return forward(bucket, *more)

    runner.forward = noting
    runner.unmet.extend(sizes)
    plan = replace(StepPlan.empty(), table=np.array([[5, 1, 3]], np.int32), captures=True)
    runner.launch(plan).wait()  # what else it holds is done, too
    assert met == sizes[:1] and runner.state.block_table[5, 1] == 3
    while engine.core.has_work:
        engine.core.step()
    assert met == sizes and torch.equal(runner.kv_cache, cache)
    graphs = runner.buckets.graphs.intersection(sizes)
    assert graphs and graphs == {args[0] for part, args in made.captured[captured:] if part == noting}
    drawn = {args for part, args in made.captured if part == runner.sample}  # type: ignore[attr-defined]
    assert drawn >= {(bucket.rows, False, False) for bucket in graphs} and not made.wanted(1)
    captured = len(made.captured)
    biased = replace(GREEDY, temperature=1.0, logit_bias={0: 1.0}, min_p=0.1, seed=0)
    runner.unmet.append(_beginning([(0, 1)], biased))  # a whole step makes no graph wanted, either
    while engine.core.has_work:
        engine.core.step()
    assert len(met) == len(sizes) + 1 and len(made.captured) == captured
    runner.forward = forward
    assert engine.generate(PROMPTS, params) == plain.generate(PROMPTS, params)


def test_a_dummy_step_changes_nothing(tiny_llama: Path) -> None:
    runner: Any = load(tiny_llama)
    made = with_graphs(runner, 64, 32)
    driver = ModelDriver(runner)
    rows = [driver.add(prompt, 20, i) for i, prompt in enumerate(PROMPTS)]
    for _ in range(4):
        driver.step(rows)
    state = runner.state
    kept = [runner.kv_cache, state.token_table, state.block_table, *state.sampling.pools.values()]
    before = [tensor.clone() for tensor in kept]
    made.replayed.clear()
    columns = np.full(4, -1), np.zeros(4, np.int32), np.ones(4, np.int32), np.ones(4, np.bool_)
    result = runner.launch(StepPlan(driver.step_id, *columns)).wait()
    assert result.tokens.tolist() == [-1] * 4 and not result.faults.any()
    assert [part.__name__ for part, _ in made.replayed] == ["forward", "sample"]
    assert all(map(torch.equal, before, kept))
    driver.run(rows)
