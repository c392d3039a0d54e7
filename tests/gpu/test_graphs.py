"""Steps that run from CUDA graphs give what they give without, bit for bit, whatever came after the capture."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.scenarios import SCENARIOS, assert_same, chunk_of
from tests.gpu.steps import make, prompt
from tests.support.checkpoints import make_config, save_model
from tests.support.environment import environment
from tests.support.model_driver import GREEDY, ModelDriver
from tests.support.model_engine import CLIENT, ModelEngine

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.loop import core
from wavecore.engine_core.plan import PendingStep, StepPlan, StepResult
from wavecore.kernels import ops

STEPS = int(os.environ.get("RANDOM_STEPS", "1000"))
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8, "min_p": 0.01},
    {"logit_bias": {7: 4.0, 8: 4.0, 9: -100.0}},
    {"bad_words_token_ids": [[7, 8], [8, 7], [10]]},
    {"allowed_token_ids": list(range(100))},
    {"min_tokens": 3, "stop_token_ids": [11]},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"logprobs": 3},
    {"prompt_logprobs": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("graphs") / "model", make_config("Llama"), scale=0.2)


@dataclass
class Both:
    """A step of two runners. The transfers that both have done are done."""

    steps: tuple[PendingStep, PendingStep]

    def wait(self) -> StepResult:
        result, other = (step.wait() for step in self.steps)
        np.testing.assert_array_equal(result.tokens, other.tokens)
        np.testing.assert_array_equal(result.faults, other.faults)
        if not result.faults.any():
            assert_same(result, other)
        return replace(result, transferred=min(result.transferred, other.transferred))


def beside(runner: Any, eager: Any, monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Every step of the runner is one of `eager`, too, which has no graphs, and must give the same; the plans."""
    eager.graphs.most = 0
    plans: list[StepPlan] = []
    launch = runner.launch

    def launching(plan: StepPlan) -> PendingStep:
        plans.append(plan)
        return Both((launch(plan), eager.launch(replace(plan, captures=False))))

    monkeypatch.setattr(runner, "launch", launching)
    return plans


@pytest.fixture
def runner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """One with graphs, beside one without."""
    found = make(folder)
    beside(found, make(folder), monkeypatch)
    return found


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each replay."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def noting(graph: Any) -> None:
        found.append(id(graph))
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", noting)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_scenario_from_graphs(runner: Any, replays: list[int], name: str) -> None:
    """Twice: most of the second round is replayed."""
    for _ in range(2):
        driver = ModelDriver(runner)
        driver.run(SCENARIOS[name](driver), chunk=chunk_of(name))
    assert replays or name.startswith(("pooling", "prompt_logprobs of short", "embeds", "logprobs of"))


def test_a_mixed_step_after_a_capture_of_prompts_alone(runner: Any, replays: list[int]) -> None:
    """The graph of 18 prompt tokens serves two decode rows beside a prompt of 16."""
    driver = ModelDriver(runner)
    for _ in range(2):
        driver.run([driver.add(prompt(i, 6), 1, i) for i in range(3)])
    rows = [driver.add(prompt(i, 12), 9, i) for i in range(2)]
    driver.step(rows)
    replays.clear()
    rows.append(driver.add(prompt(7, 16), 9, 2))
    driver.step(rows)
    assert replays
    driver.run(rows)


def test_options_cost_plain_rows_nothing(runner: Any) -> None:
    """Rows of every option come and go beside plain ones; steps of plain rows alone have a part of their own."""
    sampled: list[tuple[Any, ...]] = []
    run = runner.graphs.run

    def noting(function: Callable[..., object], *args: Any) -> None:
        if function == runner.sample:
            sampled.append(args)
        run(function, *args)

    runner.graphs.run = noting
    driver = ModelDriver(runner)
    plain = [
        driver.add(prompt(i, 20 + i), 200, i, GREEDY if i % 2 else replace(GREEDY, temperature=0.7)) for i in range(4)
    ]
    for _ in range(2):
        for i, options in enumerate(OPTIONS):
            other = driver.add(prompt(50 + i, 30), 4, 5, SamplingParams(seed=i, max_tokens=100, **options))
            while not other.done:
                driver.step([*plain, other])
            sampled.clear()
            driver.step(plain)
            assert sampled == [(4, False, False)]


def run_busy_steps(driver: ModelDriver) -> None:
    """Eight rows; three end and make room for a long prompt in chunks, for penalties, and for bias, bans and masks."""
    sampled = SamplingParams(seed=1, temperature=0.8, top_k=30, max_tokens=1000)
    rows = [driver.add(prompt(i, 20 + i), 9 if i < 3 else 80, i, sampled if i % 2 else GREEDY) for i in range(8)]
    while not rows[0].done:
        driver.step(rows)
    penalised = SamplingParams(seed=2, temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=1000)
    edited = SamplingParams(
        seed=3,
        temperature=1.0,
        logit_bias={7: 4.0, 8: 4.0, 9: -100.0},
        bad_words_token_ids=[[7, 8], [8, 7], [10]],
        allowed_token_ids=list(range(100)),
        min_tokens=50,
        stop_token_ids=[11],
        max_tokens=1000,
    )
    rows[:3] = [
        driver.add(prompt(20, 180), 30, 0),
        driver.add(prompt(21, 30), 30, 1, penalised),
        driver.add(prompt(22, 30), 30, 2, edited),
    ]
    while not rows[0].done:
        driver.step(rows, chunk=64)


def test_a_graph_serves_requests_that_came_after_its_capture(runner: Any, replays: list[int]) -> None:
    run_busy_steps(ModelDriver(runner))
    assert len(replays) > 60
    assert len(set(replays)) > 3


def random_request(draw: random.Random) -> tuple[list[int], dict[str, Any], dict[str, Any]]:
    options = draw.choice([*OPTIONS[:4], *OPTIONS])
    params = {"seed": draw.randrange(1000), "max_tokens": draw.randint(3, 40), "n": draw.choice((1, 1, 1, 3))} | options
    shared = prompt(1, 64)[: draw.choice((0, 16, 40))]
    return [*shared, *prompt(draw.randrange(1000), draw.randint(1, 90))], params, {"priority": draw.randrange(3)}


@pytest.mark.timeout(600)
def test_random_load_with_captures_in_between(
    folder: Path, replays: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrivals, aborts, preemptions, swaps, forks and idle turns, two steps in flight; RANDOM_STEPS sets how many."""
    monkeypatch.setattr(core, "CAPTURE_SECONDS", 0.05)
    settings: dict[str, Any] = {
        "device": "cuda", "dtype": "float32", "block_size": 16, "num_gpu_blocks_override": 60, "swap_space_gib": 0.01,
        "max_num_seqs": 12, "max_num_batched_tokens": 128, "scheduling_policy": "priority",
    }  # fmt: skip
    engine, eager = ModelEngine(folder, **settings), ModelEngine(folder, **settings)
    plans = beside(engine.runner, eager.runner, monkeypatch)
    draw = random.Random(0)
    while len(plans) < STEPS:
        if draw.random() < 0.25 and len(engine.core.requests.all()) < 30:
            tokens, params, options = random_request(draw)
            engine.add(tokens, SamplingParams(ignore_eos=True, **params), **options)
        mine = engine.core.requests.by_client.get(CLIENT, {})
        if mine and draw.random() < 0.05:
            engine.core.abort(CLIENT, [draw.choice(list(mine))])
        if draw.random() < 0.002:
            engine.run()  # until it is idle, and everything captured
        engine.step()
    engine.run()
    happened = {
        "captures": sum(plan.captures for plan in plans),
        "swaps": sum(len(plan.swap_in) for plan in plans),
        "copies": sum(len(plan.copies) for plan in plans),
        "preemptions": engine.preempted,
        "replays": len(replays),
    }
    print(happened)
    assert all(happened.values()), happened
    assert len(replays) > len(plans) / 2, happened


def test_a_dummy_step_replays_and_changes_nothing(folder: Path, replays: list[int]) -> None:
    runner = make(folder)
    driver = ModelDriver(runner)
    rows = [driver.add(prompt(i, 20), 30, i) for i in range(3)]
    for _ in range(6):
        driver.step(rows)
    state = runner.state

    def everything() -> list[torch.Tensor]:
        torch.cuda.synchronize()
        return [
            t.clone() for t in (runner.kv_cache, state.token_table, state.block_table, *state.sampling.pools.values())
        ]

    before = everything()
    replays.clear()
    for lens in ([1, 1, 1], [1, 1, 16], [1, 1, 1]):
        columns = np.full(3, -1), np.zeros(3, np.int32), np.array(lens, np.int32), np.ones(3, np.bool_)
        result = driver._run(StepPlan(driver.step_id, *columns))
        assert result.tokens.tolist() == [-1] * 3 and not result.faults.any()
    assert len(replays) >= 4
    assert all(map(torch.equal, before, everything()))


def test_a_capture_without_memory_leaves_its_part_as_it_was(
    runner: Any, replays: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    finish = ops.finish

    def failing(*args: Any) -> None:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("CUDA out of memory.")
        finish(*args)

    driver = ModelDriver(runner)
    rows = [driver.add(prompt(i, 20), 30, i) for i in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(ops, "finish", failing)
        for _ in range(6):
            driver.step(rows)
    failed = [function.__name__ for (function, _), graph in runner.graphs._graphs.items() if graph is None]
    assert failed == ["sample", "sample"] and len(runner.graphs._graphs) == 4
    complaints = [record.message for record in caplog.records if "no CUDA graph of sample" in record.message]
    assert len(complaints) == 2 and all("out of memory" in complaint for complaint in complaints)
    rows += [driver.add(prompt(9, 40), 30, 6)]
    driver.run(rows)  # other sizes have graphs, and those that failed are not tried again
    assert len(runner.graphs._graphs) > 4 and list(runner.graphs._graphs.values()).count(None) == 2
    assert replays


def test_after_a_broken_capture_steps_run_without(folder: Path) -> None:
    """Something waited for the device. It is tried in a process of its own: torch's random numbers break with it."""
    command = [sys.executable, "-m", "tests.gpu.broken_capture", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["broken"] == found["before"]
    assert found["graphs"] == 1 and found["complaints"] == 1 and not found["kept"]


@pytest.mark.parametrize(
    "settings",
    [
        {"enforce_eager": True},
        {"cudagraph_capture_sizes": []},
        {"custom_ops": {"silu_mul": "tests.support.custom_ops:silu_mul"}},
    ],
)
@pytest.mark.usefixtures("own_ops")
def test_no_graphs_where_none_are_wanted(folder: Path, replays: list[int], settings: dict[str, Any]) -> None:
    runner = make(folder, **settings)
    driver = ModelDriver(runner)
    driver.run([driver.add(prompt(i, 20), 9, i) for i in range(5)])
    assert not runner.wants_capture(1) and not replays


def test_given_sizes_alone_have_graphs(folder: Path, replays: list[int]) -> None:
    runner = make(folder, cudagraph_capture_sizes=[4, 8])
    driver = ModelDriver(runner)
    for count, replayed in ((3, True), (9, False)):
        replays.clear()
        driver.run([driver.add(prompt(i, 20), 9, i) for i in range(count)])
        assert bool(replays) == replayed
    assert {args[0].rows for part, args in runner.graphs._graphs if part == runner.forward} == {4}


def test_a_moved_cache_ends_all_graphs(folder: Path) -> None:
    runner = make(folder)

    def told() -> list[list[int]]:
        driver = ModelDriver(runner)
        return driver.run([driver.add(prompt(i, 20), 9, i) for i in range(3)])

    want = told()
    assert told() == want and runner.graphs._graphs
    runner.allocate(runner.info.num_blocks - 100)
    assert not runner.graphs._graphs
    assert told() == want
