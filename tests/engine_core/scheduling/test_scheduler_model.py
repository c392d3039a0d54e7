"""Random scenarios against the exact answer: whatever the scheduler does, tokens are those of a request alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_runner import Script
from tests.support.scheduler_driver import SchedulerDriver

from wavecore.engine_core import plan as step_plan
from wavecore.engine_core.plan import StepPlan, report_values, room_for_many
from wavecore.transport.wire.messages import FinishReason

VOCAB = 13
NAMES = (
    *("n", "max_tokens", "min_tokens", "temperature", "seed", "ignore_eos", "stop_token_ids"),
    *("logprobs", "prompt_logprobs"),
)

configs = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 48),
        "num_gpu_blocks_override": st.integers(8, 24),
        "block_size": st.sampled_from([4, 8]),
        "enable_prefix_caching": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.01, 0.3]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority", "hybrid"]),
        "ageing_seconds": st.just(0.001),
        "async_scheduling": st.booleans(),
        "swap_space_gib": st.sampled_from([0.0, 1.0]),
        "transfer_steps": st.integers(0, 3),
        "oom_at_steps": st.just([]) | st.lists(st.integers(0, 30), min_size=1, max_size=4),
    }
)

# Few first tokens and a repeating pattern, so that prefixes are shared often.
prompts = st.tuples(st.integers(1, 2), st.integers(1, 24), st.lists(st.integers(1, VOCAB - 1), max_size=3)).map(
    lambda t: ([t[0], 5, 6, 7] * 6)[: t[1]] + t[2]
)

requests = st.fixed_dictionaries(
    {
        "at": st.integers(0, 40),
        "prompt": prompts,
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.integers(1, 20),
        "min_tokens": st.just(0) | st.just(1),
        "temperature": st.sampled_from([0.0, 1.0]),
        "seed": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, VOCAB - 1), max_size=2),
        "priority": st.integers(-1, 1),
        "salt": st.sampled_from(["", "a", "b"]),
        "abort_at": st.none() | st.none() | st.integers(0, 60),
        "client": st.sampled_from([b"c" * 16, b"d" * 16]),
    }
)


def play(
    config: dict[str, Any], plans: list[dict[str, Any]], prepare: Callable[[SchedulerDriver], object] = lambda _: None
) -> SchedulerDriver:
    faults = {"oom_at_steps": config["oom_at_steps"]}
    lag = config["transfer_steps"]
    script = Script(vocab_size=VOCAB, num_host_blocks=6, max_model_len=48, transfer_steps=lag, faults=faults)
    scripted = ("oom_at_steps", "transfer_steps")
    driver = SchedulerDriver(script, **{name: value for name, value in config.items() if name not in scripted})
    prepare(driver)
    handles: dict[int, dict[str, Any]] = {i * 8: plan for i, plan in enumerate(plans)}
    last = max((max(p["at"], p["abort_at"] or 0) for p in plans), default=0)
    for now in range(last + 1):
        for handle, plan in handles.items():
            if plan["at"] == now:
                options = {"priority": plan["priority"], **({"cache_salt": plan["salt"]} if plan["salt"] else {})}
                driver.add(
                    handle,
                    plan["prompt"],
                    options,
                    plan["client"],
                    **{name: plan[name] for name in NAMES if name in plan},
                )
            if plan["abort_at"] == now:
                driver.core.abort(plan["client"], range(handle, handle + plan["n"]))
                driver.core.utilities.check_integrity()
        driver.step()
    driver.run()
    return driver


def judge(driver: SchedulerDriver, plans: list[dict[str, Any]]) -> None:
    for i, plan in enumerate(plans):
        for handle in range(i * 8, i * 8 + plan["n"]):
            tokens, finish = driver.expected(handle)
            got = driver.outputs.get(handle, [])
            if driver.finish[handle] is FinishReason.ABORT:
                assert plan["abort_at"] is not None and got == tokens[: len(got)]
            elif driver.finish[handle] is FinishReason.ERROR:  # out of memory again, when it was alone in a step
                assert len(driver.runner.script.faults["oom_at_steps"]) > 1 and got == tokens[: len(got)]
            else:
                assert (got, driver.finish[handle]) == (tokens, finish), f"handle {handle}"
                assert driver.extras[handle]["seed"] == plan["seed"]


@settings(max_examples=120)
@given(
    configs,
    st.lists(requests, min_size=1, max_size=9).map(
        lambda plans: [{**p, "min_tokens": min(p["min_tokens"], p["max_tokens"])} for p in plans]
    ),
)
def test_any_scenario_gives_the_tokens_of_each_request_alone(
    config: dict[str, Any], plans: list[dict[str, Any]]
) -> None:
    judge(play(config, plans), plans)


twins = st.fixed_dictionaries(
    {
        "at": st.integers(0, 12),
        "prompt": st.integers(3, 17).map(lambda n: ([1, 5, 6, 7] * 6)[:n]),
        "n": st.integers(1, 4),
        "max_tokens": st.integers(1, 16),
        "min_tokens": st.just(0),
        "temperature": st.just(1.0),
        "seed": st.integers(0, 1),
        "ignore_eos": st.just(True),
        "stop_token_ids": st.just([]),
        "priority": st.integers(0, 2),
        "salt": st.just(""),
        "abort_at": st.none() | st.integers(0, 20),
        "client": st.just(b"c" * 16),
    }
)
tight = st.fixed_dictionaries(
    {
        "max_num_seqs": st.integers(2, 5),
        "max_num_batched_tokens": st.integers(5, 12),
        "num_gpu_blocks_override": st.integers(9, 14),
        "block_size": st.just(4),
        "watermark": st.just(0.0),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "swap_space_gib": st.sampled_from([0.0, 1.0]),
        "transfer_steps": st.integers(0, 3),
        "oom_at_steps": st.just([]) | st.lists(st.integers(0, 30), min_size=1, max_size=4),
    }
)


@settings(max_examples=80)
@given(tight, st.lists(twins, min_size=2, max_size=6))
def test_choices_of_one_prompt_in_a_tiny_cache(config: dict[str, Any], plans: list[dict[str, Any]]) -> None:
    """Every prompt is a prefix of one text, so blocks are shared, copied, evicted and swapped all the time."""
    judge(play(config, plans), plans)


counts = st.sampled_from([None, 1, 6, VOCAB, -1])
reporting = requests.flatmap(
    lambda plan: st.fixed_dictionaries({"logprobs": counts, "prompt_logprobs": counts}).map(lambda asked: plan | asked)
)


def watch_reports(driver: SchedulerDriver) -> None:
    """No step reports more than a step's output has room for. One of the clients does not read now and then."""
    launch, room, begun = driver.runner.launch, room_for_many(driver.runner.info), {}

    def counting(plan: StepPlan | None, *more: Any) -> Any:
        assert plan is not None and len({new.slot for new in plan.new_requests}) == len(plan.new_requests)
        begun.update({new.slot: new for new in plan.new_requests})
        values = 0
        for slot, start, end, samples in zip(plan.slots, plan.starts, plan.ends, plan.samples, strict=True):
            new = begun[slot]
            values += report_values(new.params.logprobs) * samples
            values += report_values(new.params.prompt_logprobs) * max(0, min(end, new.num_prompt - 1) - start)
        assert values <= room
        return launch(plan, *more)

    driver.runner.launch = counting  # type: ignore[method-assign]
    driver.core.scheduler.is_behind = lambda client: client == b"d" * 16 and driver.steps % 5 > 0


@settings(max_examples=30)
@given(configs, st.lists(reporting, min_size=1, max_size=7))
def test_reports_of_many_alternatives_share_what_a_step_has_room_for(
    config: dict[str, Any], plans: list[dict[str, Any]]
) -> None:
    """Of 13 tokens more than three are many here, and a step has room for the reports of two."""
    plans = [{**plan, "min_tokens": min(plan["min_tokens"], plan["max_tokens"])} for plan in plans]
    with patch.multiple(step_plan, MAX_LOGPROBS=3, MANY_VALUES=1):
        driver = play({**config, "max_logprobs": -1}, plans, watch_reports)
    judge(driver, plans)
    for i, plan in enumerate(plans):
        if driver.finish[i * 8] in (FinishReason.STOP, FinishReason.LENGTH):
            frames = driver.frames.get(i * 8, {})
            for name, positions in (
                ("logprobs", len(driver.outputs[i * 8])),
                ("prompt_logprobs", len(plan["prompt"]) - 1),
            ):
                width = 1 + (VOCAB if plan[name] == -1 else plan[name] or 0)
                shapes = [frame.shape for frame in frames.get(name, [])[::3]]
                assert sum(shape[0] for shape in shapes) == (0 if plan[name] is None else positions)
                assert {shape[1] for shape in shapes} <= {width}
