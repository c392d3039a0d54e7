"""A client of engines at several places, of which access files say nothing but where they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.frontend.client.fake_engine import FakePump, World
from tests.support.waiting import until

from wavecore.frontend.client import deployment_watch
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.transport.curve import KeyPair
from wavecore.transport.errors import ConfigError, StartError
from wavecore.transport.processes.deployment import EngineEntry
from wavecore.transport.processes.places import AccessFile, Place
from wavecore.transport.wire.messages import Dead

PAIR = KeyPair.generate()


def access_file(*numbers: int, **resolved: Any) -> AccessFile:
    """Of engines on hosts of their own."""
    public, secret = PAIR.public.decode(), PAIR.secret.decode()
    ends = [{"input": f"tcp://10.0.0.{number}:5", "output": f"tcp://10.0.0.{number}:6"} for number in numbers]
    engines = [EngineEntry(n, "ready", server_key=public, **end) for n, end in zip(numbers, ends, strict=True)]
    return AccessFile(tuple(engines), resolved, public, secret, f"of {numbers}")


@pytest.fixture
def make_world(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    """A client of these places, soon tired of silence; `mute` engines do not answer."""
    monkeypatch.setattr(deployment_watch, "UNREACHABLE_SECONDS", 0.3)
    monkeypatch.setattr(deployment_watch, "LOOK_SECONDS", 0.02)
    worlds = []

    def make(*places: Place, mute: tuple[int, ...] = (), **options: Any) -> World:
        monkeypatch.setattr(FakePump, "mute", frozenset(mute))
        worlds.append(World(monkeypatch, places=places, **options))
        return worlds[-1]

    yield make
    for world in worlds:
        world.client.close()


def error_of(mailbox: Mailbox) -> str:
    until(lambda: mailbox.ended, "the end")
    output = mailbox.take()
    assert output is not None
    return str(output.error)


def begun(world: World, number: int) -> Mailbox:
    """A request of that engine that has a token."""
    mailbox = world.submit(rank=number)
    world.pump.step(number, [(world.pump.adds()[-1][1].handle, [5], 0)])
    return mailbox


def test_a_silent_host_counts_as_dead(make_world: Callable[..., World]) -> None:
    """What it had ends, or goes elsewhere without a token; what only it may have does not wait. It may come back."""
    world = make_world(access_file(2), access_file(7))
    lost, here, waiting = begun(world, 7), begun(world, 2), world.submit(rank=7)
    world.submit()
    world.submit()
    assert {index for index, _ in world.pump.adds()[3:]} == {2, 7}
    world.pump.disconnect(7)
    for mailbox in (lost, waiting, world.submit(rank=7)):
        assert error_of(mailbox).startswith("engine 7 at 10.0.0.7 has been out of reach for ")
    assert not here.ended
    assert world.pump.adds()[-1][0] == 2
    world.pump.reconnect(7)
    begun(world, 7)


def test_last_words_and_then_silence(make_world: Callable[..., World]) -> None:
    """An engine that said why it ends has as long to come back as one that is silent."""
    world = make_world(access_file(3))
    lost = begun(world, 3)
    words = "engine 3 at 10.0.0.3 ended in phase serve: out of memory"
    world.pump.on_event(3, Dead(world.pump.epochs[3], "engine_dead", "out of memory", "serve"))
    assert error_of(lost) == words
    again = world.submit()
    world.pump.new_life(3)
    assert not again.ended and world.pump.adds()[-1][0] == 3
    world.pump.on_event(3, Dead(world.pump.epochs[3], "engine_dead", "out of memory", "serve"))
    late = world.submit()
    assert error_of(late) == words
    assert error_of(world.submit()) == words  # at once
    assert not world.client.can_recover()


def test_a_host_that_never_answers(make_world: Callable[..., World]) -> None:
    world = make_world(access_file(0, 1), mute=(1,))
    assert "engine 1 at 10.0.0.1 has been out of reach for" in error_of(world.submit(rank=1))
    assert world.client.engines == [0]


def test_the_first_answer_may_take_as_long_as_the_caller_waits(
    make_world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.frontend.client.fake_engine.START_SECONDS", 1.0)
    with pytest.raises(StartError, match=r"no engine of of \(0,\), of \(1,\) answered within 1 s"):
        make_world(access_file(0), access_file(1), mute=(0, 1))


def test_a_deployment_that_was_stopped_beside_a_host_that_serves(make_world: Callable[..., World]) -> None:
    world = make_world(Path("/nowhere"), access_file(4))
    pinned = world.submit(rank=0)
    world.deployment.set_state("stopped")
    world.kill(0, "engine 0 was stopped")
    free = world.submit()
    assert error_of(pinned) == "the deployment in /nowhere is over"
    assert not free.ended and world.client.can_recover()
    assert world.pump.adds()[-1][0] == 4


@pytest.mark.parametrize(
    ("places", "reason"),
    [
        ((access_file(0), access_file(1, 0)), r"engine 0 is at two of of \(0,\), of \(1, 0\): .* data_parallel_rank"),
        ((access_file(0, vocab_size=5), access_file(1, vocab_size=7)), "different models cannot share .* 5.* 7"),
        ((Path("/nowhere"), access_file(0)), "engine 0 is at two of /nowhere"),
    ],
    ids=["numbers", "models", "a directory and a file"],
)
def test_places_that_do_not_fit(make_world: Callable[..., World], places: tuple[Place, ...], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_world(*places)
