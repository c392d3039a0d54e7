"""What the engine refuses at its door, and what it resolves there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_runner import Script
from tests.support.scheduler_driver import SchedulerDriver, make_add

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import StepPlan, StepResult
from wavecore.engine_core.request import Request
from wavecore.transport.errors import Overloaded, ValidationError
from wavecore.transport.wire.messages import Add, FinishReason, TensorFrame

SCRIPT = Script(max_model_len=64, num_blocks=100, vocab_size=100, hidden_size=4, eos_token_id=[0, 3])


def admit(
    prompt: list[int], options: dict[str, Any] | None = None, driver: SchedulerDriver | None = None, **params: Any
) -> Request:
    return (driver or SchedulerDriver(SCRIPT)).core.admit(make_add(7, prompt, options, **params))


@pytest.mark.parametrize(
    ("field", "prompt", "options", "params"),
    [
        ("prompt", [], {}, {}),
        ("prompt", [100], {}, {}),
        ("prompt", [-1], {}, {}),
        ("prompt", [1] * 64, {}, {}),
        ("stop_token_ids", [1], {}, {"stop_token_ids": [100]}),
        ("logit_bias", [1], {}, {"logit_bias": {100: 5.0}}),
        ("temperature", [1], {}, {"temperature": float("nan")}),
        ("colour", [1], {}, {"colour": 1}),
        ("colour", [1], {"colour": 1}, {}),
        ("priority", [1], {"priority": 1.5}, {}),
        ("priority", [1], {"priority": 1 << 40}, {}),
        ("timeout", [1], {"timeout": 0}, {}),
        ("timeout", [1], {"timeout": float("inf")}, {}),
        ("queue_timeout", [1], {"queue_timeout": "1"}, {}),
        ("first_token_timeout", [1], {"first_token_timeout": -1.0}, {}),
        ("cache_salt", [1], {"cache_salt": "x" * 300}, {}),
        ("cache_salt", [1], {"cache_salt": 3}, {}),
        ("pooling", [1], {"pooling": "max"}, {}),
        ("n", [1], {"pooling": "last"}, {"n": 2}),
        ("emitted", [1, 2], {"emitted": 2}, {}),
        ("emitted", [1, 2, 3], {"emitted": 2}, {"max_tokens": 2}),
        ("emitted", [1, 2], {"emitted": -1}, {}),
        ("emitted", [1, 2], {"emitted": 1, "pooling": "mean"}, {}),
        ("emitted", [1, 2], {"emitted": 1}, {"max_tokens": 0}),
        ("n", [1, 2], {"emitted": 1}, {"n": 2}),
        ("logprobs", [1], {}, {"logprobs": 65}),
        ("logprobs", [1], {}, {"logprobs": -1}),
        ("prompt_logprobs", [1], {}, {"prompt_logprobs": 101}),
    ],
)
def test_refused(field: str, prompt: list[int], options: dict[str, Any], params: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as error:
        admit(prompt, options, **params)
    assert error.value.field == field


def test_a_frame_that_is_no_prompt_is_refused() -> None:
    driver = SchedulerDriver(SCRIPT)
    for frame in (
        TensorFrame("int64", (1,), bytes(8)),
        TensorFrame("int32", (1, 1), bytes(4)),
    ):
        with pytest.raises(ValidationError):
            driver.core.admit(Add(b"", b"c" * 16, 1, 0, frame, {}))


def test_context_length_is_used_to_the_last_token() -> None:
    """The longest prompt gives one token; one more is refused with both numbers."""
    driver = SchedulerDriver(SCRIPT)
    driver.add(0, [1] * 63, max_tokens=50, ignore_eos=True)
    driver.run()
    assert len(driver.outputs[0]) == 1 and driver.finish[0] is FinishReason.LENGTH
    with pytest.raises(ValidationError, match=r"64 tokens.*at most 63.*max_model_len 64"):
        admit([1] * 64)
    assert len(admit([1] * 64, max_tokens=0).tokens) == 64
    assert len(admit([1] * 64, {"pooling": "last"}).tokens) == 64


def test_a_prompt_larger_than_the_cache_is_refused_with_both_numbers() -> None:
    """At the door, not after waiting for blocks that can never be free."""
    driver = SchedulerDriver(SCRIPT, num_gpu_blocks_override=3)
    with pytest.raises(ValidationError, match=r"40 tokens.*whole KV cache holds 32"):
        admit([1] * 40, driver=driver)


def test_output_longer_than_the_cache_ends_by_length() -> None:
    """It ends with what fits instead of preempting itself for ever."""
    driver = SchedulerDriver(SCRIPT, num_gpu_blocks_override=3)
    driver.add(0, [1] * 10, max_tokens=1_000_000, ignore_eos=True)
    driver.run()
    assert len(driver.outputs[0]) == 22 and driver.finish[0] is FinishReason.LENGTH
    driver.check_all()


def test_without_chunked_prefill_a_prompt_must_fit_into_a_step() -> None:
    driver = SchedulerDriver(SCRIPT, enable_chunked_prefill=False, max_num_batched_tokens=16, max_num_seqs=4)
    with pytest.raises(ValidationError, match=r"17 tokens.*at most 16"):
        admit([1] * 17, driver=driver)
    for handle in range(6):
        driver.add(handle, [1 + handle] * 16, max_tokens=20, seed=1, ignore_eos=True)
    driver.run()
    driver.check_all()


@pytest.mark.parametrize("chunked", [False, True])
def test_without_chunked_prefill_no_prompt_is_computed_in_parts(chunked: bool) -> None:
    """Each waits for a step that has room for all of it; one that comes back longer than a step has to be cut."""
    settings = {"block_size": 4, "num_gpu_blocks_override": 13, "max_num_batched_tokens": 16, "max_num_seqs": 3}
    driver = SchedulerDriver(SCRIPT, enable_chunked_prefill=chunked, enable_prefix_caching=False, **settings)
    rows: list[tuple[int, int, int]] = []  # start, length, tokens of the request when it started
    starting: dict[int, int] = {}
    run = driver.runner.run

    def recorded(plan: StepPlan) -> StepResult:
        starting.update({new.slot: len(new.token_ids) for new in plan.new_requests})
        slots = plan.slots.tolist()
        rows.extend(zip(plan.starts.tolist(), plan.query_lens.tolist(), map(starting.__getitem__, slots), strict=True))
        return run(plan)

    driver.runner.run = recorded  # type: ignore[method-assign]
    for handle in range(5):
        driver.add(handle, [1 + handle] * 10, max_tokens=20, seed=1, ignore_eos=True)
    driver.run()
    driver.check_all()
    parts = [row for row in rows if row[0] + row[1] < row[2] or (row[0] and row[1] > 1)]
    assert any(length > 16 for _, _, length in rows), "one must come back longer than a step"
    assert any(length <= 16 for _, _, length in parts) == chunked


def test_seed_is_fresh_without_one_and_stable_with_a_base() -> None:
    assert admit([1]).params.seed != admit([1]).params.seed
    one, two = (admit([1], driver=SchedulerDriver(SCRIPT, seed=5)).params.seed for _ in range(2))
    assert one == two and one is not None
    assert admit([2], driver=SchedulerDriver(SCRIPT, seed=5)).params.seed != one
    assert admit([1], seed=-4).params.seed == -4


def test_a_value_that_equals_one_that_was_checked_is_checked_too() -> None:
    """True and 1.0 equal 1; what was found of it before must not let them in, nor keep it out afterwards."""
    for _ in range(2):
        admit([1], {"priority": 1}, n=1, max_tokens=2)
        for wrong in (True, 1.0):
            with pytest.raises(ValidationError, match=r"^n: "):
                admit([1], {"priority": 1}, n=wrong, max_tokens=2)
            with pytest.raises(ValidationError, match=r"^priority: "):
                admit([1], {"priority": wrong}, n=1, max_tokens=2)


def test_the_same_parameters_and_each_a_seed_of_its_own() -> None:
    """Whose checks are remembered, and for how long, shows nowhere: not in seeds, fields, or another model's bounds."""
    one, other = (admit([1], temperature=0.5, logit_bias={7: 1.0}) for _ in range(2))
    assert one.params.seed != other.params.seed and one.params.clone(seed=0) == other.params.clone(seed=0)
    assert one.params == SamplingParams.from_wire(one.params.to_wire())
    assert admit([1], temperature=0.5, seed=5).params.seed == 5
    small = SchedulerDriver(replace(SCRIPT, vocab_size=7))
    with pytest.raises(ValidationError, match="vocabulary of 7"):
        admit([1], driver=small, temperature=0.5, logit_bias={7: 1.0})
    hurried = SchedulerDriver(SCRIPT, max_queue_seconds=3.0)
    assert [admit([1], driver=driver).options.queue_timeout for driver in (None, hurried)] == [None, 3.0]


def test_prompt_embeds_are_checked_and_widened() -> None:
    driver = SchedulerDriver(SCRIPT)
    half = np.array([[1.0, -2.0, 0.5, 0.0]] * 2, np.float32)
    bits = (half.view(np.uint32) >> 16).astype(np.uint16)
    good = TensorFrame("bfloat16", (2, 4), bits.tobytes())
    request = driver.core.admit(make_add(0, [1, 1], embeds=good))
    assert request.prompt_embeds is not None and (request.prompt_embeds == half).all()
    other = driver.core.admit(make_add(0, [1, 1], embeds=TensorFrame("float32", (2, 4), bytes(32))))
    assert other.root != request.root != admit([1, 1]).root
    resumed = driver.core.admit(make_add(0, [1, 1, 5], {"emitted": 1}, embeds=good))
    assert resumed.prompt_embeds is not None and resumed.num_prompt == 2
    for frame in (
        TensorFrame("float32", (2, 5), bytes(40)),
        TensorFrame("float16", (2, 4), bytes(16)),
        TensorFrame("float32", (2, 4), np.full(8, np.inf, np.float32).tobytes()),
    ):
        with pytest.raises(ValidationError, match="prompt_embeds"):
            driver.core.admit(make_add(0, [1, 1], embeds=frame))


def test_the_queue_is_bounded_in_requests_and_bytes() -> None:
    driver = SchedulerDriver(SCRIPT, max_num_queued_reqs=3, max_num_seqs=1, max_num_queued_bytes=1000)
    driver.add(0, [1, 2], n=2)
    driver.add(2, [1, 2])
    with pytest.raises(Overloaded, match="max_num_queued_reqs 3"):
        driver.add(3, [1, 2])
    with pytest.raises(ValidationError, match="n: 4 is above"):
        driver.add(3, [1, 2], n=4)
    driver.run()
    driver.add(4, [1] * 60, max_tokens=1)
    driver.core.requests.queued_out_bytes -= 2000
    with pytest.raises(Overloaded, match="max_num_queued_bytes 1000"):
        admit([1], driver=driver)
    driver.core.requests.queued_out_bytes += 2000
    driver.run()


def test_a_draining_engine_takes_nothing_new_and_finishes_the_rest() -> None:
    driver = SchedulerDriver(SCRIPT)
    driver.add(0, [1, 2], max_tokens=30, ignore_eos=True, seed=3)
    driver.step()
    driver.core.drain()
    with pytest.raises(Overloaded, match="shutting down"):
        driver.add(1, [1])
    driver.run()
    driver.check_all()


def test_minus_one_is_the_whole_vocabulary_where_max_logprobs_lets_it() -> None:
    for most, asked, count in ((-1, -1, 100), (100, -1, 100), (70, 70, 70)):
        params = admit([1], driver=SchedulerDriver(SCRIPT, max_logprobs=most), logprobs=asked).params
        assert (params.logprobs, params.prompt_logprobs) == (count, None)
    with pytest.raises(ValidationError, match=r"^logprobs: 100 is above max_logprobs 99; start with more, or -1$"):
        admit([1], driver=SchedulerDriver(SCRIPT, max_logprobs=99), logprobs=-1)


def test_log_probabilities_of_a_prompt_must_fit_into_a_message() -> None:
    """What the client checks, too: -1 counts as the vocabulary."""
    driver = SchedulerDriver(replace(SCRIPT, vocab_size=1 << 20), max_logprobs=-1)
    admit([1] * 16, driver=driver, prompt_logprobs=-1)
    with pytest.raises(ValidationError, match=r"^prompt_logprobs: 1048576 for 17 tokens is too much"):
        admit([1] * 17, driver=driver, prompt_logprobs=-1)
    admit([1] * 17, {"emitted": 1}, driver=driver, prompt_logprobs=-1)
