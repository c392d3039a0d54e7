"""Single rules of the scheduler, most of them reported bugs of other engines turned into tests."""

from __future__ import annotations

import gc
import logging
import random
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scripted_runner import Script
from tests.support.scheduler_driver import CLIENT, Clock, SchedulerDriver, make_add

from wavecore.engine_core.kv_cache.transfers import Transfers
from wavecore.engine_core.plan import NewRequest, OutOfMemory, StepPlan, StepResult
from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling.step_budget import ALONE_SECONDS, PATIENCE_SECONDS, StepBudget
from wavecore.transport.wire.messages import FinishReason

SCRIPT = Script(vocab_size=97, eos_token_id=[], max_model_len=256, num_host_blocks=40)
SLOW = replace(SCRIPT, transfer_steps=6)  # swaps are done six steps after the one that began them


def prompt(seed: int, length: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(1, 97, length)]


def small(script: Script = SCRIPT, **config: Any) -> SchedulerDriver:
    return SchedulerDriver(script, **{"block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 16, **config})


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("swap", [0.0, 1.0])
def test_eight_blocks_and_six_long_requests(asynchronous: bool, swap: bool) -> None:
    """Chunked prefill, preemption and two steps in flight give the tokens of a large cache."""
    driver = small(num_gpu_blocks_override=9, async_scheduling=asynchronous, swap_space_gib=swap)
    for handle in range(6):
        driver.add(handle, prompt(handle, 12), max_tokens=18, seed=handle)
    driver.run()
    driver.check_all()
    totals = driver.core.requests.totals
    assert totals.preemptions > 0
    assert (totals.swapped_tokens > 0) == bool(swap)
    assert driver.core.requests.kv.queries == 6 * 12  # each prompt once, however often it was preempted
    if swap:  # what came back from the host is not computed again
        assert totals.prompt_tokens <= 6 * 12 + totals.preemptions and totals.recomputed_tokens == 0


def test_no_waiting_request_starts_in_a_step_where_somebody_made_room() -> None:
    driver = small(num_gpu_blocks_override=12, max_num_batched_tokens=64)
    for handle in range(9):
        driver.add(handle, prompt(handle, 1 + handle), max_tokens=18)
    before = 0
    while driver.core.has_work:
        steps = driver.core.requests.totals.steps
        driver.step()
        preempted = driver.core.requests.totals.preemptions - before
        before += preempted
        if preempted and driver.core.requests.totals.steps > steps:
            assert driver.core.in_flight[-1][0].new_requests == ()
    driver.check_all()
    assert before > 2


@pytest.mark.parametrize("caching", [False, True])
def test_a_swapped_request_may_end_before_its_copy_is_done(caching: bool) -> None:
    """Its blocks, here and on the host, stay the transfer's."""
    driver = small(
        SLOW, num_gpu_blocks_override=12, swap_space_gib=1.0, scheduling_policy="priority",
        enable_prefix_caching=caching,
    )  # fmt: skip
    driver.add(0, prompt(0, 12), {"priority": 5}, max_tokens=18)
    driver.add(2, prompt(2, 3), {"priority": 1}, max_tokens=12)
    for _ in range(6):
        driver.step()
    driver.add(1, prompt(1, 24), {"priority": 0}, max_tokens=5)
    driver.step()
    requests = driver.core.requests
    assert requests.totals.swapped_tokens > 0
    driver.core.abort(CLIENT, [0])
    driver.core.utilities.check_integrity()
    assert requests.kv.host.num_free < 40 and requests.kv.leaving > 0
    driver.run()
    for handle in (1, 2):
        assert (driver.outputs[handle], driver.finish[handle]) == driver.expected(handle)


def swapped_out(script: Script, **config: Any) -> SchedulerDriver:
    """Request 0 is in host memory, 1 and 2 run."""
    driver = small(script, num_gpu_blocks_override=24, swap_space_gib=1.0, scheduling_policy="priority", **config)
    driver.add(0, prompt(0, 20), {"priority": 5}, max_tokens=18)
    driver.add(1, prompt(1, 3), {"priority": 1}, max_tokens=40)
    for _ in range(5):
        driver.step()
    driver.add(2, prompt(2, 60), {"priority": 0}, max_tokens=1)
    step_until(driver, 0, State.PREEMPTED)
    assert driver.core.requests.totals.swapped_tokens > 20
    return driver


def step_until(driver: SchedulerDriver, handle: int, state: State) -> None:
    for _ in range(100):
        if driver.core.requests.by_client[CLIENT][handle].state is state:
            return
        driver.step()
    raise AssertionError(f"request {handle} is never {state.value}")


def test_what_is_told_once_is_not_told_again_after_a_preemption() -> None:
    driver = small(num_gpu_blocks_override=9)
    for handle in range(6):
        driver.add(handle, prompt(handle, 12), max_tokens=18)
    told: list[int] = []
    while driver.core.has_work:
        for columns in driver.step().values():
            told += [int(columns.handles[i]) for i, extras in columns.extras.items() if "seed" in extras]
    assert driver.core.requests.totals.preemptions > 0 and sorted(told) == list(range(6))


def test_plans_never_run_before_transfers_that_earlier_ones_had_to_wait_for() -> None:
    """Word of an older transfer may come later than the decision to run behind a newer one."""
    transfers = Transfers()
    transfers.land(5)
    transfers.land(3)
    assert transfers.after == 5


def test_what_is_in_host_memory_is_computed_again_after_a_reset() -> None:
    driver = swapped_out(SLOW, enable_prefix_caching=False)
    request = driver.core.requests.by_client[CLIENT][0]
    assert request.host_blocks and request.swapped
    before = driver.core.requests.totals.prompt_tokens
    driver.core.requests.reset_prefix_cache()
    assert request.host_blocks == [] and request.swapped == 0
    driver.run()
    driver.check_all()
    assert driver.core.requests.totals.prompt_tokens - before >= 20


def test_others_run_on_while_blocks_come_back_from_the_host() -> None:
    driver = swapped_out(SLOW, enable_prefix_caching=False)
    request = driver.core.requests.by_client[CLIENT][0]
    step_until(driver, 0, State.LOADING)
    [report] = [entry for entry in driver.core.utilities.debug_requests() if entry["handle"] == 0]
    assert report["state"] == "loading" and "host memory" in report["reason"]
    steps, seen = 0, len(driver.outputs[1])
    while request.state is State.LOADING:
        driver.step()
        steps += 1
    assert steps >= SLOW.transfer_steps and len(driver.outputs[1]) - seen == steps
    driver.run()
    driver.check_all()
    assert driver.core.requests.totals.recomputed_tokens == 0


def test_a_transfer_that_never_seems_to_end_holds_up_only_who_needs_it() -> None:
    """When nothing else can run, the device waits for it, not the plan."""
    never = replace(SCRIPT, transfer_steps=1 << 30)
    driver = swapped_out(never)
    driver.run(limit=200)
    driver.check_all()
    driver = small(never, num_gpu_blocks_override=9, swap_space_gib=1.0, enable_prefix_caching=False)
    for handle in range(6):
        driver.add(handle, prompt(handle, 12), max_tokens=18)
    driver.run(limit=500)
    driver.check_all()


def test_nobody_is_pushed_out_for_blocks_that_are_coming_free() -> None:
    """One push-out is enough, however long the copy takes."""
    preemptions = []
    for script in (SCRIPT, SLOW):
        driver = small(script, num_gpu_blocks_override=21, swap_space_gib=1.0, enable_prefix_caching=False)
        for handle in range(4):
            driver.add(handle, prompt(handle, 14), max_tokens=12)
        driver.run()
        driver.check_all()
        preemptions.append(driver.core.requests.totals.preemptions)
    assert preemptions == [1, 1]


def test_an_urgent_request_waits_for_nobodys_blocks_to_come_back() -> None:
    """All places are taken, one by a request that loads: the other one makes room."""
    driver = small(
        replace(SCRIPT, transfer_steps=50), max_num_seqs=2, num_gpu_blocks_override=100, swap_space_gib=1.0,
        scheduling_policy="priority", enable_prefix_caching=False,
    )  # fmt: skip
    driver.add(0, prompt(0, 20), {"priority": 5}, max_tokens=200)
    driver.add(1, prompt(1, 40), {"priority": 6}, max_tokens=200)
    for _ in range(10):
        driver.step()
    driver.add(2, prompt(2, 8), {"priority": 0}, max_tokens=3)
    step_until(driver, 1, State.LOADING)
    begin = driver.steps
    driver.add(3, prompt(3, 8), {"priority": 0}, max_tokens=3)
    driver.run()
    driver.check_all()
    assert driver.first_step[3] - begin < 10


def test_what_was_copied_is_not_computed_again() -> None:
    """Not of a half-computed prompt, nor of a request that has just come back and is pushed out before it ran."""
    for seed in range(40):
        rng = random.Random(seed)
        script = replace(SCRIPT, max_model_len=64, num_host_blocks=60, transfer_steps=rng.choice([0, 1, 3]))
        driver = small(
            script, num_gpu_blocks_override=rng.randint(17, 26), max_num_seqs=4, max_num_batched_tokens=32,
            enable_prefix_caching=False, swap_space_gib=1.0, watermark=0.0,
        )  # fmt: skip
        for handle in range(6):
            driver.add(handle, prompt(handle, rng.randint(4, 20)), max_tokens=rng.randint(10, 36))
            for _ in range(rng.randint(0, 6)):
                driver.step()
        driver.run()
        driver.check_all()
        assert driver.core.requests.totals.recomputed_tokens == 0


def test_an_urgent_request_pushes_out_no_more_than_it_needs() -> None:
    """The blocks of the first that makes room come free a few steps later."""
    driver = small(
        SLOW, num_gpu_blocks_override=25, swap_space_gib=1.0, scheduling_policy="priority",
        enable_prefix_caching=False,
    )  # fmt: skip
    for handle in range(3):
        driver.add(handle, prompt(handle, 24), {"priority": 5}, max_tokens=8)
    for _ in range(7):
        driver.step()
    driver.add(9, prompt(9, 28), {"priority": 0}, max_tokens=1)
    driver.run()
    driver.check_all()
    assert driver.core.requests.totals.preemptions == 1


def test_two_prompts_of_most_of_the_cache_do_not_fight() -> None:
    """Each holds 60 % of the blocks; the second waits, nothing is computed twice."""
    driver = small(num_gpu_blocks_override=21, enable_prefix_caching=False)
    for handle in range(5):
        driver.add(handle, prompt(handle, 48), max_tokens=2)
    driver.run()
    driver.check_all()
    assert driver.core.requests.totals.preemptions == 0
    assert driver.core.requests.totals.prompt_tokens == 5 * 48


def test_rows_that_sit_out_at_random_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running request without a row in some steps."""
    driver = small(num_gpu_blocks_override=40)
    rng = random.Random(3)
    whole = driver.core.scheduler._running

    def some() -> Any:
        slots, lens, left = whole()
        keep = np.array([rng.random() < 0.6 for _ in slots], bool)
        return slots[keep], lens[keep], left

    monkeypatch.setattr(driver.core.scheduler, "_running", some)
    for handle in range(8):
        driver.add(handle, prompt(handle, 5 + handle * 3), max_tokens=12)
    driver.run()
    driver.check_all()


@pytest.mark.parametrize(
    "rounds", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])], ids=["some", "many"]
)
def test_aborts_at_any_moment(rounds: int) -> None:
    """Requests in every state, at every step boundary, twice, unknown ones; nothing leaks."""
    rng = random.Random(rounds)
    driver = small(SLOW, num_gpu_blocks_override=14, swap_space_gib=1.0, scheduling_policy="priority")
    handle = 0
    states = set()
    for _ in range(rounds):
        if len(driver.core.requests.all()) < 12:
            n = rng.choice([1, 1, 3])
            driver.add(handle, prompt(rng.randrange(4), rng.randrange(1, 20)), {"priority": rng.randrange(3)}, n=n)
            handle += 4
        if rng.random() < 0.7 and (here := driver.core.requests.all()):
            victim = rng.choice(here)
            states.add(victim.state)
            driver.core.abort(CLIENT, [victim.handle, victim.handle, 123_456])
            driver.core.utilities.check_integrity()
        driver.step()
    driver.run()
    assert states == set(State) - {State.ENDED, State.DRAINING}  # with two steps in flight, draining ends in its turn
    assert driver.finish.keys() == driver.sent.keys()


def test_a_long_list_of_handles_is_no_long_work() -> None:
    driver = small(num_gpu_blocks_override=30)
    for handle in range(3):
        driver.add(handle, prompt(handle, 3), max_tokens=9)
    driver.core.abort(CLIENT, np.arange(2, 500_000, dtype=np.uint32))
    driver.core.abort(b"x" * 16, np.arange(5, dtype=np.uint32))
    driver.run()
    assert driver.finish == {0: FinishReason.LENGTH, 1: FinishReason.LENGTH, 2: FinishReason.ABORT}


def test_abort_and_a_new_request_at_once() -> None:
    """The new one is never hit, even under the handle of the old one."""
    driver = small(num_gpu_blocks_override=30, max_num_batched_tokens=64)
    for i in range(200):
        driver.add(2 * i, prompt(1, 9), max_tokens=50)
        driver.step()
        driver.core.abort(CLIENT, [2 * i])
        driver.add(2 * i + 1, prompt(2, 9), max_tokens=2)
        driver.step()
    driver.run()
    for i in range(200):
        assert driver.finish[2 * i] is FinishReason.ABORT
        assert (driver.outputs[2 * i + 1], driver.finish[2 * i + 1]) == driver.expected(2 * i + 1)


def test_a_slot_is_free_only_after_its_last_step_in_flight() -> None:
    """Its blocks are free at once, the slot when the steps that touch it came back."""
    driver = small(max_num_seqs=1, num_gpu_blocks_override=30)
    driver.add(0, prompt(0, 3), max_tokens=50)
    driver.step()
    driver.step()
    driver.core.abort(CLIENT, [0])
    assert driver.core.requests.slots.free == [] and driver.core.requests.kv.device.num_free == 29
    driver.add(1, prompt(1, 3), max_tokens=3)
    driver.run()
    assert (driver.outputs[1], driver.finish[1]) == driver.expected(1)


def test_a_new_request_is_in_the_very_next_plan() -> None:
    """Nobody waits for a batch to end."""
    driver = small(num_gpu_blocks_override=60)
    driver.add(0, prompt(0, 3), max_tokens=50)
    for _ in range(5):
        driver.step()
    driver.add(1, prompt(1, 3), max_tokens=3)
    plan = driver.core.scheduler.schedule()
    assert plan is not None and plan.num_rows == 2


def test_a_prompt_that_found_no_room_is_not_looked_up_in_every_step() -> None:
    """Its hashes and the blocks under them cost as much as it is long; nothing has changed while no block came free."""
    driver = small(num_gpu_blocks_override=22, watermark=0.0)
    tries: list[int] = []
    start = driver.core.requests.start

    def counted(request: Request, reserve: int) -> NewRequest | None:
        tries.append(request.handle)
        return start(request, reserve)

    driver.core.requests.start = counted  # type: ignore[method-assign]
    driver.add(0, prompt(0, 12), max_tokens=40)
    driver.add(1, prompt(1, 72), max_tokens=4)
    driver.run()
    driver.check_all()
    assert tries[0] == 0 and 2 <= len(tries) <= 4, tries


def test_the_last_in_line_skips_a_step_rather_than_losing_its_blocks() -> None:
    driver = small(num_gpu_blocks_override=9, enable_prefix_caching=False, max_num_batched_tokens=64)
    driver.add(0, prompt(0, 15), max_tokens=2)
    driver.add(1, prompt(1, 15), max_tokens=17)
    rows = []
    while driver.core.has_work:
        driver.step()
        if driver.core.in_flight:
            rows.append(driver.core.in_flight[-1][0].num_rows)
    driver.check_all()
    assert rows[:2] == [2, 2] and driver.core.requests.totals.preemptions == 0


def test_stop_rules() -> None:
    """Stop ids and eos end with the token that stopped it; not before min_tokens; eos may be ignored."""
    script = Script(vocab_size=50, eos_token_id=[7, 8], scripts={"1": [5, 8, 6, 9, 4, 7, 3]})
    driver = SchedulerDriver(script)
    driver.add(0, [1], max_tokens=10)
    driver.add(1, [1], max_tokens=10, ignore_eos=True, stop_token_ids=[9])
    driver.add(2, [1], max_tokens=10, min_tokens=2)
    driver.add(3, [1], max_tokens=10, min_tokens=4, stop_token_ids=[4, 9, 3])
    driver.add(4, [1], max_tokens=4, ignore_eos=True)
    driver.add(5, [1], max_tokens=2)
    driver.run()
    assert driver.outputs == {
        0: [5, 8], 1: [5, 8, 6, 9], 2: [5, 8, 6, 9, 4, 7], 3: [5, 8, 6, 9, 4], 4: [5, 8, 6, 9], 5: [5, 8],
    }  # fmt: skip
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    assert driver.finish == {0: stop, 1: stop, 2: stop, 3: stop, 4: length, 5: stop}
    assert [driver.extras[h].get("stop_token") for h in range(6)] == [None, 9, None, 4, None, None]


def test_the_model_s_own_end_is_no_stop_reason_where_it_is_listed_too() -> None:
    driver = SchedulerDriver(Script(vocab_size=50, eos_token_id=[7, 8], scripts={"1": [5, 8, 6, 9]}))
    driver.add(0, [1], max_tokens=10, stop_token_ids=[9, 8])
    driver.add(1, [1], max_tokens=10, stop_token_ids=[9, 8], ignore_eos=True)
    driver.run()
    assert driver.outputs == {0: [5, 8], 1: [5, 8]}
    assert [driver.extras[h].get("stop_token") for h in range(2)] == [None, 8]


def test_one_request_with_many_stop_ids_costs_others_nothing_once_it_left() -> None:
    driver = small(num_gpu_blocks_override=60)
    driver.add(0, prompt(0, 3), max_tokens=9, stop_token_ids=[90, 91])
    driver.add(1, prompt(1, 3), max_tokens=5, stop_token_ids=list(range(60, 90)))
    driver.add(2, prompt(2, 3), max_tokens=9, stop_token_ids=[92])
    driver.step()
    assert driver.core.requests.slots.stop_ids.shape[1] == 30
    driver.run()
    driver.check_all()
    assert driver.core.requests.slots.stop_ids.shape[1] == 8


def test_a_faulty_row_ends_alone_and_leaves_the_prefix_cache() -> None:
    """NaN in one row: that request fails, and its blocks are found by nobody."""
    driver = SchedulerDriver(Script(eos_token_id=[], faults={"nan_token": 66}), block_size=4)
    driver.add(0, [66, 1, 2, 3, 4], max_tokens=5)
    driver.add(1, [1, 2, 3, 4, 5], max_tokens=5)
    driver.run()
    assert driver.finish[0] is FinishReason.ERROR and driver.extras[0]["code"] == "numerical"
    assert (driver.outputs[1], driver.finish[1]) == driver.expected(1)
    driver.add(2, [66, 1, 2, 3, 4], max_tokens=5)
    driver.step()
    assert driver.core.requests.kv.hits == 0
    driver.run()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_step_that_failed_is_computed_again(asynchronous: bool) -> None:
    """With steps in flight and requests swapped out, all give the same tokens."""
    script = Script(eos_token_id=[], num_host_blocks=9, faults={"oom_at_steps": [5]})
    driver = SchedulerDriver(
        script, block_size=4, num_gpu_blocks_override=12, swap_space_gib=1.0, async_scheduling=asynchronous
    )
    for handle in range(4):
        driver.add(handle, [1 + handle] * 6, max_tokens=12)
    driver.run()
    driver.check_all()
    assert driver.core.requests.totals.recomputed_tokens > 0


def sizes(driver: SchedulerDriver) -> list[tuple[int, int]]:
    """Tokens of each step and the budget it was planned with, until all is done."""
    seen: list[tuple[int, int]] = []
    while driver.core.has_work:
        driver.step()
        if driver.core.in_flight:
            seen.append((driver.core.in_flight[-1][0].num_tokens, driver.core.scheduler.budget.tokens))
    return seen


def test_out_of_memory_once_halves_the_steps_for_a_while() -> None:
    driver = small(replace(SCRIPT, faults={"oom_at_steps": [1]}), num_gpu_blocks_override=60)
    for handle in range(4):
        driver.add(handle, prompt(handle, 8), max_tokens=200)
    steps = sizes(driver)
    driver.check_all()
    assert max(tokens for tokens, _ in steps) == 16 and all(tokens <= budget for tokens, budget in steps)
    budgets = [budget for _, budget in steps]
    assert budgets[0] == 16 and min(budgets) == 8 and budgets[-1] == 16


def fit_at_most(driver: SchedulerDriver, tokens: int) -> None:
    """Larger steps run out of memory, however often they are tried."""
    run = driver.runner.run

    def short_of_memory(plan: StepPlan) -> StepResult:
        if plan.num_tokens > tokens:
            driver.runner.queue.clear()
            raise OutOfMemory("told to")
        return run(plan)

    driver.runner.run = short_of_memory  # type: ignore[method-assign]


def test_out_of_memory_cuts_decode_rows_too_and_then_nobody_ends() -> None:
    """Steps of more than three tokens do not fit, however often they are tried."""
    driver = small(num_gpu_blocks_override=60)
    fit_at_most(driver, 3)
    for handle in range(8):
        driver.add(handle, prompt(handle, 5 + handle), max_tokens=30)
    driver.run()
    driver.check_all()


def test_the_first_in_line_moves_however_small_the_steps_become() -> None:
    driver = small(num_gpu_blocks_override=11, max_num_batched_tokens=4, max_num_seqs=4, scheduling_policy="priority")
    for handle in range(4):
        driver.add(handle, prompt(handle, 9), {"priority": 4 - handle}, max_tokens=20)
        driver.step()
        driver.step()
    for _ in range(3):
        driver.core.scheduler.budget.shrink(4)
    assert driver.core.scheduler.budget.tokens == 1
    driver.add(9, prompt(9, 25), {"priority": 0}, max_tokens=5)
    driver.run()
    driver.check_all()


def test_out_of_memory_again_ends_whose_options_made_the_step_big() -> None:
    """Not the longest: a client that asks for much pays for it. It shows when full steps are tried again."""
    script = Script(eos_token_id=[], faults={"oom_token": 66})
    driver = SchedulerDriver(script, max_num_batched_tokens=512)
    for handle in range(4):
        driver.add(handle, [1 + handle] * 60, max_tokens=400, logprobs=1 if handle == 2 else None)
    driver.add(9, [66] * 20, max_tokens=12, prompt_logprobs=5, logprobs=5)
    driver.run()
    assert driver.finish.pop(9) is FinishReason.ERROR and driver.extras[9]["code"] == "resource"
    assert "of its rows this request's needs most memory, for prompt_logprobs" in driver.extras[9]["message"]
    assert driver.core.scheduler.budget.tokens == 512
    del driver.sent[9]
    driver.check_all()


def test_nobody_is_blamed_while_steps_are_large() -> None:
    """A prompt makes them so, not the log-probabilities of a few tokens."""
    driver = SchedulerDriver(replace(SCRIPT, max_model_len=8192, num_blocks=600), check=False)
    fit_at_most(driver, 300)
    for handle in range(3):
        driver.add(handle, prompt(handle, 3), max_tokens=40, logprobs=1)
    driver.add(9, prompt(9, 6000), max_tokens=4)
    driver.run()
    driver.check_all()


def test_a_prompt_of_thousands_of_small_steps_ends() -> None:
    """Larger steps are tried now and then, and each time that they fail it begins again: not for ever."""
    driver = SchedulerDriver(replace(SCRIPT, max_model_len=4096), check=False)
    fit_at_most(driver, 1)
    driver.add(0, prompt(0, 1500), max_tokens=2)
    driver.run()
    driver.check_all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_request_that_runs_out_of_memory_alone_ends(asynchronous: bool) -> None:
    """Without options to blame steps shrink until it is alone: nobody else ends."""
    script = Script(eos_token_id=[], faults={"oom_token": 66})
    driver = SchedulerDriver(script, max_num_batched_tokens=512, async_scheduling=asynchronous)
    for handle in range(4):
        driver.add(handle, [1 + handle] * 6, max_tokens=12)
    driver.add(9, [66] * 4, max_tokens=12)
    driver.run()
    assert driver.finish.pop(9) is FinishReason.ERROR and driver.extras[9]["code"] == "resource"
    del driver.sent[9]
    driver.check_all()


def test_a_step_budget_shrinks_at_once_and_grows_back_after_a_while() -> None:
    clock = Clock()
    budget = StepBudget(100, clock)

    def seconds_until_it_grows() -> float:
        begin, before = clock.now, budget.tokens
        while budget.tokens == before:
            clock.now += 0.05
            budget.step_fitted()
        assert budget.tokens == 100
        return clock.now - begin

    budget.shrink(30)
    assert budget.tokens == 15 and budget.failures == 1
    budget.shrink(15)  # still the same burst
    assert budget.tokens == 7 and budget.failures == 1
    assert seconds_until_it_grows() == pytest.approx(PATIENCE_SECONDS, abs=0.06)
    for tries in range(1, 5):  # full steps do not fit: ever longer until the next try
        for size in (100, 50, 25):
            budget.shrink(size)
        assert budget.tokens == 12 and budget.failures == 1 + tries
        assert seconds_until_it_grows() == pytest.approx(PATIENCE_SECONDS * 2**tries, abs=0.06)
    clock.now += 2 * 86400.0
    budget.step_fitted()  # long without a fault: forgotten
    assert budget.failures == 0 and budget.tokens == 100
    budget.shrink(100)
    assert seconds_until_it_grows() == pytest.approx(PATIENCE_SECONDS, abs=0.06)


def test_what_cannot_be_made_smaller_is_tried_for_seconds() -> None:
    clock = Clock()
    budget = StepBudget(8, clock)
    tries = 0
    begin = clock.now
    while not budget.hopeless:
        assert not budget.paused
        budget.shrink(1)
        tries += 1
        while budget.paused:
            clock.now += 0.005
    assert ALONE_SECONDS <= clock.now - begin < ALONE_SECONDS + 1.0
    assert 20 < tries < 80
    budget.shrink(1)  # another one begins anew
    assert not budget.hopeless


def test_memory_that_stays_short_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    driver = small(replace(SCRIPT, faults={"oom_at_steps": list(range(40))}), num_gpu_blocks_override=60)
    driver.add(0, prompt(0, 8), max_tokens=4)
    sizes(driver)
    driver.check_all()
    cuts = [record for record in caplog.records if "steps are cut to" in record.getMessage()]
    failures = [record for record in caplog.records if "a step failed" in record.getMessage()]
    assert len(cuts) <= 6, "one a size"
    assert len([record for record in failures if record.levelno >= logging.ERROR]) <= 6


def test_steps_of_one_token_that_fail_are_tried_ever_less_often() -> None:
    clock = Clock()
    budget = StepBudget(8, clock)

    def pause() -> float:
        budget.shrink(1)
        begin = clock.now
        while budget.paused:
            clock.now += 0.001
        return clock.now - begin

    assert [pause() for _ in range(7)] == pytest.approx([0.01, 0.02, 0.04, 0.08, 0.1, 0.1, 0.1], abs=0.002)
    budget.shrink(1)
    budget.step_fitted()
    assert not budget.paused, "one fitted: nothing to wait for"
    assert pause() == pytest.approx(0.01, abs=0.002)


def test_a_request_is_at_fault_only_where_no_step_fits_for_seconds() -> None:
    clock = Clock()
    budget = StepBudget(8, clock)
    for _ in range(3):
        budget.shrink(1)
        clock.now += ALONE_SECONDS - 1.0
        budget.step_fitted()
    budget.shrink(1)
    clock.now += 2.0
    budget.shrink(1)
    assert not budget.hopeless
    clock.now += ALONE_SECONDS - 2.0
    budget.shrink(1)
    assert budget.hopeless and not budget.paused
    budget.shrink(4)  # said of the last step alone
    assert not budget.hopeless


def test_the_wait_for_full_steps_counts_from_the_last_failure_and_again_from_their_first_success() -> None:
    clock = Clock()
    budget = StepBudget(100, clock)
    budget.shrink(100)
    clock.now += PATIENCE_SECONDS * 0.75
    budget.shrink(50)
    clock.now += PATIENCE_SECONDS * 0.75
    budget.step_fitted()
    assert budget.tokens == 25
    clock.now += PATIENCE_SECONDS * 0.25
    for _ in range(2):
        budget.step_fitted()
        assert (budget.tokens, budget.failures) == (100, 1)
    clock.now += PATIENCE_SECONDS
    budget.step_fitted()
    assert budget.failures == 0


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("length", [7, 30])
def test_a_burst_out_of_memory_ends_nobody_and_is_over_in_seconds(asynchronous: bool, length: int) -> None:
    """Every step of a while fails, however small: somebody else held the memory."""
    script = replace(SCRIPT, max_model_len=4096, faults={"oom_at_steps": list(range(10, 10 + length))})
    driver = SchedulerDriver(script, async_scheduling=asynchronous, check=False)
    for handle in range(8):
        driver.add(handle, prompt(handle, 12), max_tokens=120, logprobs=1 if handle == 3 else None)
    budget = driver.core.scheduler.budget
    while not budget.failures:
        driver.step()
    began = driver.clock.now
    while budget.tokens < 8192:
        driver.step()
    assert driver.clock.now - began < 0.01 * length + 9.0 and budget.failures == 1
    driver.run()
    driver.check_all()


def test_any_other_exception_leaves_the_core() -> None:
    driver = SchedulerDriver(Script(faults={"raise_at_step": 1}), async_scheduling=False)
    driver.add(0, [1], max_tokens=5, ignore_eos=True)
    driver.step()
    with pytest.raises(RuntimeError, match="told to raise"):
        driver.step()


def test_plans_in_flight_are_never_written_to() -> None:
    """Everything that a plan or a result refers to stays as it was when it was launched."""
    driver = small(num_gpu_blocks_override=20)
    seen: list[tuple[StepPlan, list[bytes]]] = []

    def columns(plan: StepPlan) -> list[bytes]:
        names = ("slots", "starts", "query_lens", "samples", "table", "copies", "swap_out", "swap_in")
        return [getattr(plan, name).tobytes() for name in names] + [a.token_ids.tobytes() for a in plan.new_requests]

    run = driver.runner.run

    def keep(plan: StepPlan) -> StepResult:
        seen.append((plan, columns(plan)))
        return run(plan)

    driver.runner.run = keep  # type: ignore[method-assign]
    for handle in range(6):
        driver.add(handle, prompt(handle, 12), max_tokens=18)
    driver.run()
    assert len(seen) > 20 and all(columns(plan) == before for plan, before in seen)


def test_two_clients_see_only_their_own() -> None:
    driver = small(num_gpu_blocks_override=60)
    other = b"d" * 16
    for i in range(3):
        driver.add(i, prompt(i, 3), max_tokens=5)
        driver.add(10 + i, prompt(i, 4), client=other, max_tokens=4)
    got: dict[bytes, set[int]] = {CLIENT: set(), other: set()}
    while driver.core.has_work:
        for client, columns in driver.step().items():
            got[client].update(columns.handles.tolist())
    assert got == {CLIENT: {0, 1, 2}, other: {10, 11, 12}}
    driver.check_all()


def test_logprobs_of_several_clients_in_one_step_stay_with_their_rows() -> None:
    driver = small(num_gpu_blocks_override=60)
    for handle in range(6):
        client = (CLIENT, b"d" * 16)[handle % 2]
        wanted = None if handle == 3 else handle % 3
        driver.add(handle, prompt(handle, 3 + handle), client=client, max_tokens=4, logprobs=wanted)
    driver.run()
    driver.check_all()
    assert "logprobs" not in driver.frames.get(3, {})
    for handle in (0, 1, 2, 4, 5):
        frames = driver.frames[handle]["logprobs"]
        chosen = [int(np.frombuffer(frame.buffer, np.int32)[0]) for frame in frames[::3]]
        assert chosen == driver.outputs[handle] and frames[0].shape == (1, 1 + handle % 3)


def test_a_steady_step_touches_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """No block is crossed, nobody comes or ends: columns alone."""
    driver = SchedulerDriver(SCRIPT, check=False, block_size=128, num_gpu_blocks_override=100)
    for handle in range(32):
        driver.add(handle, prompt(handle, 10), max_tokens=60)
    for _ in range(5):
        driver.step()
    with monkeypatch.context() as patch:
        patch.setattr(driver.core.requests.slots, "at", None)
        patch.setattr(driver.core.requests.slots, "requests", None)
        for _ in range(40):
            assert driver.step()
    driver.run()
    driver.check_all()


def test_a_client_that_left_is_told_nothing() -> None:
    driver = small(num_gpu_blocks_override=60)
    driver.add(0, prompt(0, 3), max_tokens=50, n=3)
    driver.add(9, prompt(0, 3), client=b"d" * 16, max_tokens=9)
    driver.step()
    driver.core.abort_client(CLIENT)
    driver.core.abort_client(CLIENT)
    driver.run()
    assert set(driver.finish) == {9}


def test_everything_can_be_ended_with_an_error() -> None:
    driver = small(num_gpu_blocks_override=20)
    for handle in range(6):
        driver.add(handle, prompt(handle, 30), max_tokens=50)
    for _ in range(4):
        driver.step()
    driver.core.abort_all("engine_dead", "stopped")
    driver.run()
    assert all(driver.extras[handle] | {"code": "engine_dead", "message": "stopped"} == driver.extras[handle]
               for handle in range(6))  # fmt: skip


def test_the_same_handle_twice_is_one_request() -> None:
    driver = small(num_gpu_blocks_override=20)
    for _ in range(2):
        driver.add(0, prompt(0, 3), max_tokens=4, seed=1)
    driver.run()
    driver.check_all()


def test_a_request_that_claims_handles_of_others_is_refused() -> None:
    driver = small(num_gpu_blocks_override=30)
    driver.add(5, prompt(0, 9), max_tokens=9)
    driver.step()
    driver.core.add(driver.core.admit(make_add(4, [1, 2], n=3)))
    driver.run()
    assert [driver.finish.pop(handle) for handle in (4, 6)] == [FinishReason.ERROR] * 2
    assert driver.extras[4]["code"] == "validation" and "overlaps" in driver.extras[4]["message"]
    driver.check_all()


def test_nothing_grows_with_the_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maps, queues and pools are as large after many requests as their bounds say, and no object stays of any."""
    count = 1_000
    monkeypatch.setattr("wavecore.engine_core.loop.stats.MAX_TURNS", 100)  # kept for the trace: full at half of them
    driver = SchedulerDriver(SCRIPT, check=False, block_size=4, num_gpu_blocks_override=40, max_num_seqs=8)
    rng = random.Random(1)
    before = 0
    for handle in range(count):
        driver.add(handle, prompt(handle, rng.randrange(1, 20)), client=bytes([handle % 7]) * 16, max_tokens=3)
        driver.step()
        for kept in (driver.sent, driver.outputs, driver.extras, driver.finish, driver.first_step):
            kept.clear()
        if handle == count // 2:
            gc.collect()
            before = sys.getallocatedblocks()
    driver.run()
    requests = driver.core.requests
    assert len(requests.clients) <= 7 and not requests.by_client and len(requests.waiting._heap) <= 64
    assert requests.kv.device.num_cached <= 39 and requests.slots.stop_ids.shape[1] == 1
    gc.collect()
    assert sys.getallocatedblocks() - before < count // 5, "one object of each request makes count // 2"
