"""EngineClient against fake engines: exactly one end for each request, whatever dies and whatever comes late."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from tests.frontend.client.fake_engine import FakePump, World
from tests.support.waiting import until

from wavecore.frontend.client import engines
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.transport.errors import EngineDead, NumericalError, Overloaded, RequestError, RequestTimeout, StartError
from wavecore.transport.io.connection import ClientFailed
from wavecore.transport.processes.deployment import Cause
from wavecore.transport.wire.messages import Dead, FinishReason, Load, Result

STOP, LENGTH, ERROR = int(FinishReason.STOP), int(FinishReason.LENGTH), int(FinishReason.ERROR)


def tokens_of(mailbox: Mailbox) -> list[int]:
    output = mailbox.take()
    return output.outputs[0].token_ids if output else []


def error_of(mailbox: Mailbox) -> Any:
    output = mailbox.take()
    assert output is not None
    assert output.finished
    return output.error


def test_a_request_from_start_to_end(world: World) -> None:
    mailbox = world.submit()
    [(_, add)] = world.pump.adds()
    world.pump.step(0, [(add.handle, [5], 0)], {0: {"seed": 9, "cached_tokens": 1}})
    world.pump.step(0, [(add.handle, [6, 7], 0)])
    assert world.notifier.wait(0) is mailbox
    assert world.notifier.wait(0) is None  # one slot: told once until it takes
    output = mailbox.take()
    assert output is not None
    assert (output.outputs[0].token_ids, output.outputs[0].seed, output.num_cached_tokens) == ([5, 6, 7], 9, 1)
    world.pump.step(0, [(add.handle, [8], LENGTH)])
    output = mailbox.take()
    assert output is not None
    assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == ([8], "length")
    assert world.client.num_live == 0
    world.pump.step(0, [(add.handle, [9], STOP), (777, [1], 0)])  # late and unknown rows are dropped
    assert mailbox.take() is None


def test_choices_have_consecutive_handles_and_end_apart(world: World) -> None:
    mailbox = world.submit(n=3, kind=OutputKind.FINAL)
    [(_, add)] = world.pump.adds()
    after = world.submit()
    assert world.pump.adds()[1][1].handle == add.handle + 3
    world.pump.step(0, [(add.handle + 1, [5], STOP), (add.handle, [6], 0)])
    assert world.notifier.wait(0) is None
    world.pump.step(
        0, [(add.handle, [7], LENGTH), (add.handle + 2, [], ERROR)], {1: {"code": "numerical", "message": "NaN"}}
    )
    output = mailbox.take()
    assert output is not None
    assert [o.finish_reason for o in output.outputs] == ["length", "stop", "error"]
    assert isinstance(output.error, NumericalError)
    world.client.abort(after)


def test_abort_reaches_the_engine_once(world: World) -> None:
    mailbox = world.submit()
    [(_, add)] = world.pump.adds()
    world.client.abort(mailbox)
    world.client.abort(mailbox)
    assert world.pump.aborted() == [add.handle]
    assert world.client.num_live == 0
    output = mailbox.take()
    assert output is not None
    assert output.outputs[0].finish_reason == "abort"


def test_errors_of_the_engine_come_as_their_type(world: World) -> None:
    mailbox = world.submit()
    [(_, add)] = world.pump.adds()
    world.pump.step(0, [(add.handle, [], ERROR)], {0: {"code": "overloaded", "message": "full"}})
    assert isinstance(error_of(mailbox), Overloaded)


def test_killed_engine_fails_what_had_tokens_and_sends_the_rest_again(world: World) -> None:
    begun, waiting = world.submit(), world.submit([3, 4])
    first, second = (add.handle for _, add in world.pump.adds())
    world.pump.step(0, [(first, [5], 0)])
    world.kill(0)
    output = begun.take()
    assert output is not None
    assert output.outputs[0].token_ids == [5]
    assert "signal 9" in str(output.error)
    assert waiting.take() is None
    assert world.client.engines == []
    with pytest.raises(EngineDead, match="signal 9"):
        world.client.check_health()
    world.pump.new_life(0)
    _, again = world.pump.adds()[-1]
    assert world.prompt_of(again) == [3, 4]
    assert again.handle not in (first, second)
    world.pump.step(0, [(second, [9], STOP)])  # of the old life: the handle is nobody's
    assert waiting.take() is None
    world.pump.step(0, [(again.handle, [7], STOP)])
    assert tokens_of(waiting) == [7]


def test_second_death_before_the_first_token_is_the_end(world: World) -> None:
    mailbox = world.submit()
    world.kill(0)
    world.pump.new_life(0)
    other = world.submit()
    world.kill(0, "engine 0 was killed by signal 11")
    error = str(error_of(mailbox))
    assert "signal 11" in error
    assert "died for the second time, may well be the cause" in error
    assert world.client.num_live == 1  # it saw one death only
    world.pump.new_life(0)
    world.pump.step(0, [(world.pump.adds()[-1][1].handle, [7], STOP)])
    assert tokens_of(other) == [7]


def test_other_engine_takes_over_at_once(pair: World) -> None:
    mailbox = pair.submit()
    [(index, _)] = pair.pump.adds()
    pair.kill(index)
    moved_to, again = pair.pump.adds()[-1]
    assert moved_to == 1 - index
    pair.pump.step(moved_to, [(again.handle, [4], STOP)])
    assert tokens_of(mailbox) == [4]


def test_nobody_comes_back(world: World) -> None:
    mailbox = world.submit()
    world.deployment.set_state("failed")
    world.kill(0)
    assert world.notifier.wait(5) is mailbox
    assert "signal 9" in str(error_of(mailbox))


def test_submitted_while_the_engine_is_restarted(world: World) -> None:
    """It waits like one that was submitted just before the death, and has a second try of its own."""
    before = world.submit([3])
    world.kill(0)
    world.deployment.set_state("restarting")
    after = world.submit([4], timeout=100.0)
    assert world.client.num_live == 2
    for flight in world.client._requests._flights.values():
        flight.mailbox.started -= 60.0
    world.pump.new_life(0)
    first, second = (add for _, add in world.pump.adds()[1:])
    assert [world.prompt_of(first), world.prompt_of(second)] == [[3], [4]]
    assert second.options["timeout"] == pytest.approx(40.0, abs=5.0)
    world.kill(0)
    assert isinstance(error_of(before), EngineDead)
    world.pump.new_life(0)
    world.pump.step(0, [(world.pump.adds()[-1][1].handle, [7], STOP)])
    assert tokens_of(after) == [7]


def test_submitted_over_a_broken_connection(world: World) -> None:
    world.pump.disconnect(0)
    mailbox = world.submit()
    world.pump.reconnect(0)
    world.pump.step(0, [(world.pump.adds()[-1][1].handle, [7], STOP)])
    assert tokens_of(mailbox) == [7]


@pytest.mark.parametrize("deadline", ["timeout", "queue_timeout"])
def test_a_wait_for_the_restart_has_the_requests_deadline(world: World, deadline: str) -> None:
    world.kill(0)
    mailbox = world.submit(**{deadline: 0.01})  # type: ignore[arg-type]
    assert world.notifier.wait(5) is mailbox
    error = error_of(mailbox)
    assert isinstance(error, RequestTimeout)
    assert "signal 9" in str(error)


def test_the_restart_that_was_waited_for_fails(world: World) -> None:
    world.kill(0)
    mailbox = world.submit()
    assert world.notifier.wait(0.3) is None
    world.deployment.set_state("failed")
    assert world.notifier.wait(5) is mailbox
    error = error_of(mailbox)
    assert isinstance(error, EngineDead)
    assert "signal 9" in str(error)
    assert "signal 9" in str(error_of(world.submit()))  # and now there is nothing to wait for


def test_the_restarted_engine_takes_no_more_clients(world: World) -> None:
    world.kill(0)
    mailbox = world.submit()
    world.pump.on_event(0, Dead(b"e" * 16, Overloaded.code, "1000 clients are attached", "connect"))
    assert isinstance(error_of(mailbox), Overloaded)


def test_a_death_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    mailbox = world.submit()
    world.pump.step(0, [(world.pump.adds()[0][1].handle, [5], 0)])
    world.kill(0)
    assert "signal 9" in str(error_of(mailbox))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 1.0}])
def test_resume_goes_on_with_prompt_tokens_and_seed(world: World, params: dict[str, Any]) -> None:
    mailbox = world.submit([1, 2], resume=True, kind=OutputKind.CUMULATIVE, **params)
    [(_, add)] = world.pump.adds()
    world.pump.step(0, [(add.handle, [5, 6], 0)], {0: {"seed": params.get("seed", 77)}})
    world.kill(0)
    world.pump.new_life(0)
    _, again = world.pump.adds()[-1]
    assert world.prompt_of(again) == [1, 2, 5, 6]
    assert again.options["emitted"] == 2
    assert again.params.get("seed") == params.get("seed", 77)
    world.pump.step(0, [(again.handle, [10], 0)])
    assert tokens_of(mailbox) == [5, 6, 10]
    world.kill(0)
    error = str(error_of(mailbox))
    assert "signal 9" in error
    assert "may well be the cause" in error


def test_what_is_sent_again_has_the_rest_of_its_time(world: World) -> None:
    begun = world.submit(resume=True, timeout=100.0, prompt_logprobs=1)
    waiting = world.submit(timeout=100.0)
    first = world.pump.adds()[0][1]
    assert first.options["timeout"] == pytest.approx(100.0, abs=1.0)
    world.pump.step(0, [(first.handle, [5], 0)])
    for flight in world.client._requests._flights.values():
        flight.mailbox.started -= 60.0
    world.kill(0)
    world.pump.new_life(0)
    resumed, again = (add for _, add in world.pump.adds()[2:])
    assert resumed.options["timeout"] == pytest.approx(40.0, abs=5.0)
    assert again.options["timeout"] == pytest.approx(40.0, abs=5.0)
    assert "prompt_logprobs" not in resumed.params  # reported already
    world.client.abort(begun)
    world.client.abort(waiting)


def test_new_session_with_the_same_life_loses_requests_too(world: World) -> None:
    begun, waiting = world.submit(), world.submit()
    first = world.pump.adds()[0][1].handle
    world.pump.step(0, [(first, [5], 0)])
    world.pump.new_session(0)
    assert isinstance(error_of(begun), EngineDead)
    assert waiting.take() is None
    assert len(world.pump.adds()) == 3


def test_broken_connection_alone_costs_nothing(world: World) -> None:
    mailbox = world.submit()
    [(_, add)] = world.pump.adds()
    world.pump.disconnect(0)
    assert world.client.engines == []
    world.pump.reconnect(0)
    world.pump.step(0, [(add.handle, [5], STOP)])
    assert tokens_of(mailbox) == [5]
    assert len(world.pump.adds()) == 1


def test_out_of_reach_for_too_long(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecore.frontend.client.deployment_watch.UNREACHABLE_SECONDS", 0.05)
    mailbox = world.submit()
    [(_, add)] = world.pump.adds()
    world.pump.step(0, [(add.handle, [5], 0)])
    assert world.notifier.wait(0) is mailbox
    mailbox.take()
    world.pump.disconnect(0)
    assert world.notifier.wait(5) is mailbox
    assert "out of reach" in str(error_of(mailbox))


def test_engine_that_comes_into_reach_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wavecore.frontend.client.deployment_watch.UNREACHABLE_SECONDS", 0.05)
    begun, waiting = world.submit(), world.submit()
    first, second = (add.handle for _, add in world.pump.adds())
    world.pump.step(0, [(first, [5], 0)])
    world.pump.disconnect(0)
    ended = {world.notifier.wait(5), world.notifier.wait(5)}
    while ended != {begun, waiting}:  # the first was told of its token before
        ended.add(world.notifier.wait(5))
    for mailbox in (begun, waiting):  # a wait for an engine that is ready, but not for us, would have no end
        assert world.notifier.wait(0) in (None, begun, waiting)
        assert "out of reach" in str(error_of(mailbox))
    assert "out of reach" in str(error_of(world.submit()))
    assert set(world.pump.aborted()) == {first, second}  # it hears so when it is back
    world.pump.reconnect(0)
    mailbox = world.submit()
    world.pump.step(0, [(world.pump.adds()[-1][1].handle, [6], STOP)])
    assert tokens_of(mailbox) == [6]


def test_restarted_engine_is_followed_to_a_new_address(world: World) -> None:
    world.kill(0)
    moved = replace(world.deployment.value.engines[0], input="tcp://127.0.0.1:5", output="tcp://127.0.0.1:6")
    world.deployment.value = replace(world.deployment.value, engines=(moved,))
    until(lambda: world.client.engines, "the engine in its next life")
    assert world.pump.addresses[0] == ("tcp://127.0.0.1:5", "tcp://127.0.0.1:6")


def test_the_deployment_is_read_only_while_an_engine_is_not_up(pair: World) -> None:
    assert pair.client._watches[0]._planned is None
    pair.kill(1)
    assert pair.client._watches[0]._planned is not None
    pair.pump.new_life(1)
    until(lambda: pair.client._watches[0]._planned is None, "the end of the watch")


def test_the_death_of_one_engine_is_seen_while_another_is_down(pair: World) -> None:
    pair.kill(0)
    mailbox = pair.submit()
    [(index, add)] = pair.pump.adds()
    pair.pump.step(index, [(add.handle, [5], 0)])
    assert pair.notifier.wait(0) is mailbox
    mailbox.take()
    pair.pump.disconnect(1)  # the cause is written a moment later
    pair.deployment.causes[pair.pump.epochs[1]] = Cause("signal", "engine 1 was killed by signal 11", signal=11)
    assert pair.notifier.wait(5) is mailbox
    assert "signal 11" in str(error_of(mailbox))


def test_last_words_come_first(world: World) -> None:
    mailbox = world.submit()
    [(_, add)] = world.pump.adds()
    world.pump.step(0, [(add.handle, [5], 0)])
    mailbox.take()
    world.pump.on_event(0, Dead(world.pump.epochs[0], "internal", "boom", "serve"))
    assert "boom" in str(error_of(mailbox))
    world.kill(0)  # the process ends after its last words: nothing left to say
    assert mailbox.take() is None


def test_calls(world: World) -> None:
    call = world.client.call("stats", {"a": 1})
    number = world.pump.sent[-1][1].call  # type: ignore[union-attr]
    world.pump.on_event(0, Result(b"", 1, number, "", "", {"x": 1}))
    assert call.result(5).value == {"x": 1}
    failing = world.client.call("nothing")
    world.pump.on_event(0, Result(b"", 1, number + 1, "validation", "method: unknown", None))
    with pytest.raises(ValueError, match="unknown"):
        failing.result(5)
    world.pump.on_event(0, Result(b"", 1, 999, "", "", None))  # nobody asked


def test_pending_calls_fail_with_the_engine(world: World) -> None:
    calls = [world.client.call("stats") for _ in range(3)]
    world.kill(0)
    for call in calls:
        with pytest.raises(EngineDead, match="signal 9"):
            call.result(5)
    with pytest.raises(EngineDead, match="signal 9"):
        world.client.call("stats")


def test_a_call_whose_answer_was_on_its_way_at_a_fork_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    call = world.client.call("stats")
    number = world.pump.sent[-1][1].call  # type: ignore[union-attr]
    with monkeypatch.context() as fork:
        fork.setattr("_thread.start_new_thread", lambda *_: 0)  # the thread that has the answer stays in the parent
        world.pump.on_event(0, Result(b"", 1, number, "", "", {"x": 1}))
    world.client.forked()
    with pytest.raises(RequestError, match="belongs to process"):
        call.result(5)


def test_call_without_an_answer_ends(world: World) -> None:
    with pytest.raises(RequestTimeout, match="gave no answer"):
        world.client.call("stats", timeout=0.01).result(5)


def test_deadline_when_the_engine_says_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "GRACE_SECONDS", 0.01)
    mailbox = world.submit(timeout=0.01)
    assert world.notifier.wait(5) is mailbox
    assert isinstance(error_of(mailbox), RequestTimeout)
    assert world.pump.aborted()


def test_close_ends_everything(world: World) -> None:
    mailbox, call = world.submit(), world.client.call("stats")
    world.client.close()
    world.client.close()
    assert isinstance(error_of(mailbox), RequestError)
    with pytest.raises(RequestError, match="closed"):
        call.result(5)
    assert world.pump.closed
    error = error_of(world.submit())
    assert isinstance(error, EngineDead)
    assert "closed" in str(error)
    assert world.client.num_live == 0


def test_load_is_balanced_by_tokens(pair: World) -> None:
    """A burst is spread evenly although no engine reports in between, and a stale report changes nothing."""
    for i in range(256):
        pair.submit([1] * 10, max_tokens=90)
        if i == 100:
            pair.pump.step(0, [], load=Load(0, 0, 1000))
    counts = [sum(index == i for index, _ in pair.pump.adds()) for i in (0, 1)]
    assert max(counts) / min(counts) <= 1.1
    pair.pump.step(0, [], load=Load(10**6, 0, 1000))  # somebody else keeps engine 0 busy
    for _ in range(10):
        pair.submit()
    assert all(index == 1 for index, _ in pair.pump.adds()[-10:])


def test_handles_wrap(world: World) -> None:
    world.client._requests._next_handle = 0xFFFFFFFE
    world.submit(n=4)
    assert world.pump.adds()[-1][1].handle == 1


def test_no_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePump, "connect", lambda *_: None)
    monkeypatch.setattr("tests.frontend.client.fake_engine.START_SECONDS", 0.01)
    with pytest.raises(StartError, match="answered within"):
        World(monkeypatch)


def test_deployment_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePump, "connect", lambda *_: None)
    with pytest.raises(EngineDead, match="is over"):
        World(monkeypatch, state="failed")


def test_a_failed_io_thread_ends_everything_at_once(world: World) -> None:
    """No event can come any more, so nothing may wait for one: requests, calls, and later submits name the cause."""
    mailbox = world.submit()
    call = world.client.call("stats")
    world.pump.on_event(0, ClientFailed("OSError: too many open files"))
    error = error_of(mailbox)
    assert isinstance(error, RequestError)
    assert "too many open files" in str(error)
    with pytest.raises(RequestError, match="too many open files"):
        call.result(5)
    assert "too many open files" in str(error_of(world.submit()))


def test_an_engine_that_takes_no_more_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = Dead(b"e" * 16, Overloaded.code, "1000 clients are attached", "connect")

    def refuse(pump: FakePump, index: int) -> None:
        pump.on_event(index, refusal)

    monkeypatch.setattr(FakePump, "new_life", refuse)
    with pytest.raises(Overloaded, match="1000 clients"):
        World(monkeypatch)
