"""A group of ranks: each order in which they may be ready, fail and end; what they share; who of them is stuck."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.group_memory import make_group
from tests.support.waiting import until
from tests.transport.processes.test_supervisor import LIMITS, spec

from wavecore.transport.errors import StartError
from wavecore.transport.processes import group_memory, stall
from wavecore.transport.processes.deployment import Cause, EngineEntry, RankEntry
from wavecore.transport.processes.group import Group, GroupContext, Limits
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.process import ChildSpec
from wavecore.transport.processes.stall import GroupWatch, ProgressPage
from wavecore.transport.processes.supervisor import Supervisor

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_restarts")


class FakeRank:
    """Stands for a `RankProcess`: the test says what happens to it."""

    made: list[FakeRank]

    def __init__(self, rank: int, spec: ChildSpec, *, on_change: Any, **_: Any) -> None:
        if spec.config == "cannot be spawned":
            raise OSError(24, "Too many open files")
        self.rank, self.on_change, self.name = rank, on_change, spec.name
        self.child = self
        self.entry = RankEntry(rank, pid=100 + len(FakeRank.made))
        self.phase, self.resolved = "load", {"rank": rank}
        self.endpoints: EngineEntry | None = None
        self.reason: Cause | None = None
        self.cause: Cause | None = None
        self.progress = SimpleNamespace(waits_for=None, words=SimpleNamespace(busy=0, beats=0))
        self.since = 0.0
        self.killed = self.silent = False
        self.failed_at = float("inf")
        self.unread: tuple[Cause, float] | None = None
        self.signals: list[int] = []
        FakeRank.made.append(self)

    @property
    def failed(self) -> bool:
        return self.reason is not None or self.cause is not None

    @property
    def is_ending(self) -> bool:
        return self.silent or self.cause is not None

    def read_status(self) -> None:
        if self.unread:
            self.reason, self.failed_at = self.unread

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.killed = True

    def give_up(self, reason: Cause) -> None:
        self.reason = self.reason or reason

    def is_ready(self) -> None:
        self.endpoints, self.phase = EngineEntry(0, epoch=f"{self.rank}", input="in", output="out"), "serve"
        self.on_change(self)

    def says(self, message: str, at: float = 1.0, *, read: bool = True) -> None:
        cause = Cause("internal", f"rank {self.rank}: {message}", self.phase, self.rank, traceback="a stack")
        self.unread = cause, at
        if read:
            self.read_status()
            self.on_change(self)

    def ends(self, number: int = 9, status: int = 0) -> None:
        kind = "signal" if number else "exit"
        ended = self.reason or Cause(kind, f"{self.name} was ended by signal {number}", self.phase)
        self.cause = replace(ended, rank=self.rank, signal=number, status=status)
        self.entry = replace(self.entry, state="ended")
        self.on_change(self)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes a group of fake ranks, spawned; gives the group and the ranks of its present life."""
    monkeypatch.setattr("wavecore.transport.processes.group.RankProcess", FakeRank)
    monkeypatch.setattr(FakeRank, "made", [], raising=False)

    def make(ranks: int = 2, *, ready: bool = False, **limits: float) -> tuple[Group, list[FakeRank]]:
        selector = selectors.DefaultSelector()
        context = GroupContext(
            Path("/nowhere"), Path("/nowhere"), None, "", Limits(**limits), selector, lambda *_: None, lambda *_: None
        )
        group = Group(0, [ChildSpec("engine 0", "fake", "")] * ranks, context)
        selector.close()
        group.spawn()
        if ready:
            for rank in FakeRank.made:
                rank.is_ready()
        return group, FakeRank.made[:]

    return make


def next_life(group: Group) -> list[FakeRank]:
    """What is spawned once the pause is over; nothing if the group waits for something else."""
    before = len(FakeRank.made)
    group._spawn_at = min(group._spawn_at, time.monotonic()) if group._spawn_at < float("inf") else group._spawn_at
    group.tick()
    return FakeRank.made[before:]


def test_ready_when_all_ranks_are(fake: Any) -> None:
    group, ranks = fake(3)
    for rank in (ranks[1], ranks[0]):
        rank.is_ready()
        assert group.entries[0].state == "starting"
    ranks[2].is_ready()
    assert (group.entries[0].state, group.entries[0].epoch, group.resolved) == ("ready", "0", {"rank": 0})
    assert [rank.pid for rank in group.entries[0].ranks] == [group.entries[0].pid, 101, 102]


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_that_ends_is_the_cause_and_ends_the_others(fake: Any, first: int) -> None:
    group, ranks = fake(3, ready=True)
    ranks[first].ends(11)
    others = [rank for rank in ranks if rank.rank != first]
    assert all(rank.killed for rank in others)
    assert group.entries[0].state == "waiting"
    for rank in others:
        rank.ends()
    cause = group.entries[0].cause
    assert cause is not None
    assert (cause.rank, cause.signal) == (first, 11)
    assert cause.message == f"engine 0 rank {first} was ended by signal 11 (while: serve)"


def test_no_new_life_before_every_rank_of_the_old_one_is_gone(fake: Any) -> None:
    group, ranks = fake(2, ready=True)
    ranks[1].ends()
    assert group.entries[0].state == "waiting"  # clients hear of it at once
    assert next_life(group) == []
    ranks[0].ends()
    assert [rank.rank for rank in next_life(group)] == [0, 1]
    assert (group.entries[0].state, group.entries[0].restarts) == ("restarting", 1)


def test_an_engine_of_one_process_speaks_with_its_clients_until_it_ends(fake: Any) -> None:
    group, [rank] = fake(1, ready=True)
    rank.says("out of luck")
    assert (group.entries[0].state, rank.killed) == ("ready", False)
    rank.ends(0, status=5)
    assert group.entries[0].cause is not None
    assert (group.entries[0].state, group.entries[0].cause.status) == ("waiting", 5)


@pytest.mark.parametrize("first", [0, 1])
def test_a_report_is_told_before_its_author_has_ended(fake: Any, first: int) -> None:
    """That may take a while; its peers are ended at once. Clients see the connection break, and ask for the cause."""
    group, ranks = fake(2, ready=True)
    ranks[first].says("out of luck")
    cause, message = group.entries[0].cause, f"rank {first}: out of luck"
    assert cause is not None
    assert (group.entries[0].state, cause.rank, cause.message, cause.status) == ("waiting", first, message, -1)
    assert [rank.killed for rank in ranks] == [first != 0, first != 1]
    ranks[1 - first].ends()
    assert next_life(group) == []
    ranks[first].ends(0, status=5)
    assert group.entries[0].cause == replace(cause, status=5)
    assert len(next_life(group)) == 2
    assert group.entries[0].restarts == 1


def test_a_rank_that_said_why_and_does_not_end_is_killed_after_grace(fake: Any) -> None:
    group, ranks = fake(2, ready=True, grace=0.0)
    ranks[1].says("out of luck")
    assert not ranks[1].killed
    assert next_life(group) == []
    assert ranks[1].killed


def test_what_a_rank_says_because_a_peer_is_gone_is_not_the_cause(fake: Any) -> None:
    group, ranks = fake(2, ready=True)
    ranks[0].ends()
    ranks[1].says("connection closed by peer")
    ranks[1].ends(0, status=5)
    assert group.entries[0].cause is not None
    assert group.entries[0].cause.rank == 0
    assert "signal 9" in group.entries[0].cause.message


def test_a_report_gives_way_to_a_rank_that_is_on_its_way_out(fake: Any) -> None:
    """It takes a while to free its memory; meanwhile its peer sees the broken connection."""
    group, ranks = fake(3, ready=True)
    ranks[2].silent = True
    ranks[0].says("connection closed by peer")
    assert ranks[0].killed
    ranks[0].ends()
    assert group.entries[0].state == "ready"
    ranks[2].ends(11)
    assert group.entries[0].cause is not None
    assert (group.entries[0].cause.rank, group.entries[0].cause.signal) == (2, 11)


def test_of_two_that_say_why_the_earlier_is_the_cause(fake: Any) -> None:
    """Both lines are there when the supervisor comes to read."""
    group, ranks = fake(2, ready=True)
    ranks[1].says("out of luck", 7.0, read=False)
    ranks[0].says("connection closed by peer", 7.1)
    assert (ranks[0].killed, ranks[1].killed) == (True, False)
    ranks[1].silent = True  # it ends, and has said why
    ranks[0].ends()
    ranks[1].ends(0, status=5)
    assert group.entries[0].cause is not None
    assert group.entries[0].cause.message == "rank 1: out of luck"


def test_ready_after_a_peer_failed_is_too_late(fake: Any) -> None:
    group, ranks = fake(2)
    ranks[0].is_ready()
    ranks[1].says("bad shard")
    ranks[1].endpoints = EngineEntry(0)
    ranks[0].on_change(ranks[0])
    assert group.entries[0].state == "failed"
    with pytest.raises(StartError, match=r"^rank 1: bad shard\n"):
        raise group.failure or AssertionError


def test_ready_and_dead_in_one_turn_was_ready(fake: Any) -> None:
    """So it is started again, as after any life."""
    group, ranks = fake(1)
    ranks[0].endpoints = EngineEntry(0)
    ranks[0].ends()
    assert (group.failure, group.entries[0].state) == (None, "waiting")


@pytest.mark.parametrize("ready", [0, 1, 2])
def test_stop_while_starting(fake: Any, ready: int) -> None:
    """Whatever is ready then or becomes it too late, all are ended, and only then it has stopped."""
    group, ranks = fake(3)
    for rank in ranks[:ready]:
        rank.is_ready()
    group.stop(30.0)
    assert all(rank.killed for rank in ranks)
    for rank in ranks[ready:]:
        rank.is_ready()
    assert group.entries[0].state == "starting"
    for rank in ranks:
        assert group.entries[0].state == "starting"
        rank.ends()
    assert (group.entries[0].state, group.failure) == ("stopped", None)
    group.tick()
    assert FakeRank.made == ranks


def test_stop_when_ready_drains_rank_0_and_then_ends_its_workers(fake: Any) -> None:
    group, ranks = fake(2, ready=True)
    group.stop(30.0)
    assert (ranks[0].signals, ranks[1].signals, ranks[1].killed) == ([signal.SIGTERM], [], False)
    group.stop(0.0)
    assert ranks[0].signals == [signal.SIGTERM, signal.SIGINT]
    ranks[0].ends(0)
    assert ranks[1].killed
    assert group.entries[0].state == "draining"
    ranks[1].ends()
    assert (group.entries[0].state, group.entries[0].cause) == ("stopped", None)


def test_a_worker_that_fails_while_rank_0_drains_ends_that(fake: Any) -> None:
    group, ranks = fake(2, ready=True)
    group.stop(30.0)
    ranks[1].ends()
    assert ranks[0].killed
    ranks[0].ends()
    assert group.entries[0].state == "stopped"
    assert group.entries[0].cause is not None
    assert group.entries[0].cause.rank == 1
    assert next_life(group) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_says_why_it_fails_while_rank_0_drains(fake: Any, rank: int) -> None:
    group, ranks = fake(2, ready=True)
    group.stop(30.0)
    ranks[rank].says("out of luck")
    ranks[1 - rank].ends()
    ranks[rank].ends(0, status=5)
    assert group.entries[0].state == "stopped"
    assert group.entries[0].cause is not None
    assert (group.entries[0].cause.message, group.entries[0].cause.status) == (f"rank {rank}: out of luck", 5)


def test_stop_between_a_death_and_the_end_of_the_last_rank(fake: Any) -> None:
    group, ranks = fake(2, ready=True)
    ranks[1].ends()
    group.stop(30.0)
    assert group.entries[0].state != "stopped"
    ranks[0].ends()
    assert group.entries[0].state == "stopped"
    assert next_life(group) == []


def test_stop_in_the_pause_between_two_lives(fake: Any) -> None:
    group, ranks = fake(2, ready=True)
    for rank in ranks:
        rank.ends()
    group.stop(30.0)
    assert group.entries[0].state == "stopped"
    assert next_life(group) == []


def test_a_rank_that_cannot_be_spawned(fake: Any) -> None:
    """Those before it are ended; when they are gone, all is tried again."""
    group, ranks = fake(3, ready=True)
    for rank in ranks:
        rank.ends()
    good, group._specs = group._specs, (*group._specs[:2], replace(group._specs[2], config="cannot be spawned"))
    spawned = next_life(group)
    assert [rank.killed for rank in spawned] == [True, True]
    assert group.entries[0].cause is not None
    assert (group.entries[0].state, group.entries[0].cause.rank) == ("waiting", 2)
    assert "engine 0 rank 2 could not be started: " in group.entries[0].cause.message
    spawned[0].is_ready()  # the last line in its pipe
    spawned[1].is_ready()
    spawned[0].ends()
    assert (group.entries[0].state, group.entries[0].cause.rank) == ("waiting", 2)
    group._specs = good
    assert next_life(group) == []
    spawned[1].ends()
    assert len(next_life(group)) == 3


@pytest.mark.parametrize("late", [1, 2])
def test_the_late_rank_is_named(fake: Any, late: int) -> None:
    """Of those that are not ready the one that was silent for longest: the other may wait for it."""
    group, ranks = fake(3, ready=False)
    ranks[0].is_ready()
    ranks[3 - late].since = 1.0
    group._ready_by = 0.0
    group.tick()
    assert not any(rank.killed for rank in ranks)  # their stacks come first
    group.tick()
    assert all(rank.killed for rank in ranks)
    ranks[0].ends()
    ranks[late].ends()
    with pytest.raises(
        StartError, match=rf"^engine 0 rank {late} \(pid 10{late}\) was not ready after 600 s \(phase: load"
    ):
        raise group.failure or AssertionError


def test_memory_and_bells_are_new_in_each_life() -> None:
    """Each rank of `fake_child` reports what it finds, and leaves something for the next life."""
    with Supervisor([[spec("leave something in the memory")] * 3], limits=LIMITS) as supervisor:
        supervisor.start()
        for restarts in range(3):
            engine = until(
                lambda n=restarts: next(
                    (e for e in supervisor.deployment().engines if e.restarts == n and e.state == "ready"), None
                )
            )
            assert (supervisor.deployment().resolved["ranks"], supervisor.deployment().resolved["found"]) == (3, 0)
            os.kill(engine.ranks[restarts].pid, signal.SIGKILL)
            until(lambda: supervisor.deployment().engines[0].state != "ready")


def test_a_worker_that_ends_in_order_has_failed_all_the_same() -> None:
    with pytest.raises(StartError, match=r"engine 0 rank 1 \(pid \d+\) exited with status 0"):
        Supervisor([[spec("serve"), spec("end")]], limits=LIMITS).start()


@pytest.fixture
def memories() -> Iterator[list[GroupMemory]]:
    """The holds of two ranks, both in this process."""
    with ExitStack() as stack:
        memory, store, *bells = [fd for _, fd in group_memory.create(2, stack)]
        page = ProgressPage.create_fd()
        stack.callback(os.close, page)
        both = [GroupMemory(rank, os.dup(memory), store, bells, ProgressPage(page)) for rank in range(2)]
        yield both
        for each in both:
            each.words.release()
            each.records.release()
            each._memory.release()
            each.progress.close()


def test_what_one_rank_writes_and_rings_wakes_another(memories: list[GroupMemory]) -> None:
    one, other = memories
    other.progress.busy(True)
    waits: list[int | None] = []

    def follow() -> None:
        for n in range(1, 2001):
            other.sleep_until(lambda n=n: other.words[0] >= n, peer=0)
            waits.append(other.progress.waits_for)
            other.words[1] = n
            other.ring(0)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    until(lambda: other.progress.waits_for == 0)
    for n in range(1, 2001):
        one.words[0] = n
        one.ring(1)
        one.sleep_until(lambda n=n: one.words[1] >= n)
    thread.join(30)
    assert waits == [None] * 2000


def test_parts_of_a_group_have_memory_of_their_own() -> None:
    """Four ranks, two by two: each pair, and the first ranks of both, as a group."""
    with ExitStack() as stack:
        whole = make_group(4, stack)
        pairs, firsts = [each.part(2) for each in whole], [whole[rank].heads(2) for rank in (0, 2)]
        assert [(pair.rank, pair.ranks) for pair in pairs] == [(0, 2), (1, 2)] * 2
        assert [(first.rank, first.ranks) for first in firsts] == [(0, 2), (1, 2)]
        for number, sharing in enumerate((pairs[:2], pairs[2:], firsts), 1):
            sharing[0].words[3] = sharing[0].records[3] = number
        for number, sharing in enumerate((pairs[:2], pairs[2:], firsts), 1):
            assert [each.words[3] for each in sharing] == [each.records[3] for each in sharing] == [number] * 2
        pairs[2].ring(1)
        looks = iter([False, True])
        pairs[3].sleep_until(lambda: next(looks))
        for waits, peer, rank in ((pairs[2], 1, 3), (firsts[0], 1, 2), (whole[1], 3, 3)):
            waits.progress.busy(True)
            waits.wait_for(peer)
            assert waits.progress.waits_for == rank


@pytest.fixture
def sleepers() -> Iterator[list[tuple[int, ProgressPage]]]:
    """Four ranks that sleep, and their pages."""
    processes, pages = [subprocess.Popen(["sleep", "600"]) for _ in range(4)], []
    for _ in processes:
        fd = ProgressPage.create_fd()
        pages.append(ProgressPage(fd))
        os.close(fd)
    until(lambda: all(Path(f"/proc/{p.pid}/stat").read_text().split()[2] == "S" for p in processes))
    yield [(process.pid, page) for process, page in zip(processes, pages, strict=True)]
    for process, page in zip(processes, pages, strict=True):
        page.close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("waits", "busy", "rank", "words"),
    [
        ([None, None, None, None], [], None, ""),  # all are idle
        ([None, None, None, None], [2], 2, "every thread sleeps"),
        ([1, 2, 3, None], [0, 1, 2], 3, "every thread sleeps"),  # the end of the chain, though it says it is idle
        ([None, 0, 0, 0], [0, 1, 2, 3], 0, "every thread sleeps"),
        ([2, None, None, None], [0], 2, "every thread sleeps"),
        ([1, 2, 1, None], [0, 1, 2], 1, "ranks 1, 2 wait for each other, a deadlock: "),
        ([0, None, None, None], [0], 0, "ranks 0 wait for each other"),
        ([2, None, None, None], [], None, ""),  # what an idle rank says of waiting is old
        ([77, None, None, None], [0], 0, "every thread sleeps"),  # no such rank: its page is damaged
        ([stall.ELSEWHERE, 0, None, None], [0, 1], None, ""),  # the link to that host ends the wait
    ],
)
def test_who_of_a_group_is_stuck(
    sleepers: list[tuple[int, ProgressPage]], waits: list[int | None], busy: list[int], rank: int | None, words: str
) -> None:
    for number, (_, page) in enumerate(sleepers):
        page.wait_for(waits[number])
        page.busy(number in busy)
    watch = GroupWatch(sleepers, idle_seconds=2 * stall.TICK_SECONDS, step_seconds=60)
    verdicts = [watch.tick() for _ in range(6)]
    stuck = next((verdict for verdict in verdicts if verdict is not None), (None, ""))
    assert stuck[0] == rank
    assert words in stuck[1]


def test_a_circle_with_a_stopped_rank_is_no_deadlock(sleepers: list[tuple[int, ProgressPage]]) -> None:
    """Who is stopped is to blame: the others would go on with it."""
    for number, (_, page) in enumerate(sleepers):
        page.wait_for((number + 1) % len(sleepers))
        page.busy(True)
    os.kill(sleepers[2][0], signal.SIGSTOP)
    until(lambda: Path(f"/proc/{sleepers[2][0]}/stat").read_text().split()[2] == "T")
    watch = GroupWatch(sleepers, idle_seconds=2 * stall.TICK_SECONDS, step_seconds=60)
    rank, why = next(verdict for verdict in (watch.tick() for _ in range(6)) if verdict is not None)
    assert rank == 2
    assert why.startswith("it has been stopped")


def test_whoever_ends_the_chain_may_compute(sleepers: list[tuple[int, ProgressPage]]) -> None:
    """Rank 0 waits for one that computes (this process): a long step, and no rank is stuck before its limit."""
    page = sleepers[0][1]
    page.busy(True)
    page.wait_for(1)
    ranks = [sleepers[0], (os.getpid(), sleepers[1][1])]
    watch = GroupWatch(ranks, idle_seconds=2 * stall.TICK_SECONDS, step_seconds=8 * stall.TICK_SECONDS)
    verdicts = [watch.tick() for _ in range(12)]
    assert verdicts[:8] == [None] * 8
    found = next(verdict for verdict in verdicts if verdict is not None)
    assert found[0] == 1
    assert "one step has computed" in found[1]
