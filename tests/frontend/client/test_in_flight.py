"""What a client remembers of requests under way, and what it forgets: handles, loads of engines, deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.frontend.client.fake_engine import RESOLVED, World
from tests.support.tokenizers_for_tests import byte_level

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client import in_flight, offline
from wavecore.frontend.client.engines import GRACE_SECONDS, Flight, Stay
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.llm import LLM
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.transport import forks
from wavecore.transport.errors import (
    EngineDead,
    MessageTooLarge,
    Overloaded,
    RequestError,
    RequestTimeout,
    ValidationError,
    WavecoreError,
)
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


@pytest.mark.parametrize("wrap", [0xFFFFFFFC, 0xFFFFFFFD, 0xFFFFFFFE, 0xFFFFFFFF])
def test_handles_of_choices_stay_within_32_bits(world: World, wrap: int) -> None:
    world.client._requests._next_handle = wrap
    world.submit(n=3)
    first = world.pump.adds()[-1][1].handle
    assert first == (wrap if wrap + 3 <= in_flight.MAX_HANDLE else 1)
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


class Recorder:
    """Notes what a notifier is asked to tell, and says whether there is anybody to tell."""

    def __init__(self, there: bool = True) -> None:
        self.told: list[list[Mailbox]] = []
        self.there = there

    def notify(self, mailboxes: Sequence[Mailbox]) -> bool:
        self.told.append(list(mailboxes))
        return self.there


def test_a_request_that_is_read_once_is_looked_at_once(world: World) -> None:
    """Thousands of an offline batch get a token in each step."""
    mailbox = world.submit(kind=OutputKind.FINAL)
    mailbox.notifier = recorder = Recorder()
    handle = world.pump.adds()[0][1].handle
    world.pump.step(0, [(handle, [5], 0)])
    assert recorder.told == []
    world.pump.step(0, [(handle, [6], LENGTH)])
    assert recorder.told == [[mailbox]]


def test_a_request_that_nobody_can_read_any_more_ends_at_the_engine(world: World) -> None:
    mailbox, other = world.submit(), world.submit()
    mailbox.notifier = Recorder(there=False)
    handles = [add.handle for _, add in world.pump.adds()]
    world.pump.step(0, [(handle, [5], 0) for handle in handles])
    assert world.pump.aborted() == handles[:1] and world.client.num_live == 1
    world.client.abort(other)


def test_a_client_that_ends_ends_what_its_io_thread_has_not_seen_yet_and_what_callers_gave_up(world: World) -> None:
    unseen, given_up = world.submit(), world.submit()
    requests = world.client._requests
    requests._forget(requests._flights[unseen])  # as if its submission waited in the queue
    requests.live.add(unseen)
    requests.live.discard(given_up)
    world.client.close()
    assert isinstance(output_of(unseen).error, RequestError) and isinstance(output_of(given_up).error, RequestError)


def test_an_engine_that_is_given_up_is_told_to_end_its_own_requests_alone(pair: World) -> None:
    for _ in range(4):
        pair.submit()
    pair.client._requests.abort_all_at(pair.client._requests._engines[1])
    assert pair.pump.aborted() == [add.handle for index, add in pair.pump.adds() if index == 1]


def test_only_a_second_death_makes_a_request_its_cause(world: World) -> None:
    """Neither a first death nor an engine that forgot this client and lives."""
    begun, waiting = world.submit(), world.submit()
    world.pump.step(0, [(world.pump.adds()[0][1].handle, [5], 0)])
    world.kill(0)
    assert "the cause" not in str(output_of(begun).error)
    world.pump.new_life(0)
    world.pump.new_session(0)
    error = output_of(waiting).error
    assert "forgot" not in str(error) and "ended its requests" in str(error) and "the cause" not in str(error)


def test_a_refusal_says_more_than_the_death_before_it(world: World) -> None:
    mailbox = world.submit()
    world.kill(0)
    world.client._requests.fail_waiting(Overloaded("as many clients as it takes"))
    assert isinstance(output_of(mailbox).error, Overloaded)


def test_a_request_is_among_the_living_or_ended_at_every_moment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork may come between any two steps of its end; the child ends whatever lives."""
    requests = world.client._requests
    seen: list[Mailbox] = []
    end = Mailbox.end

    def ended(mailbox: Mailbox, *args: Any) -> None:
        assert mailbox in requests.live
        seen.append(mailbox)
        end(mailbox, *args)

    failed, refused = world.submit(), world.submit()
    with monkeypatch.context() as watched:
        watched.setattr(Mailbox, "end", ended)
        requests._fail({requests._flights[failed]: EngineDead("gone")})
        requests.refuse(refused, EngineDead("gone"))
    assert seen == [failed, refused] and world.client.num_live == 0


@pytest.fixture
def llm(world: World, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Of requests that end when they are submitted, and of whose ends the word stays in the parent of a fork."""

    def mailbox_of(request: EngineRequest, notifier: Any, kind: OutputKind) -> Mailbox:
        return Mailbox(request, None, notifier, kind)

    def submit_and_end(mailbox: Mailbox) -> None:
        submit(mailbox)
        world.pump.step(0, [(world.pump.adds()[-1][1].handle, [7], LENGTH)])

    submit = world.client.submit
    monkeypatch.setattr(world.client, "submit", submit_and_end)
    monkeypatch.setattr(in_flight, "notify", lambda _: [])
    llm = LLM.__new__(LLM)
    llm._service = SimpleNamespace(  # type: ignore[assignment]
        client=world.client, mailbox=mailbox_of, resolved={"max_num_queued_reqs": 100}
    )
    return llm


def request_of(name: str) -> EngineRequest:
    params = SamplingParams(temperature=0.0)
    return EngineRequest(name, None, np.ones(2, np.int32), params, params.to_wire())


def test_a_batch_that_is_forked_in_the_middle_of_its_ends_ends_in_the_child_too(llm: LLM) -> None:
    batch = offline._Batch(llm._service, [request_of("a"), request_of("b")])
    assert batch in forks._told
    batch.send()
    batch.forked()
    while len(batch.done) < 2:
        batch.receive()
    assert [batch.done[i].outputs[0].token_ids for i in range(2)] == [[7], [7]]


def test_a_stream_that_is_forked_in_the_middle_of_its_end_ends_in_the_child_too(llm: LLM) -> None:
    assert [output.outputs[0].token_ids for output in llm._deltas(request_of("a"))] == [[7]]


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
