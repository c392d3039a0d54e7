"""Whose options make a step big, when it ran out of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from scripted_runner import Script
from tests.support.scheduler_driver import SchedulerDriver, make_add

from wavecore.engine_core.loop.recovery import Row, most_demanding
from wavecore.transport.wire.messages import TensorFrame

DRIVER = SchedulerDriver(Script(vocab_size=50_000, eos_token_id=[], hidden_size=64))
INFO = DRIVER.runner.info


def row(length: int = 1, samples: bool = True, prompt: int = 40, **more: Any) -> Row:
    return DRIVER.core.admit(make_add(0, [1] * prompt, **more)), length, samples


def blamed(*rows: Row) -> tuple[int, str] | None:
    found = most_demanding(rows, INFO)
    return None if found is None else ([request for request, *_ in rows].index(found[0]), found[1])


def test_nobody_is_blamed_for_a_plain_request_however_long() -> None:
    plain = row(30, prompt=200, repetition_penalty=1.2, logit_bias={3: 1.0}, temperature=0.0)
    assert blamed(row(), plain) is None
    assert blamed(plain, row(20, samples=False, logprobs=3)) is None  # a part of a prompt reports nothing yet


def test_the_option_that_needs_most_decides() -> None:
    embeds = TensorFrame("float32", (40, 64), np.zeros((40, 64), np.float32).tobytes())
    rows = [
        row(40, prompt=200),
        row(logprobs=5),
        row(40, embeds=embeds),
        row(40, samples=False, options={"pooling": "mean"}),
        row(40, prompt_logprobs=1),
        row(20, prompt_logprobs=1),
    ]
    assert blamed(*rows) == (4, "prompt_logprobs")
    assert blamed(*rows[:4]) == (1, "logprobs")
    assert blamed(rows[0], rows[2]) == (1, "prompt_embeds")
    assert blamed(rows[0], rows[3]) == (1, "pooling")
    assert blamed(row(40, logprobs=0, prompt_logprobs=0), rows[4]) == (0, "prompt_logprobs, logprobs")
    assert blamed(row(1, prompt_logprobs=5), rows[0]) is None  # its prompt is done
