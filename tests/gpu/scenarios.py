"""Requests of every kind, and a device that sleeps before each step: whether `launch` waits for it is then seen."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from tests.gpu.allocator import grow_allocator
from tests.gpu.steps import prompt
from tests.support.checkpoints import VOCAB
from tests.support.model_driver import GREEDY, DrivenSequence, ModelDriver

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import PendingStep, StepPlan, StepResult

HOLD = 1_000_000_000  # cycles: half a second, a launch takes a hundredth of one
WHOLE = 1 << 30
Scenario = Callable[[ModelDriver], list[DrivenSequence]]


def several(count: int, length: int = 12, **more: Any) -> Scenario:
    """So many requests at once with the same options, three tokens each."""
    pooling = more.pop("pooling", "")
    params = SamplingParams(**{"temperature": 0.0, "seed": 0, "max_tokens": 1000} | more)
    return lambda driver: [driver.add(prompt(i, length), 3, i, params, pooling=pooling) for i in range(count)]


def with_logprobs(count: int, most: int) -> Scenario:
    """So many requests at once, with prompts of different lengths, of which the first asks for `most` alternatives and
    each one after it for one less."""

    def add(driver: ModelDriver, i: int) -> DrivenSequence:
        return driver.add(prompt(i, 5 + i % 8), 3, i, replace(GREEDY, logprobs=most - i % (most + 1)))

    return lambda driver: [add(driver, i) for i in range(count)]


def many_logprobs(count: int, length: int, alternatives: int = WHOLE) -> Scenario:
    """So many requests at once with so many alternatives of each token, up to the whole vocabulary."""

    def add(driver: ModelDriver, i: int) -> DrivenSequence:
        asked = min(alternatives, driver.runner.info.vocab_size)
        return driver.add(prompt(i, length), 3, i, replace(GREEDY, logprobs=asked, prompt_logprobs=asked))

    return lambda driver: [add(driver, i) for i in range(count)]


def with_embeds(driver: ModelDriver) -> list[DrivenSequence]:
    return [driver.add([0] * 30, 3, i, embeds=embeds(driver, i, 30)) for i in range(4)]


def embeds(driver: ModelDriver, i: int, length: int) -> Any:
    """float32 [length, hidden]."""
    return np.random.default_rng(i).normal(0, 0.3, (length, driver.runner.info.hidden_size)).astype(np.float32)


def back_with_output(driver: ModelDriver) -> list[DrivenSequence]:
    """Requests that were pushed out after 1, 15, 16, 17 and 60 tokens: penalties count what they said before."""
    params = SamplingParams(
        seed=0, max_tokens=1000, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5
    )
    sequences = []
    for slot, said in enumerate((1, 15, 16, 17, 60)):
        sequence = driver.add(prompt(slot, 12), said + 3, slot, params)
        sequence.tokens += prompt(100 + slot, said)
        sequences.append(sequence)
    return sequences


SCENARIOS: dict[str, Scenario] = {
    "decode": several(8),
    "a single row": several(1),
    "27 rows": several(27, 5),
    "16 admissions": several(16, 40),
    "top_p": several(8, temperature=1.0, top_p=0.9),
    "logit_bias": several(4, logit_bias=dict.fromkeys(range(200), 0.5), min_tokens=2, stop_token_ids=[1, 2]),
    "bad words": several(4, bad_words_token_ids=[[3], [4, 5], [6, 7, 8]]),
    "allowed tokens": several(4, allowed_token_ids=list(range(0, VOCAB, 2))),
    "penalties": several(4, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5),
    "penalties of requests that come back": back_with_output,
    "logprobs": with_logprobs(20, 5),
    "logprobs of 30 rows": with_logprobs(30, 40),
    "logprobs of one row": several(1, logprobs=5),
    "one alternative": several(5, logprobs=1),
    "no alternative": several(5, logprobs=0),
    "logprobs of 100 alternatives": many_logprobs(9, 30, 100),
    "logprobs of 5,000 alternatives": many_logprobs(2, 50, 5000),
    "logprobs of all alternatives": many_logprobs(1, 5),
    "prompt_logprobs": several(3, 150, prompt_logprobs=5),
    "prompt_logprobs of short prompts": several(4, 2, prompt_logprobs=2),
    "prompt_logprobs of 30 positions": several(4, 31, prompt_logprobs=2),
    "prompt_logprobs of 50 positions": several(2, 51, prompt_logprobs=40),
    "prompt_logprobs in parts": several(3, 20, prompt_logprobs=2),
    "embeds": with_embeds,
    "embeds in parts": with_embeds,
    "pooling": several(4, pooling="mean"),
    "pooling in parts": several(4, pooling="mean"),
    "pooling of the last token": several(4, pooling="last"),
}


def chunk_of(name: str) -> int:
    """Most tokens of a prompt in a step."""
    return 7 if name.endswith("in parts") else WHOLE


def arrive(driver: ModelDriver) -> None:
    """Requests of every kind begin while others run; the slot of one that ended is taken again two steps later."""
    bound = {"seed": 0, "max_tokens": 1000}
    edited = SamplingParams(
        **bound,
        temperature=0.9,
        top_p=0.9,
        logit_bias=dict.fromkeys(range(200), 0.5),
        bad_words_token_ids=[[i] for i in range(10, 20)],
        allowed_token_ids=list(range(0, VOCAB, 2)),
        min_tokens=20,
        stop_token_ids=[30, 31],
    )
    penalised = SamplingParams(**bound, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5)
    reporting = SamplingParams(**bound, temperature=0.0, logprobs=3, prompt_logprobs=2)

    def wave(first: int, count: int) -> Scenario:
        """Four requests from slot `first` on: `count` tokens for the first one, eight for the others."""
        return lambda driver: [
            driver.add(prompt(first, 200), count, first, edited),
            driver.add(prompt(first + 1, 220), 8, first + 1, penalised),
            driver.add(prompt(first + 2, 100), 8, first + 2, reporting),
            driver.add([0] * 90, 8, first + 3, embeds=embeds(driver, first, 90)),
        ]

    waves = [wave(0, 2), wave(4, 8), wave(8, 8), lambda driver: [driver.add(prompt(50, 210), 8, 0, penalised)]]
    running: list[DrivenSequence] = []
    while waves or not all(sequence.done for sequence in running):
        if waves:
            running += waves.pop(0)(driver)
        driver.step(running)


def sleep() -> torch.cuda.Event:
    """Let the device sleep; the event behind that."""
    awake = torch.cuda.Event()  # type: ignore[no-untyped-call]
    torch.cuda._sleep(HOLD)
    awake.record()
    return awake


def launch_ahead(runner: Any, steps: Iterable[tuple[StepPlan, StepResult]], *, asleep: bool) -> None:
    """Run plans two in flight, as an engine does. Each has to come back as it did before.

    Args:
        steps: plans and results, in an order in which a slot is given away when its last row came back.
        asleep: the device sleeps before every step, and no launch may return after it woke up.
    """
    if asleep:
        grow_allocator(runner)
    in_flight: deque[tuple[PendingStep, StepResult, torch.cuda.Event | None]] = deque()
    for plan, want in steps:
        if len(in_flight) == 2:
            pending, before, _ = in_flight.popleft()
            assert_same(pending.wait(), before)
        awake = sleep() if asleep else None
        in_flight.append((runner.launch(plan), want, awake))
        awake = in_flight[0][2]
        assert awake is None or not awake.query(), "launch waited for the device"  # type: ignore[no-untyped-call]
    for pending, want, _ in in_flight:
        assert_same(pending.wait(), want)


def assert_same(got: StepResult, want: StepResult) -> None:
    assert got.tokens.tolist() == want.tokens.tolist()
    assert not got.faults.any() and not want.faults.any()
    assert got.pooled.keys() == want.pooled.keys()
    for row, vector in want.pooled.items():
        np.testing.assert_array_equal(got.pooled[row], vector)
    for reports, others in ((got.logprobs, want.logprobs), (got.prompt_logprobs, want.prompt_logprobs)):
        assert reports.keys() == others.keys()
        for row, other in others.items():
            for name in ("token_ids", "logprobs", "ranks"):
                np.testing.assert_array_equal(getattr(reports[row], name), getattr(other, name))
