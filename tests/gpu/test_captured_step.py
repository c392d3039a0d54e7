"""A step captured in a CUDA graph stays valid: nothing that it reads or writes moves, whatever requests come later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.gpu.steps import make, prompt, recorded
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import GREEDY, ModelDriver

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.execution.pending_step import Launched
from wavecore.engine_core.execution.sampling_state import draw
from wavecore.engine_core.execution.step_extras import Extras
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.plan import StepPlan, StepResult

ROWS = 8


def is_decode(shape: StepShape) -> bool:
    return shape.max_query_len == 1 and shape.bucket_rows == ROWS


def run_busy_steps(driver: ModelDriver) -> None:
    """Eight rows; three end and make room for a long prompt in chunks, for penalties, and for bias, bans and masks."""
    sampled = SamplingParams(seed=1, temperature=0.8, top_k=30, max_tokens=1000)
    rows = [driver.add(prompt(i, 20 + i), 9 if i < 3 else 80, i, sampled if i % 2 else GREEDY) for i in range(ROWS)]
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


@torch.inference_mode()
def capture(runner: Any, shape: StepShape) -> torch.cuda.CUDAGraph:
    """Preparation, layers, logits and sampling of one bucket, with every option that the device can tell by slot."""
    rows, sampling = runner.rows(shape), runner.sampling_rows(shape, truncates=True, edits=True)
    views = runner.state.input.rows(shape.bucket_rows)
    views.query_start.zero_()  # a step of padding
    views.slots.fill_(-1)
    views.sample_slots.fill_(-1)

    def step() -> None:
        draw(runner.logits(*runner.forward(rows)), sampling, runner.out)

    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        step()  # loads what cannot be loaded while a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


@torch.inference_mode()
def replay(runner: Any, plan: StepPlan, graph: torch.cuda.CUDAGraph) -> StepResult:
    """A step whose rows are a replay; the host's part is the runner's own."""
    shape, state = StepShape(plan, runner.bucket_limits), runner.state
    state.begin(plan.new_requests)
    extras = Extras(shape, state, runner.out)
    state.apply(state.input.bring(shape, extras.logprob_rows, state.sampling.host_columns))
    runner.out.clear()
    graph.replay()
    return Launched(shape, runner.out.send(), extras, runner.copies).wait()


def test_a_captured_step_equals_the_eager_one_whatever_came_after_the_capture(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", make_config("Llama"))
    runner = make(folder)
    with recorded(runner) as steps:
        run_busy_steps(ModelDriver(runner))
    other = make(folder)
    shapes = [StepShape(plan, other.bucket_limits) for plan, _ in steps]
    graph = capture(other, next(shape for shape in shapes if is_decode(shape)))
    replays = [is_decode(shape) for shape in shapes]
    assert sum(replays[:9]) == 8 and not any(replays[9:12]) and sum(replays[12:]) >= 20  # the three came in between
    for (plan, want), replayed in zip(steps, replays, strict=True):
        got = replay(other, plan, graph) if replayed else other.launch(plan).wait()
        assert got.tokens.tolist() == want.tokens.tolist()
        assert not got.faults.any() and not want.faults.any()
