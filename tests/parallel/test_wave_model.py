"""The rules of waves, in every order of events: an exhaustive search through the states of a small group.

Each rank runs the code's own `Wave`. What surrounds it, as `engine_core/loop/dp_proc.py` and
`transport/processes/votes.py` do it, is modelled as a small program (`Model._moves`): memory, bells, a queue, requests
of one step each, two steps in flight. One move is what happens between two moments in which another rank could see, or
change, what this one sees. Checked in every state that can be reached:

- all ranks decide the same in the same agreement (which forward pass, paused, draining, left);
- nobody leaves with a request, and a pause is confirmed only when all devices are idle;
- from here all work can end, with all ranks asleep or gone, without new requests, pauses or luck.

Rules that are broken on purpose show that each is needed, and that the search would find it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wavecore.parallel.wave import Vote, Wave, Wish

NO_VOTE = Vote(0, 0)
Slot = tuple[int, Vote]  # agreement, vote


class Rank(NamedTuple):
    """One rank: where its program is, and what it has.

    Attributes:
        at: "clear" (the bell comes next, then a look, then sleep), "look", "asleep", "fetch" (waits for its device),
            "write" (half of its vote is written), "ring", "wait" (for the others' votes), or "gone".
        wave: the values of its `Wave`.
        queue, waiting: requests that came, and those taken in and not planned.
        flight: steps in flight, oldest first: whether they are real.
        vote: its last one.
        begins: it rings when that is written.
        due: it is time for a graph.
        slots: its two places for votes, as the others see them.
    """

    at: str
    wave: tuple[Any, ...]
    queue: int = 0
    waiting: int = 0
    flight: tuple[bool, ...] = ()
    bell: bool = False
    vote: Vote = NO_VOTE
    begins: bool = False
    due: bool = False
    slots: tuple[Slot, Slot] = ((0, NO_VOTE), (0, NO_VOTE))

    @property
    def work(self) -> bool:
        return bool(self.waiting or self.flight or self.due)


class World(NamedTuple):
    """A group, what may still happen to it, and what each agreement that some rank still needs has decided."""

    ranks: tuple[Rank, ...]
    requests: int
    pauses: int
    leaves: int
    aborts: int
    graphs: int
    decided: tuple[tuple[int, tuple[Any, ...]], ...] = ()


class Move(NamedTuple):
    """Attributes: what: for people; forced: it happens by itself, and is no new request, pause or end."""

    what: str
    forced: bool
    world: World


class RuleBroken(Exception):
    """What the group must never do."""


@dataclass(frozen=True)
class Model:
    """The rules, and those that a control breaks."""

    kind: type[Wave] = Wave
    two_slots: bool = True
    vote_first: bool = True
    looks_at_peers: bool = True
    votes_work_while_paused: bool = True
    work_launches: bool = False

    def start(
        self, ranks: int, requests: int, pauses: int = 0, leaves: int = 0, aborts: int = 0, graphs: int = 0
    ) -> World:
        return World((Rank("clear", values(self.kind())),) * ranks, requests, pauses, leaves, aborts, graphs)

    def counted_from_zero(self, world: World) -> World:
        return counted_from_zero(world)

    def moves(self, world: World) -> Iterator[Move]:
        for i in range(len(world.ranks)):
            yield from self.moves_of(world, i)

    def moves_of(self, world: World, i: int) -> Iterator[Move]:
        """What one rank may do, and what may come to it."""
        rank = world.ranks[i]
        if rank.at != "gone":
            yield from self._arrivals(world, i, rank)
            yield from self._moves(world, i, rank)

    def _arrivals(self, world: World, i: int, rank: Rank) -> Iterator[Move]:
        """What comes from outside; it rings the rank's own bell."""
        wave = self._wave(rank)

        def asks(wish: Wish) -> Rank:
            wave.ask(wish)
            return rank._replace(wave=values(wave), bell=True)

        def move(what: str, forced: bool, rank: Rank, **left: int) -> Move:
            return Move(f"{what} at {i}", forced, with_rank(world, i, rank)._replace(**left))

        if world.requests and not wave.draining:
            more = rank._replace(queue=rank.queue + 1, bell=True)
            yield move("a request", False, more, requests=world.requests - 1)
        if world.aborts and rank.waiting:
            fewer = rank._replace(waiting=rank.waiting - 1, bell=True)
            yield move("an abort", False, fewer, aborts=world.aborts - 1)
        if world.graphs and not wave.draining and not rank.due and rank.at == "look":
            yield move("a graph is due", False, rank._replace(due=True), graphs=world.graphs - 1)
        if wave.wishes:
            return
        if wave.paused:
            # The end of a group that is paused and has no work must not need it.
            needed = not wave.draining or any(r.work or r.queue for r in world.ranks)
            yield move("resume", needed, asks(Wish.RESUME))
            wave = self._wave(rank)
        if world.pauses:
            yield move("pause", False, asks(Wish.PAUSE), pauses=world.pauses - 1)
            wave = self._wave(rank)
        if world.leaves:
            yield move("SIGTERM", False, asks(Wish.LEAVE), leaves=world.leaves - 1)

    def _moves(self, world: World, i: int, rank: Rank) -> Iterator[Move]:
        """The next part of the rank's program."""

        def move(what: str, rank: Rank) -> Move:
            return Move(f"{i} {what}", True, with_rank(world, i, rank))

        if rank.at == "clear":
            yield move("clears its bell", rank._replace(at="look", bell=False))
        elif rank.at == "look":
            if rank.queue or self._joins(world, i, rank):
                yield move("goes on", self._top(world, i, rank))
            else:
                yield move("sleeps", rank._replace(at="asleep"))
        elif rank.at == "asleep" and rank.bell:
            yield move("wakes", self._top(world, i, rank))
        elif rank.at == "fetch":
            yield move("has a step back", self._top(world, i, rank._replace(flight=rank.flight[1:])))
        elif rank.at == "write":
            number = self._wave(rank).agreements
            slots = self._written(rank, number, (number, rank.vote))
            yield move(f"has voted {rank.vote}", rank._replace(at="ring" if rank.begins else "wait", slots=slots))
        elif rank.at == "ring":
            rung = tuple(r if j == i else r._replace(bell=True) for j, r in enumerate(world.ranks))
            yield Move(f"{i} rings", True, with_rank(world._replace(ranks=rung), i, rank._replace(at="wait")))
        elif rank.at == "wait":
            number = self._wave(rank).agreements
            votes = self._votes(world, i, number)
            if None not in votes:
                yield self._decision(world, i, rank, [vote for vote in votes if vote is not None])

    def _top(self, world: World, i: int, rank: Rank) -> Rank:
        """One turn of the loop, until the first half of the vote is written."""
        wave = self._wave(rank)
        rank = rank._replace(queue=0, waiting=rank.waiting + rank.queue)
        if wave.captures:
            if rank.flight:
                return rank._replace(at="fetch")
            wave.captures = False
            rank = rank._replace(wave=values(wave), due=False)
        if not self._joins(world, i, rank):
            return rank._replace(at="fetch" if rank.flight else "clear")
        begins = not wave.running and not self._peer_voted(world, i, wave)
        work = rank.work and (self.votes_work_while_paused or not wave.paused)
        plans = int(rank.waiting > 0 and not wave.paused)
        vote = wave.vote(work, plans, plans, plans, capture=rank.due)
        number = wave.agreements
        half = (0, vote) if self.vote_first else (number, rank.slots[self._place(number)][1])
        return rank._replace(
            at="write",
            waiting=rank.waiting - plans,
            vote=vote,
            begins=begins,
            wave=values(wave),
            slots=self._written(rank, number, half),
        )

    def _decision(self, world: World, i: int, rank: Rank, votes: Sequence[Vote]) -> Move:
        wave = self._wave(rank)
        size = wave.decide(votes)
        if self.work_launches and any(vote.work for vote in votes):
            size = size or (1, 1, 1, False)
        decision = size, wave.paused, wave.draining, wave.left, wave.running, wave.captures
        decided = dict(world.decided)
        if decided.setdefault(wave.agreements, decision) != decision:
            raise RuleBroken(f"unequal decisions in agreement {wave.agreements}")
        flight = (*rank.flight, bool(rank.vote.rows)) if size else rank.flight
        if not size or len(flight) == 2:
            flight = flight[1:]
        rank = rank._replace(wave=values(wave), flight=flight, begins=False)
        if wave.left and (rank.work or rank.queue):
            raise RuleBroken(f"{i} leaves with a request")
        if wave.left and wave.captures:
            raise RuleBroken(f"{i} leaves with a graph to capture")
        if wave.paused and not wave.running and any(r.flight for r in (*world.ranks[:i], rank, *world.ranks[i + 1 :])):
            raise RuleBroken("a pause is confirmed while a device runs")
        world = with_rank(world, i, rank)
        oldest = min(self._wave(r).agreements for r in world.ranks)
        world = world._replace(decided=tuple(sorted(d for d in decided.items() if d[0] >= oldest)))
        if wave.left:
            rank = rank._replace(at="gone")
        elif rank.queue or rank.flight or self._joins(world, i, rank):
            rank = self._top(world, i, rank)
        else:
            rank = rank._replace(at="clear")
        return Move(f"{i} decides {wave.agreements}: {decision}", True, with_rank(world, i, rank))

    def _joins(self, world: World, i: int, rank: Rank) -> bool:
        wave = self._wave(rank)
        return wave.captures or wave.joins(rank.work, bool(rank.flight), self._peer_voted(world, i, wave))

    def _peer_voted(self, world: World, i: int, wave: Wave) -> bool:
        peers = (r for j, r in enumerate(world.ranks) if j != i)
        return self.looks_at_peers and any(self._read(peer, wave.agreements + 1) for peer in peers)

    def _votes(self, world: World, i: int, agreement: int) -> Sequence[Vote | None]:
        """Of all ranks, as this one sees them."""
        return [self._read(rank, agreement) for rank in world.ranks]

    def _place(self, agreement: int) -> int:
        return agreement % 2 if self.two_slots else 0

    def _read(self, rank: Rank, agreement: int) -> Vote | None:
        number, vote = rank.slots[self._place(agreement)]
        return vote if number == agreement else None

    def _written(self, rank: Rank, agreement: int, slot: Slot) -> tuple[Slot, Slot]:
        """The rank's slots with that of an agreement replaced."""
        return (rank.slots[0], slot) if self._place(agreement) else (slot, rank.slots[1])

    def _wave(self, rank: Rank) -> Wave:
        wave = self.kind()
        for name, value in zip(Wave.__slots__, rank.wave, strict=True):
            setattr(wave, name, value)
        return wave


def values(wave: Wave) -> tuple[Any, ...]:
    return tuple(getattr(wave, name) for name in Wave.__slots__)


AGREEMENTS, NUMBER = Wave.__slots__.index("agreements"), Wave.__slots__.index("number")


def with_rank(world: World, i: int, rank: Rank) -> World:
    return world._replace(ranks=(*world.ranks[:i], rank, *world.ranks[i + 1 :]))


def at_rest(world: World) -> bool:
    """All work has ended, and all ranks sleep, or all have left."""
    if any(rank.work or rank.queue for rank in world.ranks):
        return False
    ats = {rank.at for rank in world.ranks}
    if ats == {"gone"}:
        return True
    state = [dict(zip(Wave.__slots__, rank.wave, strict=True)) for rank in world.ranks]
    return ats == {"asleep"} and not any(w["paused"] or w["wishes"] or w["draining"] for w in state)


def counted_from_zero(world: World) -> World:
    """Behaviour depends on differences of counters, and on which of two slots is next: equal futures are one state."""
    base = (min(rank.wave[AGREEMENTS] for rank in world.ranks) - 1) // 2 * 2
    waves = min(rank.wave[NUMBER] for rank in world.ranks)
    if base <= 0 and not waves:
        return world
    base = max(base, 0)

    def lowered(rank: Rank) -> Rank:
        wave = list(rank.wave)
        wave[AGREEMENTS] -= base
        wave[NUMBER] -= waves
        one, two = ((number - base, vote) if number > base else (0, NO_VOTE) for number, vote in rank.slots)
        return rank._replace(wave=tuple(wave), slots=(one, two))

    decided = tuple((number - base, d) for number, d in world.decided if number > base)
    return world._replace(ranks=tuple(map(lowered, world.ranks)), decided=decided)


def search(model: Model, start: World) -> int:
    """Visit every state. Returns how many there are.

    Raises:
        RuleBroken: with the shortest way there.
    """
    came_from: dict[World, tuple[World, str] | None] = {start: None}
    leads_to: dict[World, list[World]] = {}
    todo = deque([start])

    def way(world: World) -> str:
        steps: list[str] = []
        while (before := came_from[world]) is not None:
            world, what = before
            steps.append(what)
        return "\n".join(reversed(steps))

    while todo:
        world = todo.popleft()
        try:
            moves = list(model.moves(world))
        except RuleBroken as broken:
            raise RuleBroken(f"{broken}, after\n{way(world)}") from None
        for what, forced, after in moves:
            after = model.counted_from_zero(after)
            if forced:
                leads_to.setdefault(after, []).append(world)
            if after not in came_from:
                came_from[after] = world, what
                todo.append(after)
    good = {world for world in came_from if at_rest(world)}
    backward = list(good)
    while backward:
        for before in leads_to.get(backward.pop(), ()):
            if before not in good:
                good.add(before)
                backward.append(before)
    stuck = next((world for world in came_from if world not in good), None)
    if stuck is not None:
        raise RuleBroken(
            f"{len(came_from) - len(good)} states from which the work never ends, first after\n{way(stuck)}"
        )
    return len(came_from)


@pytest.mark.parametrize(
    "group",
    [
        {"ranks": 2, "requests": 3},
        {"ranks": 3, "requests": 2},
        {"ranks": 2, "requests": 2, "leaves": 1},
        {"ranks": 2, "requests": 1, "pauses": 1},
        pytest.param({"ranks": 2, "requests": 1, "pauses": 2}, marks=pytest.mark.slow),
        {"ranks": 2, "requests": 1, "leaves": 1, "aborts": 1},
        pytest.param({"ranks": 2, "requests": 1, "pauses": 1, "leaves": 1, "aborts": 1}, marks=pytest.mark.slow),
        {"ranks": 3, "requests": 1, "leaves": 1},
        {"ranks": 2, "requests": 1, "graphs": 1, "leaves": 1},
        pytest.param({"ranks": 2, "requests": 1, "graphs": 1, "pauses": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_order_of_events_ends_well(group: dict[str, int]) -> None:
    assert search(Model(), Model().start(**group)) > 1000


class LeavesAtOnce(Wave):
    """Leaves in the agreement that announces it."""

    __slots__ = ()

    def decide(self, votes: Sequence[Vote]) -> tuple[int, int, int, bool] | None:
        size = super().decide(votes)
        self.left = self.draining and not any(vote.work for vote in votes)
        return size


class VotesWithStepInFlight(Wave):
    """A paused rank votes before its device is idle."""

    __slots__ = ()

    def joins(self, work: bool, in_flight: bool, peer_voted: bool) -> bool:
        return super().joins(work, False, peer_voted)


class ForgetsEmptied(Wave):
    """A rank of a paused group that drains sleeps on when its requests have ended."""

    __slots__ = ()

    def joins(self, work: bool, in_flight: bool, peer_voted: bool) -> bool:
        self._voted_work = False
        return super().joins(work, in_flight, peer_voted)


@pytest.mark.parametrize(
    ("model", "group", "verdict"),
    [
        (Model(two_slots=False), {"requests": 2}, "never ends"),
        (Model(vote_first=False), {"requests": 2}, "unequal decisions"),
        (Model(looks_at_peers=False), {"requests": 1}, "never ends"),
        (Model(work_launches=True), {"requests": 1}, "never ends"),
        (Model(kind=LeavesAtOnce), {"requests": 1, "leaves": 1}, "leaves with a request"),
        (Model(votes_work_while_paused=False), {"requests": 1, "pauses": 1, "leaves": 1}, "leaves with a request"),
        (Model(kind=VotesWithStepInFlight), {"requests": 1, "pauses": 1}, "while a device runs"),
        (Model(kind=ForgetsEmptied), {"requests": 1, "pauses": 1, "leaves": 1, "aborts": 1}, "never ends"),
    ],
    ids=[
        "one slot a rank",
        "the number before the vote",
        "sleep without a look at the peers' slots",
        "dummies counted as work that launches",
        "leaving in the agreement that announces it",
        "a paused rank that votes no work",
        "a paused rank that votes with a step in flight",
        "a paused rank that drains and keeps its end to itself",
    ],
)
def test_a_broken_rule_is_found(model: Model, group: dict[str, int], verdict: str) -> None:
    with pytest.raises(RuleBroken, match=verdict):
        search(model, model.start(2, **group))


@given(
    ranks=st.integers(2, 8),
    happens=st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(0, 1), st.integers(0, 3), st.integers(0, 5)),
    moves=st.integers(0, 600),
    random=st.randoms(use_true_random=False),
)
@settings(max_examples=50)
def test_large_groups_in_some_orders(
    ranks: int, happens: tuple[int, int, int, int, int], moves: int, random: Random
) -> None:
    """Some moves in any order; then every rank moves on in turn, pauses end, and all must come to rest."""
    model = Model()
    world = model.start(ranks, *happens)
    for _ in range(moves):
        if found := list(model.moves(world)):
            world = random.choice(found).world
    for _ in range(1000):
        if at_rest(world):
            return
        for i in range(ranks):
            found = [move for move in model.moves_of(world, i) if move.forced]
            world = found[-1].world if found else world  # its own program's before what comes from outside
    raise AssertionError(f"no rest: {world}")
