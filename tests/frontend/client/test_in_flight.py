"""What a client remembers of requests under way, and what it forgets: handles, loads of engines, deadlines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.frontend.client.fake_engine import RESOLVED, World
from tests.support.tokenizers_for_tests import byte_level

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client import in_flight
from wavecore.frontend.client.engines import GRACE_SECONDS, Flight, Stay
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport.errors import EngineDead, MessageTooLarge, RequestTimeout, ValidationError, WavecoreError
from wavecore.transport.wire.messages import Add, FinishReason, Load, Ready

LENGTH = int(FinishReason.LENGTH)


def ids(text: str) -> list[int]:
    return byte_level().encode(text).ids


def submit_text(world: World, **params: Any) -> Mailbox:
    values = SamplingParams(**{"temperature": 0.0, **params})
    request = EngineRequest("r", None, np.ones(2, np.int32), values, values.to_wire())
    mailbox = Mailbox(request, Tokenizer(byte_level(), "test"), world.notifier, OutputKind.CUMULATIVE)
    world.client.submit(mailbox)
    return mailbox


def output_of(mailbox: Mailbox) -> Any:
    output = mailbox.take()
    assert output is not None
    return output


def loads(world: World) -> list[int]:
    return [engine.load for engine in world.client._requests._engines]


def test_a_stop_string_ends_its_choice_at_the_engine_too(world: World) -> None:
    """The engine knows nothing of it and would go on to max_tokens; the other choice does."""
    mailbox = submit_text(world, stop="b", n=2)
    handle = world.pump.adds()[0][1].handle
    world.pump.step(0, [(handle, ids("a"), 0), (handle + 1, ids("a"), 0)])
    assert world.pump.aborted() == []
    world.pump.step(0, [(handle, ids("b"), 0), (handle + 1, ids("c"), 0)])
    assert world.pump.aborted() == [handle] and world.client.num_live == 1
    world.pump.step(0, [(handle, ids("late"), 0), (handle + 1, ids("d"), 0)])
    assert [o.text for o in output_of(mailbox).outputs] == ["a", "acd"]
    world.pump.step(0, [(handle + 1, ids("b"), LENGTH)])  # ended by both: the engine needs no word
    assert world.pump.aborted() == [handle] and world.client.num_live == 0


def test_the_load_of_an_engine_falls_as_its_requests_end(pair: World) -> None:
    """However: at the engine, by an abort, by a stop string, by a death."""
    for i in range(4):
        pair.submit([1] * 50, max_tokens=50, resume=i == 3)
    (first, one), (second, two), (third, three), _ = pair.pump.adds()
    assert [first, second, third] == [0, 1, 0] and loads(pair) == [200, 200]
    pair.pump.step(0, [(one.handle, [5], LENGTH)])
    assert loads(pair) == [100, 200]
    for sent in list(pair.client._requests._flights.values()):
        if sent.at and two.handle in sent.at.handles:
            pair.client.abort(sent.mailbox)
    assert loads(pair) == [100, 100]
    pair.pump.step(0, [(three.handle, [5], 0)])
    pair.kill(0)  # what had a token fails
    assert loads(pair) == [0, 100]
    stopped = submit_text(pair, stop="b", max_tokens=8)
    assert loads(pair) == [0, 110]
    pair.pump.step(1, [(pair.pump.adds()[-1][1].handle, ids("b"), 0)])
    assert output_of(stopped).finished and loads(pair) == [0, 100]


def test_reports_count_the_tokens_of_others(pair: World) -> None:
    pair.submit([1] * 10, max_tokens=90)
    pair.pump.step(0, [], load=Load(50, 0, 1000))
    assert loads(pair) == [150, 0]
    pair.pump.step(0, [], load=Load(20, 0, 1000))
    assert loads(pair) == [120, 0]


def test_engines_of_equal_load_take_turns(pair: World) -> None:
    for _ in range(4):
        mailbox = pair.submit()
        pair.client.abort(mailbox)
    assert [index for index, _ in pair.pump.adds()] == [0, 1, 0, 1]


@pytest.mark.parametrize("wrap", [0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF])
def test_handles_of_choices_stay_within_32_bits(world: World, wrap: int) -> None:
    world.client._requests._next_handle = wrap
    world.submit(n=3)
    first = world.pump.adds()[-1][1].handle
    assert first + 2 <= in_flight.MAX_HANDLE
    assert set(world.client._requests._rows) == {first, first + 1, first + 2}


def test_only_choices_that_run_are_known_at_the_next_engine(world: World) -> None:
    mailbox = world.submit(n=2, kind=OutputKind.CUMULATIVE)
    first = world.pump.adds()[0][1].handle
    world.pump.step(0, [(first + 1, [], LENGTH)])
    world.kill(0)
    world.pump.new_life(0)
    again = world.pump.adds()[-1][1].handle
    world.pump.step(0, [(again, [7], LENGTH)])  # the engine makes both; the second one's rows are nobody's
    output = output_of(mailbox)
    assert [o.token_ids for o in output.outputs] == [[7], []] and output.finished
    assert world.client.num_live == 0


@pytest.mark.parametrize("seed", [None, 3])
def test_without_resume_a_request_with_tokens_is_never_sent_again(world: World, seed: int | None) -> None:
    mailbox = world.submit(temperature=1.0, seed=seed)
    world.pump.step(0, [(world.pump.adds()[0][1].handle, [5], 0)], {0: {"seed": 77}})
    world.kill(0)
    assert isinstance(output_of(mailbox).error, EngineDead)
    world.pump.new_life(0)
    assert len(world.pump.adds()) == 1


def test_tokens_of_any_choice_forbid_a_second_try(world: World) -> None:
    mailbox = world.submit(n=2)
    world.pump.step(0, [(world.pump.adds()[0][1].handle + 1, [5], 0)])
    world.kill(0)
    assert isinstance(output_of(mailbox).error, EngineDead)


def test_a_request_in_a_new_session_is_not_lost_with_the_old_one(pair: World) -> None:
    """The death of a life loses all that was sent to it, a new session only what came before."""
    old = pair.submit()
    other = pair.submit()
    pair.pump.new_session(0)
    (index, again) = pair.pump.adds()[-1]
    pair.pump.new_session(1 - index)  # of the engine that it is not at
    pair.pump.step(index, [(again.handle, [7], LENGTH)])
    assert output_of(old).outputs[0].token_ids == [7]
    pair.client.abort(other)


def test_an_abort_is_for_the_session_that_the_request_was_sent_in(world: World) -> None:
    """In a new one its handles mean nothing, or another request."""
    mailbox = world.submit()
    handle = world.pump.adds()[0][1].handle
    sent = next(iter(world.client._requests._flights.values()))
    sent.at.engine.client_id = b"n" * 16  # type: ignore[union-attr]
    world.client.abort(mailbox)
    assert handle not in world.pump.aborted() and world.client.num_live == 0


def test_an_abort_waits_in_the_stream_while_the_connection_is_broken(world: World) -> None:
    mailbox = world.submit()
    world.pump.disconnect(0)
    world.client.abort(mailbox)
    assert world.pump.aborted() == [world.pump.adds()[0][1].handle]
    assert world.notifier.wait(0) is mailbox


@pytest.mark.parametrize("error", [MessageTooLarge("too large for the next life"), ValidationError("prompt", "odd")])
def test_what_an_engine_refuses_when_it_is_sent_again_fails_alone(
    world: World, monkeypatch: pytest.MonkeyPatch, error: WavecoreError
) -> None:
    refused, other = world.submit([9] * 5), world.submit([3])
    send = world.pump.send

    def bounded(index: int, message: Any) -> bytes:
        if isinstance(message, Add) and world.prompt_of(message) == [9] * 5:
            raise error
        return send(index, message)

    world.kill(0)
    monkeypatch.setattr(world.pump, "send", bounded)
    world.pump.new_life(0)
    found = output_of(refused).error
    assert (type(found), str(found)) == (type(error), str(error))
    world.pump.step(0, [(world.pump.adds()[-1][1].handle, [7], LENGTH)])
    assert output_of(other).outputs[0].token_ids == [7]


def test_each_request_that_fails_has_an_error_of_its_own(world: World) -> None:
    """One object raised in many tasks would collect the tracebacks of all."""
    mailboxes = [world.submit(kind=OutputKind.FINAL) for _ in range(2)]
    world.deployment.set_state("failed")
    world.kill(0)
    assert {world.notifier.wait(5), world.notifier.wait(5)} == set(mailboxes)
    errors = [output_of(mailbox).error for mailbox in mailboxes]
    assert errors[0] is not errors[1] and str(errors[0]) == str(errors[1])


def flight_of(world: World, **options: Any) -> Flight:
    params = SamplingParams(temperature=0.0)
    request = EngineRequest("r", None, np.ones(1, np.int32), params, {}, RequestOptions(**options))
    mailbox = Mailbox(request, None, world.notifier, OutputKind.DELTA)
    mailbox.started = 1000.0
    return Flight(mailbox, [])


def test_when_a_client_gives_up_by_itself(world: World) -> None:
    """At an engine the request's own time counts, and some more; while it waits for one, the earliest of its deadlines;
    with tokens, no deadline of a beginning counts."""
    waiting = flight_of(world, timeout=100.0, queue_timeout=10.0, first_token_timeout=20.0)
    assert waiting.deadline == 1010.0
    waiting.at = Stay(world.client._requests._engines[0], b"", set())
    assert waiting.deadline == 1100.0 + GRACE_SECONDS
    waiting.at = None
    waiting.mailbox.deliver(0, [5], 1001.0, FinishReason.NONE, {}, ())
    assert waiting.deadline == 1100.0
    assert flight_of(world).deadline == float("inf")
    assert flight_of(world, first_token_timeout=20.0).deadline == 1020.0


def test_a_request_whose_time_is_up_is_ended_at_its_engine_and_others_live_on(world: World) -> None:
    late, other = world.submit(timeout=50.0), world.submit(timeout=500.0)
    handle = world.pump.adds()[0][1].handle
    late.started -= 50.0 + GRACE_SECONDS + 1
    world.client._requests.fail_overdue()
    error = output_of(late).error
    assert isinstance(error, RequestTimeout) and "the engine said nothing" in str(error)
    assert world.pump.aborted() == [handle] and world.client.num_live == 1
    world.client.abort(other)


def test_what_was_sent_into_a_session_before_the_client_heard_of_it_is_not_lost(world: World) -> None:
    """The IO thread knows the new session first, and a request may be submitted before it has told."""
    world.pump.client_ids[0] = b"n" * 16
    mailbox = world.submit()
    world.pump.on_event(0, Ready(world.pump.epochs[0], RESOLVED))
    [(_, add)] = world.pump.adds()
    world.pump.step(0, [(add.handle, [7], LENGTH)])
    assert output_of(mailbox).outputs[0].token_ids == [7]


def test_a_request_that_no_engine_takes_again_names_the_death_that_it_was_lost_by(pair: World) -> None:
    pair.submit()
    mailbox = pair.submit()
    pair.kill(0, "engine 0 was killed by signal 11")
    pair.kill(1, "engine 1 was killed by signal 9")
    pair.deployment.set_state("failed")
    error: Any = None
    while error is None:
        if pair.notifier.wait(5) is mailbox:
            error = output_of(mailbox).error
    assert "signal 9" in str(error)
