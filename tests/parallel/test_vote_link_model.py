"""Votes as messages, in every order of events: the search of test_wave_model.py, with two ranks on two hosts.

Each rank runs the code's own `Wave` and `Ballots`; what `transport/io/vote_link.py` does around them is modelled: a
channel each way, whose messages may be lost, doubled, or overtake each other, and a rank that waits and so says now and
then what it knows. A rank that has left still answers. Rules that are broken on purpose show that each is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from tests.parallel.test_wave_model import (
    AGREEMENTS,
    NUMBER,
    Model,
    Move,
    Rank,
    RuleBroken,
    search,
    with_rank,
)

from wavecore.parallel.wave import Vote, Wave
from wavecore.transport.wire.ballots import Ballots, Told

ROOM = 2  # messages that a channel holds; what comes then is lost, which costs no fault
Message = tuple[int, tuple[tuple[int, Vote], ...], bool]  # agreement, votes by rank, again
State = tuple[int, tuple[Any, ...], tuple[Any, ...]]  # of `Ballots`


class LinkWorld(NamedTuple):
    """A `World`, and the link. `channels`: from 0 to 1, and from 1 to 0."""

    ranks: tuple[Rank, ...]
    requests: int
    pauses: int
    leaves: int
    aborts: int
    graphs: int
    decided: tuple[tuple[int, tuple[Any, ...]], ...] = ()
    ballots: tuple[State, State] = ((0, (), ()), (0, (), ()))
    channels: tuple[tuple[Message, ...], tuple[Message, ...]] = ((), ())
    losses: int = 0
    doubles: int = 0


def frozen(ballots: Ballots, base: int = 0) -> State:
    known = sorted((number - base, tuple(sorted(votes.items()))) for number, votes in ballots._known.items())
    told = sorted(((number - base, peer), tuple(sorted(ranks))) for (number, peer), ranks in ballots._told.items())
    return ballots.agreement - base, tuple(known), tuple(told)


@dataclass(frozen=True)
class LinkModel(Model):
    """The rules, and those that a control breaks."""

    ballots: type[Ballots] = Ballots
    repeats: bool = True
    answers_when_gone: bool = True

    def begin(self, losses: int = 0, doubles: int = 0, **happens: int) -> Any:
        return LinkWorld(*self.start(2, **happens), losses=losses, doubles=doubles)

    def moves(self, world: Any) -> Iterator[Move]:
        yield from super().moves(world)
        for i in range(2):
            yield from self._channel_moves(world, i)
            if self.repeats and world.ranks[i].at == "wait":
                ballots = self._ballots(world, i)
                if ballots.repeat() and not any(again for _, _, again in world.channels[i]):
                    yield Move(f"{i} repeats", True, self._say(world, i, ballots, ballots.agreement, again=True))

    def _channel_moves(self, world: Any, i: int) -> Iterator[Move]:
        """Of the messages from rank i to the other."""
        if not world.channels[i]:
            return
        message, *rest = world.channels[i]
        yield Move(f"{message} of {i} arrives", True, self._arrive(with_channel(world, i, rest), 1 - i, message))
        if world.losses:
            yield Move("and is lost", False, with_channel(world, i, rest)._replace(losses=world.losses - 1))
        if world.doubles:
            fewer = world._replace(doubles=world.doubles - 1)
            yield Move(f"{message} is doubled", False, with_channel(fewer, i, [message, *rest, message]))
            if rest:
                yield Move(f"{message} is overtaken", False, with_channel(fewer, i, [*rest, message]))

    def _arrive(self, world: Any, i: int, message: Message) -> Any:
        agreement, votes, again = message
        if world.ranks[i].at == "gone" and not self.answers_when_gone:
            return world
        ballots = self._ballots(world, i)
        due = ballots.take(1 - i, agreement, dict(votes), again)
        return self._spoken(world, i, ballots, agreement, due)

    def _spoken(self, world: Any, i: int, ballots: Ballots, agreement: int, due: Sequence[int]) -> Any:
        """What follows `publish` and `take`."""
        world = self._say(world, i, ballots, agreement) if due else with_ballots(world, i, ballots)
        if ballots.wakes(agreement):
            world = with_rank(world, i, world.ranks[i]._replace(bell=True))
        return world

    def _say(self, world: Any, i: int, ballots: Ballots, agreement: int, again: bool = False) -> Any:
        message = agreement, tuple(sorted(ballots.tell(1 - i, agreement).items())), again
        channel = world.channels[i] if len(world.channels[i]) >= ROOM else [*world.channels[i], message]
        return with_channel(with_ballots(world, i, ballots), i, channel)

    def _moves(self, world: Any, i: int, rank: Rank) -> Iterator[Move]:
        if rank.at != "write":
            yield from super()._moves(world, i, rank)
            return
        ballots, number = self._ballots(world, i), self._wave(rank).agreements
        due = ballots.publish(number, rank.vote)
        after = self._spoken(with_rank(world, i, rank._replace(at="wait")), i, ballots, number, due)
        yield Move(f"{i} votes {rank.vote}", True, after)

    def _written(self, rank: Rank, agreement: int, slot: Any) -> Any:
        return rank.slots

    def _votes(self, world: Any, i: int, agreement: int) -> Sequence[Vote | None]:
        votes: Any = self._ballots(world, i).votes(agreement)
        return [votes.get(rank) for rank in range(2)]

    def _peer_voted(self, world: Any, i: int, wave: Wave) -> bool:
        return bool(self._ballots(world, i).votes(wave.agreements + 1))

    def _ballots(self, world: LinkWorld, i: int) -> Ballots:
        agreement, known, told = world.ballots[i]
        ballots = self.ballots(i, range(2))
        ballots.agreement = agreement
        ballots._known = {number: dict(votes) for number, votes in known}
        ballots._told = {key: set(ranks) for key, ranks in told}
        return ballots

    def counted_from_zero(self, world: Any) -> Any:
        """What comes depends on differences of counters alone."""
        base = min(rank.wave[AGREEMENTS] for rank in world.ranks) - 2
        waves = min(rank.wave[NUMBER] for rank in world.ranks)
        base = max(base, 0)
        if not base and not waves:
            return world

        def lowered(rank: Rank) -> Rank:
            wave = list(rank.wave)
            wave[AGREEMENTS] -= base
            wave[NUMBER] -= waves
            return rank._replace(wave=tuple(wave))

        return world._replace(
            ranks=tuple(map(lowered, world.ranks)),
            decided=tuple((number - base, decision) for number, decision in world.decided),
            ballots=tuple(frozen(self._ballots(world, i), base) for i in range(2)),
            channels=tuple(
                tuple((number - base, votes, again) for number, votes, again in channel if number > base - 2)
                for channel in world.channels
            ),
        )


def with_channel(world: Any, i: int, channel: Sequence[Message]) -> Any:
    return world._replace(channels=(*world.channels[:i], tuple(channel), *world.channels[i + 1 :]))


def with_ballots(world: Any, i: int, ballots: Ballots) -> Any:
    return world._replace(ballots=(*world.ballots[:i], frozen(ballots), *world.ballots[i + 1 :]))


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "happens",
    [
        {"requests": 1, "losses": 1},
        {"requests": 0, "leaves": 1, "losses": 1},
        {"requests": 0, "leaves": 1, "doubles": 1},
        pytest.param({"requests": 0, "leaves": 1, "losses": 1, "doubles": 1}, marks=SLOW),
        pytest.param({"requests": 1, "doubles": 1}, marks=SLOW),
        pytest.param({"requests": 1, "losses": 1, "doubles": 1}, marks=SLOW),
        pytest.param({"requests": 1, "losses": 2}, marks=SLOW),
        pytest.param({"requests": 1, "leaves": 1, "losses": 1}, marks=SLOW),
        pytest.param({"requests": 1, "pauses": 1, "losses": 1}, marks=SLOW),
    ],
    ids=str,
)
@pytest.mark.timeout(600)  # the longest of the slow ones takes two and a half minutes
def test_every_order_of_messages_ends_well(happens: dict[str, int]) -> None:
    model = LinkModel()
    assert search(model, model.begin(**happens)) > 200


class ForgetsTheLast(Ballots):
    """Keeps no votes of the agreement before its own last one."""

    def publish(self, agreement: int, vote: Any) -> list[int]:
        due = super().publish(agreement, vote)
        self._known = {number: votes for number, votes in self._known.items() if number >= agreement}
        return due


class TrustsTheNetwork(Ballots):
    """Takes what it said once for heard."""

    def take(self, peer: int, agreement: int, votes: Told, again: bool) -> list[int]:
        return super().take(peer, agreement, votes, again=False)


class WakesNobody(Ballots):
    """Passes on complete agreements alone."""

    def _is_due(self, agreement: int, peer: int, known: Told, asks: bool) -> bool:
        return super()._is_due(agreement, peer, known, asks) and len(known) == 2


class CountsAnyVote(Ballots):
    """Takes a vote for one in its own next agreement, whatever its number."""

    def take(self, peer: int, agreement: int, votes: Told, again: bool) -> list[int]:
        del agreement
        return super().take(peer, self.agreement + (not self.missing()), votes, again)


@pytest.mark.parametrize(
    ("model", "happens", "verdict"),
    [
        (LinkModel(repeats=False), {"requests": 1, "losses": 1}, "never ends"),
        (LinkModel(ballots=ForgetsTheLast), {"requests": 0, "leaves": 1, "losses": 1}, "never ends"),
        (LinkModel(ballots=TrustsTheNetwork), {"requests": 1, "losses": 1}, "never ends"),
        (LinkModel(ballots=WakesNobody, repeats=False), {"requests": 1}, "never ends"),
        (LinkModel(ballots=CountsAnyVote), {"requests": 1, "doubles": 1}, "unequal decisions"),
        (LinkModel(answers_when_gone=False), {"requests": 0, "leaves": 1, "losses": 1}, "never ends"),
    ],
    ids=[
        "a rank that waits says nothing more",
        "votes of the last agreement are forgotten",
        "what was said counts as heard",
        "the head passes on nothing before it is complete",
        "a vote without its number",
        "a rank that left is silent",
    ],
)
def test_a_broken_rule_of_messages_is_found(model: LinkModel, happens: dict[str, int], verdict: str) -> None:
    with pytest.raises(RuleBroken, match=verdict):
        search(model, model.begin(**happens))
