"""Which engine gets a request: room, load, turns, prefixes, ranks; and when one that waits moves to another."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.frontend.client.fake_engine import World

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import COUNTED_OUTPUT, SamplingParams
from wavecore.frontend.client import balance
from wavecore.frontend.client.balance import CACHED_WORTH, Balance
from wavecore.frontend.client.engines import EngineState, Flight, RemoteEngine
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.transport.errors import EngineDead, Overloaded
from wavecore.transport.processes.deployment import Cause
from wavecore.transport.wire.messages import Add, FinishReason, Load

ABORT, LENGTH = int(FinishReason.ABORT), int(FinishReason.LENGTH)
SYSTEM = list(range(1000))


def remotes(count: int, caching: bool = True) -> list[RemoteEngine]:
    resolved = {"enable_prefix_caching": caching}
    return [RemoteEngine(i, EngineState.UP, resolved=resolved) for i in range(count)]


def flight(balance: Balance, prompt: list[int], max_tokens: int | None = 1, n: int = 1, **options: Any) -> Flight:
    params = SamplingParams(temperature=1.0, n=n, max_tokens=max_tokens)
    request = EngineRequest("r", None, np.array(prompt, np.int32), params, {}, RequestOptions(**options))
    return Flight(Mailbox(request, None, ThreadNotifier(), OutputKind.FINAL), balance.prefixes(request))


def send(balance: Balance, *given: Any, **options: Any) -> int:
    sent = flight(balance, *given, **options)
    engine = balance.choose(sent)
    assert engine is not None
    balance.sent(sent, engine)
    return engine.index


def engines_of(world: World) -> list[int]:
    return [index for index, _ in world.pump.adds()]


# --- one unit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_tokens", "output"), [(7, 7), (None, COUNTED_OUTPUT), (1 << 20, COUNTED_OUTPUT)])
def test_a_request_counts_for_its_prompt_and_the_output_of_each_choice(max_tokens: int | None, output: int) -> None:
    assert flight(Balance([]), [1] * 5, max_tokens, n=3).mailbox.request.size == 5 + 3 * output


def test_the_load_of_others_does_not_vanish_behind_a_long_request_of_ours(pair: World) -> None:
    pair.submit([1], max_tokens=1000)
    pair.pump.step(0, [], load=Load(300, 0, 10**6))
    pair.pump.step(1, [], load=Load(0, 0, 10**6))
    assert [engine.load for engine in pair.client._engines.values()] == [1301, 0]


# --- the choice -------------------------------------------------------------------------------------------------------


def test_an_engine_that_cannot_take_the_prompt_now_is_the_worse_choice() -> None:
    first, second = engines = remotes(2)
    chooser = Balance(engines)
    first.report(Load(0, 0, 10))
    second.report(Load(5000, 0, 100))
    assert send(chooser, [1] * 10) == first.index
    assert send(chooser, [1] * 10) == second.index  # the first one's room is taken until it says otherwise
    first.report(Load(0, 0, 10))
    assert send(chooser, [1] * 10) == first.index
    second.report(Load(5000, 0, 0))
    assert send(chooser, [1] * 10) == first.index  # neither has room: the load counts


def test_clients_that_know_nothing_begin_at_different_engines() -> None:
    firsts = Counter(send(Balance(remotes(4)), [1]) for _ in range(400))
    assert set(firsts) == {0, 1, 2, 3} and max(firsts.values()) < 200


def test_prompts_that_begin_alike_go_to_one_engine_up_to_a_limit() -> None:
    engines = remotes(3)
    chooser = Balance(engines)
    home = send(chooser, [*SYSTEM, 1])
    following = [send(chooser, [*SYSTEM, 2 + i]) for i in range(3)]
    assert following == [home] * 3
    while (elsewhere := send(chooser, [*SYSTEM, 7])) == home:  # 512 of its tokens are known to be there
        assert engines[home].load <= CACHED_WORTH * 512 + len(SYSTEM) + 2
    assert {send(chooser, [*SYSTEM, 8]) for _ in range(300)} == {0, 1, 2}
    loads = [engine.load for engine in engines]
    assert elsewhere != home and max(loads) - min(loads) <= len(SYSTEM) + 2  # by then all have it


def test_the_longest_beginning_decides() -> None:
    """Two conversations under one system prompt, each at home where it was before."""
    chooser = Balance(remotes(2))
    talks = [[*SYSTEM[:64], *[100 + i] * 500] for i in range(2)]
    homes = []
    for rank, talk in enumerate(talks):
        homes.append(send(chooser, talk, data_parallel_rank=rank))
    assert homes == [0, 1]
    assert [send(chooser, [*talk, 3, 4, 5]) for talk in talks] == homes


@pytest.mark.parametrize(("salts", "together"), [(("a", "a"), True), (("a", "b"), False), ((None, "a"), False)])
def test_prefixes_are_those_of_one_cache_salt(salts: tuple[Any, Any], together: bool) -> None:
    chooser = Balance(remotes(2))
    first, second = (send(chooser, SYSTEM, cache_salt=salt) for salt in salts)
    assert (first == second) is together


@pytest.mark.parametrize("caching", [False, True])
def test_without_a_prefix_cache_nothing_is_remembered(caching: bool) -> None:
    chooser = Balance(remotes(2, caching))
    assert (send(chooser, SYSTEM) == send(chooser, SYSTEM)) is caching


def test_the_memory_of_prefixes_is_bounded_and_the_last_used_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "MAX_PREFIXES", 8)
    chooser = Balance(remotes(2))
    kept = [1] * 64
    for i in range(50):
        send(chooser, kept)
        send(chooser, [2 + i] * 64)
    assert len(chooser._holders) == 8 and flight(chooser, kept).prefixes[0] in chooser._holders
    assert len(flight(chooser, [1] * 100_000).prefixes) == 9  # up to 16,384 tokens: no more are hashed


def test_a_rank_is_where_a_request_goes_whatever_the_load(pair: World) -> None:
    for _ in range(3):
        pair.submit([1] * 50, rank=1)
    assert engines_of(pair) == [1, 1, 1]


def test_a_request_with_a_rank_waits_for_its_engine_and_no_other(pair: World) -> None:
    lost = pair.submit(rank=1)
    pair.kill(1)
    new = pair.submit(rank=1)
    assert engines_of(pair) == [1] and pair.client.engines == [0]
    pair.pump.new_life(1)
    assert engines_of(pair) == [1, 1, 1]
    for _, add in pair.pump.adds()[1:]:
        pair.pump.step(1, [(add.handle, [7], LENGTH)])
    assert lost.ended and new.ended


def test_a_request_with_a_rank_ends_with_its_engine_for_good(pair: World) -> None:
    waiting, other = pair.submit(rank=1), pair.submit(rank=0)
    one, two = pair.deployment.value.engines
    cause = Cause("start", "engine 1 could not be started again")
    pair.deployment.value = replace(pair.deployment.value, engines=(one, replace(two, state="failed", cause=cause)))
    pair.kill(1)
    output = waiting.take()
    assert output is not None and isinstance(output.error, EngineDead) and "started again" in str(output.error)
    assert not other.ended


# --- moves ------------------------------------------------------------------------------------------------------------


def queue_up(world: World, count: int = 4, **options: Any) -> list[Mailbox]:
    """So many requests at engine 0, where they wait; engine 1 is free from now on."""
    world.pump.step(1, [], load=Load(10**6, 0, 0))
    mailboxes = [world.submit([1] * 10, max_tokens=10, **options) for _ in range(count)]
    assert set(engines_of(world)) == {0}
    world.pump.step(1, [], load=Load(0, 0, 1000))
    return mailboxes


def test_what_waits_moves_to_an_engine_that_is_free(pair: World) -> None:
    """The last ones, and no more than makes the loads equal."""
    queue_up(pair, 6)
    handles = [add.handle for _, add in pair.pump.adds()]
    pair.pump.step(0, [], load=Load(0, 4, 0))
    assert engines_of(pair)[6:] == [1, 1, 1]
    assert pair.pump.aborted() == handles[:2:-1]
    sent = [message for _, message in pair.pump.sent]
    loads = [engine.load for engine in pair.client._engines.values()]
    assert abs(loads[0] - loads[1]) <= 20
    pair.pump.step(0, [], load=Load(0, 4, 0))
    pair.pump.step(1, [], load=Load(0, 4, 0))
    assert [message for _, message in pair.pump.sent] == sent  # neither further nor back


def test_a_report_behind_the_end_moves_nothing(pair: World) -> None:
    """Between `close` and the goodbye's way out an engine still reports."""
    mailboxes = queue_up(pair)
    requests = pair.client._requests
    requests.fail_all("closed")
    for engine in pair.client._engines.values():
        requests.report(engine, Load(0, 4, 0))
    assert all(mailbox.ended for mailbox in mailboxes) and not requests.live


def test_no_more_moves_than_wait(pair: World) -> None:
    queue_up(pair, 6)
    pair.pump.step(0, [], load=Load(0, 1, 0))
    assert engines_of(pair)[6:] == [1]


def test_what_an_engine_says_of_a_request_that_has_moved_is_dropped(pair: World) -> None:
    mailbox = queue_up(pair)[-1]
    old = pair.pump.adds()[-1][1].handle
    pair.pump.step(0, [], load=Load(0, 1, 0))
    new = pair.pump.adds()[-1][1].handle
    pair.pump.step(0, [(old, [98], 0)], {0: {"seed": 1}})
    pair.pump.step(0, [(old, [99], LENGTH)])  # it was done before it heard of the abort
    assert mailbox.take() is None
    pair.pump.step(1, [(new, [5], LENGTH)])
    output = mailbox.take()
    assert output is not None and output.outputs[0].token_ids == [5]


@pytest.mark.parametrize("why", ["a rank", "a token", "room", "a full wire"])
def test_what_does_not_move(pair: World, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    mailboxes = queue_up(pair, rank=0 if why == "a rank" else None)
    if why == "a token":
        handles = [add.handle for _, add in pair.pump.adds()]
        pair.pump.step(0, [(handle, [5], 0) for handle in handles])
    if why == "room":
        pair.pump.step(1, [], load=Load(0, 0, 9))
    if why == "a full wire":
        send = pair.pump.send

        def refuse(index: int, message: Any) -> bytes:
            if isinstance(message, Add):
                raise Overloaded("too much is not acknowledged")
            return send(index, message)

        monkeypatch.setattr(pair.pump, "send", refuse)
    pair.pump.step(0, [], load=Load(0, 4, 0))
    assert engines_of(pair) == [0] * 4 and not pair.pump.aborted() and not any(m.ended for m in mailboxes)


def test_the_time_of_a_request_goes_on_when_it_moves(pair: World) -> None:
    [mailbox] = queue_up(pair, 1, timeout=100.0, queue_timeout=50.0)
    mailbox.started -= 40.0
    pair.pump.step(0, [], load=Load(0, 1, 0))
    assert engines_of(pair) == [0]  # alone: nothing is gained
    pair.pump.step(0, [], load=Load(500, 1, 0))
    options = pair.pump.adds()[-1][1].options
    assert engines_of(pair) == [0, 1] and options["timeout"] <= 60.0 and options["queue_timeout"] <= 10.0


def moved_at_a_death(pair: World, confirmed: bool) -> Mailbox:
    """A request that was moved from engine 0, which dies; then engine 1 does."""
    [mailbox] = queue_up(pair, 1)
    old = pair.pump.adds()[-1][1].handle
    pair.pump.step(0, [], load=Load(500, 1, 0))
    if confirmed:
        pair.pump.step(0, [(old, [], ABORT)])
    pair.kill(0)
    assert not mailbox.ended
    pair.pump.new_life(0)
    pair.kill(1, "engine 1 was killed by signal 9")
    return mailbox


def test_a_request_that_was_perhaps_still_there_at_a_death_has_one_left(pair: World) -> None:
    """It may have been the cause before the engine heard that it was moved."""
    output = moved_at_a_death(pair, confirmed=False).take()
    assert output is not None and "died for the second time" in str(output.error)


def test_a_request_that_had_left_before_a_death_is_innocent(pair: World) -> None:
    mailbox = moved_at_a_death(pair, confirmed=True)
    assert not mailbox.ended and engines_of(pair)[-1] == 0


def test_a_second_death_in_the_place_that_it_left_ends_a_request_where_it_is(pair: World) -> None:
    [mailbox] = queue_up(pair, 1)
    pair.pump.step(1, [], load=Load(10**6, 0, 0))
    pair.kill(0)  # the first
    assert engines_of(pair)[-1] == 1
    pair.pump.new_life(0)
    pair.pump.step(0, [], load=Load(0, 0, 1000))
    pair.pump.step(1, [], load=Load(10**6, 1, 0))
    assert engines_of(pair)[-1] == 0
    pair.kill(1)  # it was moved away, but the engine has not said so
    handle = pair.pump.adds()[-1][1].handle
    assert mailbox.ended and pair.pump.aborted()[-1] == handle
