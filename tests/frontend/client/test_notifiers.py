"""How a loop hears of a step: once, however many streams it runs, and with turns for whatever else runs in it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import Mailbox, OutputKind, notify
from wavecore.frontend.client.notifiers import STREAMS_A_TURN, LoopNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.transport.wire.messages import FinishReason

NOW = 0.0


def mailboxes_of(notifier: LoopNotifier, count: int, kind: OutputKind = OutputKind.DELTA) -> list[Mailbox]:
    request = EngineRequest("r", None, np.ones(1, np.int32), SamplingParams(), {})
    return [Mailbox(request, None, notifier, kind) for _ in range(count)]


def deliver(mailboxes: list[Mailbox], finish: FinishReason = FinishReason.NONE) -> None:
    """A step with a token for each; here from the loop's own thread."""
    for mailbox in mailboxes:
        mailbox.deliver(0, [5], NOW, finish, {}, ())
    assert notify(mailboxes) == []


async def test_a_step_is_one_call_into_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    calls: list[Callable[..., object]] = []
    call_soon = loop.call_soon_threadsafe

    def counted(call: Callable[..., object], *args: Any) -> asyncio.Handle:
        calls.append(call)
        return call_soon(call, *args)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    notifier = LoopNotifier(loop)
    deltas, finals = mailboxes_of(notifier, 100), mailboxes_of(notifier, 100, OutputKind.FINAL)
    news = [notifier.news(mailbox) for mailbox in deltas]
    deliver(deltas + finals)
    assert len(calls) == 1
    await asyncio.gather(*news)
    deliver(deltas + finals)  # nobody has taken: all know already
    assert len(calls) == 1
    news = [notifier.news(mailbox) for mailbox in deltas]
    assert [output.outputs[0].token_ids for m in deltas if (output := m.take())] == [[5, 5]] * 100
    deliver(deltas)
    await asyncio.gather(*news)
    assert len(calls) == 2
    news = [notifier.news(mailbox) for mailbox in finals]
    deliver(finals, FinishReason.LENGTH)
    await asyncio.gather(*news)
    assert len(calls) == 3
    assert [output.outputs[0].token_ids for m in finals if (output := m.take())] == [[5, 5, 5]] * 100


async def test_other_work_of_the_loop_has_its_turns_between_the_streams_of_a_step() -> None:
    notifier = LoopNotifier(asyncio.get_running_loop())
    mailboxes = mailboxes_of(notifier, 4 * STREAMS_A_TURN)
    woken = 0

    async def read(mailbox: Mailbox) -> None:
        nonlocal woken
        await notifier.news(mailbox)
        woken += 1

    readers = [asyncio.create_task(read(mailbox)) for mailbox in mailboxes]
    await asyncio.sleep(0)
    deliver(mailboxes)
    most = 0
    while woken < len(mailboxes):
        before = woken
        await asyncio.sleep(0)
        most = max(most, woken - before)
    assert 0 < most <= STREAMS_A_TURN
    await asyncio.gather(*readers)


async def test_a_reader_that_is_always_behind_leaves_the_loop_to_others() -> None:
    """There is something new for it whenever it looks."""
    notifier = LoopNotifier(asyncio.get_running_loop())
    [mailbox] = mailboxes_of(notifier, 1)
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    news = notifier.news(mailbox)
    deliver([mailbox])
    for i in range(50):
        await news
        news = notifier.news(mailbox)
        output = mailbox.take()
        assert output is not None and output.outputs[0].token_ids == [5]
        deliver([mailbox])
        assert turns >= i
    beside.cancel()


async def test_a_reader_that_is_gone_is_no_obstacle() -> None:
    notifier = LoopNotifier(asyncio.get_running_loop())
    cancelled, forgotten, there = mailboxes_of(notifier, 3)
    notifier.news(cancelled).cancel()
    notifier.news(forgotten)
    notifier.forget(forgotten)
    news = notifier.news(there)
    deliver([cancelled, forgotten, there])
    await asyncio.wait_for(news, 30)


def test_nobody_is_told_in_a_loop_that_is_closed() -> None:
    """Also of those that were told while it still ran, and will never take."""

    async def start() -> list[Mailbox]:
        mailboxes = mailboxes_of(LoopNotifier(asyncio.get_running_loop()), 2)
        deliver(mailboxes[:1])
        return mailboxes

    with asyncio.Runner() as runner:
        loop, mailboxes = runner.get_loop(), runner.run(start())
    assert loop.is_closed()
    for mailbox in mailboxes:
        mailbox.deliver(0, [5], NOW, FinishReason.NONE, {}, ())
    assert notify(mailboxes) == mailboxes
