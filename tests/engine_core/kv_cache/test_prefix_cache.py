"""Shared prefixes: what is found, what is copied, what must not be shared."""

from __future__ import annotations

import numpy as np
import pytest
from scripted_runner import Script
from tests.support.scheduler_driver import CLIENT, SchedulerDriver, make_add

from wavecore.engine_core.startup.loader import choose_block_size
from wavecore.transport.wire.messages import FinishReason, TensorFrame

SCRIPT = Script(vocab_size=97, eos_token_id=[], max_model_len=256, num_host_blocks=40)
LONG = [int(t) for t in np.random.default_rng(0).integers(1, 97, 40)]


def driver(**config: object) -> SchedulerDriver:
    return SchedulerDriver(SCRIPT, **{"block_size": 4, "num_gpu_blocks_override": 100, **config})


def cached(d: SchedulerDriver, handle: int) -> int:
    return int(d.extras[handle]["cached_tokens"])


def test_a_second_request_computes_only_what_differs() -> None:
    d = driver()
    d.add(0, [*LONG, 1, 2], max_tokens=2)
    d.run()
    before = d.core.requests.totals.prompt_tokens
    d.add(1, [*LONG, 3, 4], max_tokens=2)
    d.run()
    d.check_all()
    assert (cached(d, 0), cached(d, 1)) == (0, 40)
    assert d.core.requests.totals.prompt_tokens - before == 2


def test_a_prompt_that_is_cached_whole_copies_its_last_block() -> None:
    """All 10 blocks are there; only the last token runs, in a copy of the block that holds it."""
    d = driver()
    for handle in range(2):
        d.add(handle, LONG, max_tokens=6)
        d.run()
    d.check_all()
    assert cached(d, 1) == 39


def test_requests_of_one_step_share_what_it_computes() -> None:
    d = driver(max_num_batched_tokens=4096)
    for handle in range(4):
        d.add(handle, [*LONG, handle], max_tokens=3)
    d.run()
    d.check_all()
    assert [cached(d, handle) for handle in range(4)] == [0, 40, 40, 40]


def test_output_is_found_again_once_its_ids_are_known() -> None:
    """A chat's next turn: prompt + answer + more."""
    d = driver()
    d.add(0, LONG[:10], max_tokens=20, seed=1)
    d.run()
    d.add(1, LONG[:10] + d.outputs[0] + [5], max_tokens=3)
    d.run()
    d.check_all()
    assert cached(d, 1) == 28  # of 30; the last output token never ran


@pytest.mark.parametrize(("one", "other", "found"), [("", "a", 0), ("a", "b", 0), ("a", "a", 40), ("", "", 40)])
def test_salts_isolate(one: str, other: str, found: int) -> None:
    """The same salt hits, so a cache that is off cannot pass."""
    d = driver()
    for handle, salt in enumerate((one, other)):
        d.add(handle, [*LONG, 1], {"cache_salt": salt} if salt else {}, max_tokens=1)
        d.run()
    assert cached(d, 1) == found


def test_prompt_embeds_are_part_of_the_name() -> None:
    d = driver()
    for handle, value in enumerate((0.0, 1.0, 1.0)):
        embeds = TensorFrame("float32", (9, 8), np.full((9, 8), value, np.float32).tobytes())
        d.add(handle, LONG[:9], embeds=embeds, max_tokens=1)
        d.run()
    assert [cached(d, handle) for handle in range(3)] == [0, 0, 8]


def test_prompt_logprobs_bypass_the_cache_where_positions_are_needed() -> None:
    """The second run reports the same as the first."""
    d = driver(max_num_batched_tokens=300)
    for handle in range(2):
        d.add(handle, LONG, max_tokens=2, prompt_logprobs=2, logprobs=1)
        d.run()
    d.check_all()
    assert cached(d, 1) == 0
    first, second = (d.frames[handle]["prompt_logprobs"] for handle in range(2))
    assert first == second
    ids = np.frombuffer(first[0].buffer, np.int32).reshape(first[0].shape)
    assert first[0].shape == (39, 3) and ids[:, 0].tolist() == LONG[1:]
    assert [frame.shape for frame in d.frames[0]["logprobs"]] == [(1, 2), (1, 2), (1,)] * 2


@pytest.mark.parametrize("swap", [0.0, 1.0])
def test_prompt_logprobs_come_once_under_preemption(swap: float) -> None:
    d = driver(num_gpu_blocks_override=16, max_num_batched_tokens=9, max_num_seqs=4, swap_space_gib=swap)
    for handle in range(4):
        d.add(handle, [handle, *LONG[:20]], max_tokens=20, prompt_logprobs=0)
    d.add(9, LONG[:30], {"priority": 5}, max_tokens=0, prompt_logprobs=0)
    d.run()
    assert d.core.requests.totals.preemptions > 0
    for handle in range(4):
        ids = np.frombuffer(d.frames[handle]["prompt_logprobs"][0].buffer, np.int32)
        assert ids.tolist() == LONG[:20]
    assert np.frombuffer(d.frames[9]["prompt_logprobs"][0].buffer, np.int32).tolist() == LONG[1:30]


def test_a_prompt_may_be_scored_without_output() -> None:
    """max_tokens=0 with prompt_logprobs: no token comes, the log-probabilities do."""
    d = driver()
    d.add(0, LONG, max_tokens=0, prompt_logprobs=1)
    d.run()
    assert d.outputs[0] == [] and d.finish[0] is FinishReason.LENGTH
    assert d.frames[0]["prompt_logprobs"][0].shape == (39, 2)


def test_choices_share_the_prompt() -> None:
    """Every choice has its own tokens; cached tokens are counted once, with the first."""
    for n in (2, 5):
        d = driver(enable_prefix_caching=False)
        d.add(0, LONG[:38], max_tokens=9, n=n, seed=4)
        d.run()
        d.check_all()
        assert len({tuple(d.outputs[handle]) for handle in range(n)}) == n
        assert d.core.requests.totals.prompt_tokens == 38 + n - 1
        assert ["cached_tokens" in d.extras[handle] for handle in range(n)] == [True] + [False] * (n - 1)


def test_what_choices_share_of_their_prompt_is_no_hit_of_the_cache() -> None:
    d = driver()
    d.add(0, LONG[:38], max_tokens=9, n=2, seed=4)
    while 1 not in d.outputs:
        d.step()
    assert [entry["cached_tokens"] for entry in d.core.utilities.debug_requests()] == [0, 0]
    d.run()
    kv = d.core.requests.kv
    assert (kv.queries, kv.hits) == (38, 0)


def test_choices_go_on_when_the_first_one_ends_early() -> None:
    d = driver(max_num_batched_tokens=8, max_num_seqs=8)
    d.add(0, LONG, max_tokens=4, n=4, seed=1)
    d.step()
    d.core.abort(b"c" * 16, [0])
    d.run()
    for handle in range(1, 4):
        assert (d.outputs[handle], d.finish[handle]) == d.expected(handle)


def test_evicted_prefixes_come_back_from_host_memory() -> None:
    d = driver(num_gpu_blocks_override=12, swap_space_gib=1.0)
    d.add(0, LONG, max_tokens=1)
    d.run()
    d.add(1, [90, *LONG[:38]], max_tokens=1)  # evicts nearly everything
    d.run()
    before = d.core.requests.totals.prompt_tokens
    d.add(2, LONG, max_tokens=3)
    d.run()
    d.check_all()
    assert cached(d, 2) >= 36 and d.core.requests.totals.prompt_tokens - before <= 4


def test_a_block_is_copied_to_the_host_once_and_before_anybody_needs_its_place() -> None:
    d = driver(swap_space_gib=1.0)
    d.add(0, LONG, max_tokens=9)
    d.run()
    assert d.core.requests.kv.host.num_cached == 12  # 48 tokens were computed
    d.add(1, LONG, max_tokens=2)
    d.run()
    assert d.core.requests.kv.host.num_cached == 12 and len(d.runner.swapped_out) == 12


def test_the_host_forgets_blocks_of_a_request_that_went_wrong() -> None:
    script = Script(vocab_size=97, eos_token_id=[], num_host_blocks=40, faults={"nan_token": 96})
    d = SchedulerDriver(script, block_size=4, num_gpu_blocks_override=100, swap_space_gib=1.0, max_num_seqs=8)
    d.add(0, LONG[1:], max_tokens=3)
    d.add(1, [96, *LONG], max_tokens=3)
    d.run()
    assert d.finish[1] is FinishReason.ERROR
    assert d.core.requests.kv.device.num_cached == d.core.requests.kv.host.num_cached == 10  # those of the good one


@pytest.mark.parametrize("swap", [0.0, 1.0])
def test_blocks_of_a_request_that_is_aborted_before_it_is_seen_to_go_wrong_are_forgotten(swap: float) -> None:
    """Its blocks are findable from the moment its step is planned; that step still tells that they hold no numbers."""
    script = Script(vocab_size=97, eos_token_id=[], num_host_blocks=40, faults={"nan_token": 96})
    d = SchedulerDriver(script, block_size=4, num_gpu_blocks_override=100, swap_space_gib=swap, max_num_seqs=8)
    d.add(1, [96, *LONG], max_tokens=3)
    d.step()
    d.core.abort(CLIENT, [1])
    d.run()
    kv = d.core.requests.kv
    assert d.finish[1] is FinishReason.ABORT
    assert kv.device.num_cached == kv.host.num_cached == 0


def test_swapping_that_does_not_pay_is_not_done() -> None:
    d = SchedulerDriver(
        Script(vocab_size=97, eos_token_id=[], num_host_blocks=40, swap_block_seconds=10.0),
        block_size=4, num_gpu_blocks_override=9, max_num_seqs=8, swap_space_gib=1.0,
    )  # fmt: skip
    for handle in range(6):
        d.add(handle, LONG[handle : handle + 12], max_tokens=18)
    d.run()
    d.check_all()
    totals = d.core.requests.totals
    assert totals.preemptions > 0 and totals.swapped_tokens == 0


def test_reset_forgets_everything_and_disturbs_nobody() -> None:
    d = driver(num_gpu_blocks_override=20, swap_space_gib=1.0)
    d.add(0, LONG, max_tokens=30)
    for handle in range(1, 4):
        d.add(handle, LONG[:8], max_tokens=30)
    for _ in range(12):
        d.step()
    assert d.core.utilities.call("reset_prefix_cache", {}) == (None, [])
    assert d.core.requests.kv.device.num_cached == d.core.requests.kv.host.num_cached == 0
    d.run()
    d.check_all()
    d.core.requests.reset_prefix_cache()
    d.add(9, LONG, max_tokens=1)
    d.run()
    assert cached(d, 9) == 0


def test_after_a_reset_old_and_new_content_never_mix() -> None:
    """A request that ran before a reset, for instance of the weights, shares nothing that it computes afterwards."""
    d = driver()
    d.add(0, LONG, max_tokens=30)
    for _ in range(3):
        d.step()
    d.core.requests.reset_prefix_cache()
    d.run()
    assert d.core.requests.kv.device.num_cached == 0


@pytest.mark.parametrize("swap", [0.0, 1.0])
def test_choices_and_swapped_requests_carry_nothing_over_a_reset(swap: float) -> None:
    d = driver(num_gpu_blocks_override=14, swap_space_gib=swap, max_num_seqs=2, scheduling_policy="priority")
    d.add(0, LONG[:13], {"priority": 1}, max_tokens=25, n=4)
    for _ in range(4):
        d.step()
    old = set(d.core.requests.slots.at(0).blocks)
    d.core.requests.reset_prefix_cache()
    d.add(9, LONG[20:], {"priority": 0}, max_tokens=20)  # pushes one out
    while d.core.has_work:
        d.step()
        request = d.core.requests.by_client.get(b"c" * 16, {}).get(0)
        if request is not None and request.stale:
            assert not any(d.core.requests.kv.device.hash_of(block) for block in old & set(request.blocks))
    d.check_all()
    assert d.core.requests.totals.preemptions > 0


def test_a_copy_never_reads_what_its_own_step_writes() -> None:
    """A resumed first choice may hold blocks that another row of this very plan computes: copies run before rows."""
    d = driver()
    kv = d.core.requests.kv
    row, first, fork = (d.core.admit(make_add(i, LONG[:n])) for i, n in enumerate((20, 17, 15)))
    assert kv.allocate(row, None, 0) == (0, False)
    kv.register(row, 20)
    assert kv.allocate(first, None, 0) == (16, False)
    assert kv.allocate(fork, first, 0) == (12, False)
    assert kv.take_events().copies == []


def test_a_copy_of_this_step_is_neither_copied_nor_swapped_out_by_it() -> None:
    """All copies of a plan run at once, and its swaps beside them: a block that one fills can be the source of none."""
    d = driver(swap_space_gib=1.0)
    kv = d.core.requests.kv
    before, first, fork = (d.core.admit(make_add(i, LONG[:n])) for i, n in enumerate((16, 16, 15)))
    assert kv.allocate(before, None, 0) == (0, False)
    kv.register(before, 16)
    kv.take_events()
    assert kv.allocate(first, None, 0) == (15, False)  # all of it was there, and its last block is copied
    assert kv.events.copies == [(before.blocks[3], first.blocks[3])]
    assert not kv.swap_out(first, 15)
    assert kv.allocate(fork, first, 0) == (12, False)
    kv.take_events()
    another = d.core.admit(make_add(3, LONG[:15]))
    assert kv.allocate(another, first, 0) == (14, False)
    assert kv.swap_out(first, 15)


def test_only_computed_blocks_are_swapped_out_and_none_whose_request_begins_anew() -> None:
    """Prompt log-probabilities need all positions again: what was copied would be thrown away."""
    d = driver(swap_space_gib=1.0)
    kv = d.core.requests.kv
    plain = d.core.admit(make_add(0, LONG[:16]))
    scored = d.core.admit(make_add(1, LONG[16:32], prompt_logprobs=1))
    for request in (plain, scored):
        assert kv.allocate(request, None, 0) == (0, False)
    kv.take_events()
    free = kv.host.num_free
    assert kv.swap_out(plain, 5) and not kv.swap_out(scored, 5)
    assert len(kv.events.swap_out) == len(plain.host_blocks) == free - kv.host.num_free == 2
    assert (plain.swapped, plain.blocks) == (5, []) and len(scored.blocks) == 4


def test_what_was_swapped_out_in_the_middle_of_a_block_comes_back_as_far_as_it_was_computed() -> None:
    d = driver(swap_space_gib=1.0, enable_prefix_caching=False)
    kv = d.core.requests.kv
    request = d.core.admit(make_add(0, LONG[:16]))
    kv.allocate(request, None, 0)
    kv.take_events()
    assert kv.swap_out(request, 5)
    kv.take_events()
    assert kv.allocate(request, None, 0) == (5, True)
    assert len(kv.events.swap_in) == 2 and request.host_blocks == []


def test_a_prompt_that_is_cached_whole_needs_no_more_blocks_than_any_other() -> None:
    """There is no room for the source and the copy of its last block: that one is computed again."""
    d = driver(num_gpu_blocks_override=5)
    kv = d.core.requests.kv
    first, second = (d.core.admit(make_add(i, LONG[:15])) for i in range(2))
    for request in (first, second):
        request.tokens = np.array(LONG[:16], np.int32)
    kv.allocate(first, None, 0)
    kv.register(first, 16)
    kv.take_events()
    kv.free(first)
    assert kv.allocate(second, None, 0) == (12, False)
    assert kv.events.copies == [] and kv.device.num_free == 0


def test_a_choice_copies_a_block_only_where_both_write_and_its_source_stays_until_then() -> None:
    d = driver(enable_prefix_caching=False)
    kv = d.core.requests.kv
    source, even, odd = (d.core.admit(make_add(i, LONG[:n])) for i, n in enumerate((18, 17, 18)))
    kv.allocate(source, None, 0)
    kv.take_events()
    assert kv.allocate(even, source, 0) == (16, False) and kv.events.copies == []
    last = source.blocks[4]
    assert kv.allocate(odd, source, 0) == (17, False) and kv.events.copies == [(last, odd.blocks[4])]
    kv.free(source)
    assert kv.device.refs(last) == 1, "the copy has not read it yet"
    kv.step_done(kv.take_events().step_id)
    assert kv.device.refs(last) == 0


def test_a_request_that_begins_anew_after_a_reset_shares_again() -> None:
    d = driver()
    kv = d.core.requests.kv
    request = d.core.admit(make_add(0, LONG[:16]))
    kv.allocate(request, None, 0)
    request.stale = True  # what a reset says of one that holds blocks
    kv.register(request, 16)
    assert kv.device.num_cached == 0
    kv.free(request)
    kv.allocate(request, None, 0)
    kv.register(request, 16)
    assert kv.device.num_cached == 4


def test_choices_that_wait_share_nothing_with_a_source_from_before_a_reset() -> None:
    """The weights may be others now; the source runs on with what it has."""
    d = driver(max_num_seqs=2)
    d.add(0, LONG, max_tokens=60, n=2, seed=1)
    d.add(5, [7] * 3, max_tokens=60)
    for _ in range(6):
        d.step()
    assert 1 not in d.outputs, "both places are taken"
    d.core.requests.reset_prefix_cache()
    before = d.core.requests.totals.prompt_tokens
    d.core.abort(CLIENT, [5])
    while 1 not in d.outputs:
        d.step()
    assert d.finish.keys() == {5}, "the source still runs"
    assert d.core.requests.totals.prompt_tokens - before == 40
    d.run()


def test_embeddings_end_with_their_vector() -> None:
    d = driver(max_num_batched_tokens=16, max_num_seqs=4)
    for handle, kind in enumerate(("mean", "last", "mean")):
        d.add(handle, LONG, {"pooling": kind})
        d.run()
    assert all(d.finish[handle] is FinishReason.STOP and d.outputs[handle] == [] for handle in range(3))
    vectors = [np.frombuffer(d.frames[handle]["pooled"][0].buffer, np.float32) for handle in range(3)]
    assert vectors[0].shape == (8,) and (vectors[0] == vectors[2]).all()
    assert [cached(d, handle) for handle in range(3)] == [0, 39, 0]  # the mean needs every position


@pytest.mark.parametrize(
    ("bytes_per_token", "size"),
    [(1, 128), (23_040, 128), (46_080, 64), (114_688, 32), (131_072, 16), (1 << 24, 16)],
)
def test_block_size_follows_the_model(bytes_per_token: int, size: int) -> None:
    assert choose_block_size(bytes_per_token) == size
