"""`launch` on CUDA never waits for the device, and a steady step allocates nothing."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.gpu.steps import make, prompt, recorded
from tests.models.checkpoints import VOCAB, make_config, save_model
from tests.models.driver import Driver, Sequence_

from wavecore.engine_core import row_extras, uploads
from wavecore.engine_core.launched import Launched
from wavecore.engine_core.plan import OutOfMemory, StepPlan, StepResult
from wavecore.engine_core.sampling_params import SamplingParams

HOLD = 1_000_000_000  # cycles: half a second, a launch takes a hundredth of one
Scenario = Callable[[Driver], list[Sequence_]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("steady") / "model", make_config("Llama"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> Any:
    return make(folder)


def several(count: int, length: int = 12, **more: Any) -> Scenario:
    options = {name: more.pop(name) for name in list(more) if name not in ("embeds", "pooling")}
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 1000} | options)
    return lambda driver: [driver.add(prompt(i, length), 3, i, params, **more) for i in range(count)]


def with_embeds(driver: Driver) -> list[Sequence_]:
    hidden = driver.runner.info.hidden_size
    return [
        driver.add([0] * 30, 3, i, embeds=np.random.default_rng(i).normal(0, 0.3, (30, hidden)).astype(np.float32))
        for i in range(4)
    ]


SCENARIOS: dict[str, Scenario] = {
    "decode": several(8),
    "16 admissions": several(16, 40),
    "long prompts through a small ring": several(8, 240),
    "top_p": several(8, temperature=1.0, top_p=0.9),
    "logit_bias": several(4, logit_bias=dict.fromkeys(range(200), 0.5), min_tokens=2, stop_token_ids=[1, 2]),
    "bad words": several(4, bad_words_token_ids=[[3], [4, 5], [6, 7, 8]]),
    "allowed tokens": several(4, allowed_token_ids=list(range(0, VOCAB, 2))),
    "penalties": several(4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "logprobs": several(20, logprobs=5),
    "prompt_logprobs": several(3, 150, prompt_logprobs=5),
    "embeds": with_embeds,
    "pooling": several(4, pooling="mean"),
}


def outcome(sequences: list[Sequence_]) -> list[Any]:
    """Everything that came back, to compare."""
    reports = [[*s.logprobs, *s.prompt_logprobs] for s in sequences]
    return [
        [s.output for s in sequences],
        [[r.token_ids.tolist() for r in some] for some in reports],
        [[r.logprobs.tolist() for r in some] for some in reports],
        [None if s.pooled is None else s.pooled.tolist() for s in sequences],
    ]


@contextmanager
def held(runner: Any) -> Iterator[None]:
    """The device sleeps before every step, and each launch has to return before it wakes up."""
    with pytest.MonkeyPatch.context() as patch:
        launch = runner.launch

        def launching(plan: StepPlan) -> Launched:
            torch.cuda._sleep(HOLD)
            pending: Launched = launch(plan)
            assert pending.event is not None
            assert not pending.event.query(), "launch waited for the device"
            return pending

        patch.setattr(runner, "launch", launching)
        yield


def use_small_ring(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads in pieces of 256 bytes, four of them; and changes of the tables that do not fit the step's vector."""
    monkeypatch.setattr(uploads, "PIECE", 256)
    monkeypatch.setattr(uploads, "PIECES", 4)
    ring = uploads.Uploads(runner.device)
    for owner in (runner.state, runner.state.input, runner.state.sampling):
        monkeypatch.setattr(owner, "uploads", ring)
    monkeypatch.setattr(runner.state.input, "room", 8)


@pytest.mark.parametrize("name", SCENARIOS)
def test_launch_waits_for_nothing(runner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the host brings while the device sleeps arrives before it is read."""
    if name == "long prompts through a small ring":
        use_small_ring(runner, monkeypatch)
    monkeypatch.setattr(row_extras, "CHUNK", 8)  # 20 rows with logprobs: three parts
    driver = Driver(runner)
    first = SCENARIOS[name](driver)
    driver.run(first)  # the allocator's first blocks of these sizes may come from the device
    driver = Driver(runner)
    second = SCENARIOS[name](driver)
    with held(runner):
        driver.run(second)
    assert outcome(second) == outcome(first)


def test_launch_waits_for_nothing_with_a_row_count_never_seen(runner: Any) -> None:
    """The warm-up has seen every size: no kernel is loaded now, which would wait."""
    driver = Driver(runner)
    sequences = several(27, 5)(driver)
    with held(runner):
        driver.run(sequences)
    driver = Driver(runner)
    again = several(27, 5)(driver)
    driver.run(again)
    assert outcome(sequences) == outcome(again)


def test_two_steps_of_a_deep_model_are_launched_while_the_device_sleeps(tmp_path: Path) -> None:
    """As many layers as models of 8B parameters have: the kernels of two steps fit the queue of launches."""
    config = make_config("Llama", num_hidden_layers=36)
    runner = make(save_model(tmp_path / "model", config, scale=0.1))
    driver = Driver(runner)
    with recorded(runner) as steps:
        driver.run(several(8)(driver))
    assert len(steps) == 3
    in_flight: deque[tuple[Launched, StepResult]] = deque()
    for plan, result in steps:
        torch.cuda._sleep(HOLD)
        in_flight.append((runner.launch(plan), result))
        assert not any(pending.event.query() for pending, _ in in_flight)  # type: ignore[union-attr]
        if len(in_flight) == 2:
            pending, want = in_flight.popleft()
            assert pending.wait().tokens.tolist() == want.tokens.tolist()
    for pending, want in in_flight:
        assert pending.wait().tokens.tolist() == want.tokens.tolist()


def test_a_step_out_of_memory_waits_for_those_in_flight(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dropped and their slots given away: what is brought for the next owners must come behind them."""
    driver = Driver(runner)
    with recorded(runner) as steps:
        driver.run(several(4)(driver))
    (first, _), (second, _), _ = steps
    torch.cuda._sleep(HOLD)
    pending = runner.launch(first)
    assert not pending.event.query()

    def failing(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(runner.model, "forward", failing)
    with pytest.raises(OutOfMemory):
        runner.launch(second)
    assert pending.event.query()


@contextmanager
def no_waiting(runner: Any) -> Iterator[None]:
    """torch raises where a launch waits for the device."""
    launch = runner.launch

    def launching(plan: StepPlan) -> Launched:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)  # type: ignore[no-any-return]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # torch says that the mode is a prototype
        patch.setattr(runner, "launch", launching)
        yield


def test_the_debug_mode_sees_a_wait(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(runner)
    [sequence] = several(1)(driver)
    driver.step([sequence])
    forward = runner.model.forward

    def waiting(*args: Any) -> Any:
        args[0].sum().item()
        return forward(*args)

    monkeypatch.setattr(runner.model, "forward", waiting)
    with no_waiting(runner), pytest.raises(RuntimeError, match="synchroniz"):
        driver.step([sequence])


def allocations() -> tuple[int, int]:
    """Made so far on the device and of pinned memory, by the system and not by torch's caches."""
    return torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_p": 0.9, "top_k": 20},
        {"logit_bias": {3: 1.0}, "repetition_penalty": 1.2, "bad_words_token_ids": [[1, 2]]},
        {"logprobs": 4},
    ],
    ids=["plain", "truncated", "edited", "logprobs"],
)
def test_steady_steps_neither_wait_nor_allocate(runner: Any, options: dict[str, Any]) -> None:
    """50 steps of 8 rows, which enter new blocks on the way."""
    driver = Driver(runner)
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 1000} | options)
    sequences = [driver.add(prompt(i, 9 + i), 100, i, params) for i in range(8)]
    for _ in range(20):
        driver.step(sequences)
    before = allocations()
    with no_waiting(runner):
        for _ in range(50):
            driver.step(sequences)
    assert allocations() == before
    assert all(len(sequence.output) == 70 for sequence in sequences)
