"""Ranks in lockstep, each in a thread: right tokens and equal forward passes, whatever happens on one of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
from scripted_runner import Script
from tests.support.group_memory import make_group
from tests.support.scheduler_driver import SchedulerDriver
from tests.support.waiting import until

from wavecore.engine_core.loop.core import OFTEN, EngineCore
from wavecore.engine_core.loop.dp_proc import DPEngineCore
from wavecore.engine_core.plan import OutOfMemory
from wavecore.parallel.wave import Wish
from wavecore.transport.processes.votes import VoteBoard


class Rank(SchedulerDriver):
    """A rank, whose thread steps while there is work."""

    core: DPEngineCore

    def __init__(self, board: VoteBoard, script: Script, **config: Any) -> None:
        self._board = board
        super().__init__(script, **config)
        self.error: Exception | None = None
        self._stops = threading.Event()
        self._thread = threading.Thread(target=self._loop)

    def make_core(self, clock: Callable[[], float]) -> EngineCore:
        return DPEngineCore(self.config, self.runner, self._board, clock=clock)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stops.set()
        self._thread.join(30)

    @property
    def passes(self) -> int:
        """Steps that failed before they began were planned, too."""
        totals, failed = self.core.requests.totals, self.runner.faults.get("oom_at_launches", ())
        return totals.steps + totals.dummy_steps - len(failed)

    def _loop(self) -> None:
        while not self._stops.wait(0.0 if self.core.has_work else 0.001):
            if self.core.has_work:
                try:
                    self.step()
                except Exception as error:
                    self.error = error
                    return


Make = Callable[..., list[Rank]]


@pytest.fixture
def make() -> Iterator[Make]:
    """Ranks that are started by `run`, and stopped at the end."""
    ranks: list[Rank] = []
    with ExitStack() as stack:

        def build(count: int, script: Mapping[str, Any], *scripts: Mapping[str, Any], **config: Any) -> list[Rank]:
            each = [*scripts, *[{}] * (count - len(scripts))]
            boards = [VoteBoard(group) for group in make_group(count, stack)]
            ranks.extend(Rank(b, Script(**{**script, **own}), **config) for b, own in zip(boards, each, strict=True))
            return ranks

        yield build
        for rank in ranks:
            rank.stop()


def run(ranks: list[Rank], begin: bool = True) -> None:
    """Until the wave is over; then all is right and equal."""
    for rank in ranks if begin else ():
        rank.start()

    def is_over() -> bool:
        for rank in ranks:
            if rank.error:
                raise rank.error
        busy = any(rank.core.has_work or rank.core.wave.running for rank in ranks)
        return not busy and all(rank.finish.keys() == rank.sent.keys() for rank in ranks)

    until(is_over, "the end of the wave")
    for rank in ranks:
        rank.check_all()
        assert not rank.core.in_flight
    assert len({(rank.passes, rank.core.wave.number) for rank in ranks}) == 1


def test_a_rank_without_a_step_runs_along(make: Make) -> None:
    ranks = make(3, {"eos_token_id": []})
    ranks[1].add(0, [1, 2, 3], max_tokens=30)
    run(ranks)
    assert [rank.core.requests.totals.dummy_steps for rank in ranks] == [30, 0, 30]
    assert [rank.core.requests.totals.steps for rank in ranks] == [0, 30, 0]


def test_preemption_and_swaps_on_one_rank(make: Make) -> None:
    """Plans of swaps alone count as a pass, and dummies beside them change no block."""
    scripts = {"eos_token_id": [], "num_blocks": 24, "num_host_blocks": 64, "transfer_steps": 3}
    ranks = make(2, scripts, swap_space_gib=1.0, max_num_seqs=16, enable_prefix_caching=False)
    for rank, count in zip(ranks, (12, 3), strict=True):
        for handle in range(count):
            rank.add(handle, [handle + 1] * (20 + handle), max_tokens=60)
        rank.core.requests.kv.swap_pays = True
    run(ranks)
    assert ranks[0].core.requests.totals.preemptions > 0


def test_a_step_that_cannot_begin_is_a_dummy_and_computed_again(make: Make) -> None:
    ranks = make(2, {"eos_token_id": []}, {"faults": {"oom_at_launches": [3, 9]}})
    for rank in ranks:
        for handle in range(3):
            rank.add(handle, [handle + 1, 2, 3], max_tokens=20)
    run(ranks)
    assert ranks[0].core.requests.totals.preemptions > ranks[1].core.requests.totals.preemptions == 0


def test_a_step_that_fails_inside_is_the_end(make: Make) -> None:
    """Ranks that run the same forward pass could not go on; their supervisor ends the group."""
    [rank] = make(1, {"eos_token_id": [], "faults": {"oom_at_steps": [3]}})
    rank.add(0, [1, 2, 3], max_tokens=20)
    rank.start()
    until(lambda: isinstance(rank.error, OutOfMemory), "the fault")


def test_graphs_are_captured_by_all_ranks_beside_no_step(make: Make) -> None:
    """Where one is due all let their steps come back first, though they have more, and capture between two passes."""
    ranks = make(2, {"eos_token_id": []})
    ranks[0].add(0, [1, 2, 3], max_tokens=60)
    ranks[1].add(0, [1, 2, 3], max_tokens=90)
    ranks[0].runner.uses = OFTEN
    run(ranks)
    assert [rank.runner.captures for rank in ranks] == [1, 1]


def test_an_idle_group_captures(make: Make) -> None:
    ranks = make(2, {})
    ranks[1].runner.uses = 1
    run(ranks)
    assert [rank.runner.captures for rank in ranks] == [1, 1]


def test_a_pause_does_not_keep_a_rank_from_an_agreed_capture(make: Make) -> None:
    """Both are granted in one agreement: the other rank captures, and may wait for this one there."""
    ranks = make(2, {"eos_token_id": []})
    ranks[0].add(0, [1, 2, 3], max_tokens=9)
    ranks[1].runner.uses = OFTEN
    ranks[1].core.wave.ask(Wish.PAUSE)
    for rank in ranks:
        rank.start()
    until(lambda: all(rank.core.wave.paused and not rank.core.has_work for rank in ranks), "the pause")
    assert [rank.runner.captures for rank in ranks] == [1, 1]
    ranks[0].core.wave.ask(Wish.RESUME)
    run(ranks, begin=False)


def test_a_pause_keeps_all_requests(make: Make) -> None:
    ranks = make(2, {"eos_token_id": [], "step_seconds": 0.001})
    for rank in ranks:
        rank.add(0, [1, 2, 3], max_tokens=100)
    for rank in ranks:
        rank.start()
    until(lambda: ranks[0].passes > 20)
    ranks[1].core.wave.ask(Wish.PAUSE)
    until(lambda: all(rank.core.wave.paused and not rank.core.has_work for rank in ranks), "the pause")
    assert ranks[0].passes == ranks[1].passes < 100 and not ranks[0].core.in_flight
    ranks[0].core.wave.ask(Wish.RESUME)
    run(ranks, begin=False)


def test_a_group_leaves_when_all_is_done(make: Make) -> None:
    ranks = make(2, {"eos_token_id": [], "step_seconds": 0.001})
    ranks[0].add(0, [1, 2, 3], max_tokens=50)
    for rank in ranks:
        rank.start()
    ranks[1].core.wave.ask(Wish.LEAVE)
    until(lambda: all(rank.core.wave.left for rank in ranks), "the end")
    ranks[0].check_all()
    assert all(rank.core.draining for rank in ranks) and ranks[0].passes == ranks[1].passes == 50
