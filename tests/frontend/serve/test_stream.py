"""How streams are written: readers that are slow, streams that are silent, faults in between. No sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.outputs import CompletionOutput, RequestMetrics, RequestOutput
from wavecore.frontend.serve.api.completions import SHAPE
from wavecore.frontend.serve.api.events import Events
from wavecore.frontend.serve.http import stream
from wavecore.frontend.serve.http.http_call import HttpCall
from wavecore.frontend.serve.http.refusals import refusal
from wavecore.frontend.serve.http.stream import Reply
from wavecore.transport.errors import EngineDead, RequestError


class Box:
    """A mailbox as a reply sees it: texts that merge until they are taken."""

    def __init__(self) -> None:
        self.new: list[str] = []
        self.finish: Any = None
        self.error: Any = None

    def take_text(self) -> str | None:
        return None if self.finish or self.error else self._clear()

    def take(self) -> RequestOutput:
        ids = list(range(len(self.new)))
        text = self._clear()
        choice = CompletionOutput(0, text, ids, finish_reason=self.finish, error=self.error)
        return RequestOutput("id", None, [1, 2], [choice], self.finish is not None, RequestMetrics(0.0))

    def _clear(self) -> str:
        text = "".join(self.new)
        self.new.clear()
        return text


class Wire:
    """What ASGI's `send` does: it waits while the reader is slow."""

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []
        self.slow: asyncio.Future[None] | None = None

    async def send(self, message: Any) -> None:
        if self.slow is not None:
            await self.slow
        self.sent.append(message)

    async def receive(self) -> Any:
        return {"type": "http.disconnect"}

    @property
    def body(self) -> str:
        return b"".join(message.get("body", b"") for message in self.sent).decode()


def reply(wire: Wire, boxes: Sequence[Box], streams: bool = True) -> Reply:
    call = HttpCall({"headers": []}, wire.receive, wire.send, 1, lambda call, error: refusal(call, error, 3))
    form = Events(SHAPE, "cmpl", "m", SamplingParams(), None, False)
    return Reply(call, boxes, form.whole, form if streams else None)  # type: ignore[arg-type]


def feed(answer: Reply, box: Box, text: str, **end: Any) -> None:
    box.new.append(text)
    box.__dict__.update(end)
    answer.on_news(box)  # type: ignore[arg-type]


async def test_a_slow_reader_gets_merged_chunks() -> None:
    wire, box = Wire(), Box()
    answer = reply(wire, [box])
    feed(answer, box, "a")
    feed(answer, box, "b")
    wire.slow = asyncio.get_running_loop().create_future()
    for text in "cdefg":  # the first of them is what `send` waits with
        feed(answer, box, text)
    assert wire.body.count("data: ") == 2 and answer.sender.blocked_since
    slow, wire.slow = wire.slow, None
    slow.set_result(None)
    await asyncio.sleep(0)
    assert wire.body.count("data: ") == 4 and '"text":"defg"' in wire.body
    assert answer.sender.blocked_since is None
    feed(answer, box, "h", finish="stop")
    assert wire.body.endswith("data: [DONE]\n\n") and not wire.sent[-1]["more_body"]
    assert [message["type"] for message in wire.sent].count("http.response.start") == 1


@pytest.mark.parametrize("streams", [True, False])
async def test_a_fault(streams: bool) -> None:
    """Before the first byte it is a status, later an event; and there is one end."""
    wire, box, other = Wire(), Box(), Box()
    answer = reply(wire, [box, other], streams)
    feed(answer, box, "a")
    feed(answer, box, "", error=EngineDead("engine 0 ended"))
    feed(answer, other, "b", finish="stop")
    assert wire.sent[0]["status"] == (200 if streams else 503)
    assert "the engine that had the request has ended" in wire.body
    assert '"code":"engine_dead"' in wire.body and "engine 0" not in wire.body and '"b"' not in wire.body
    assert [message.get("more_body") for message in wire.sent][-1] is False
    assert ((b"retry-after", b"3") in wire.sent[0]["headers"]) is not streams


async def test_a_fault_of_ours_is_of_one_request(caplog: pytest.LogCaptureFixture) -> None:
    wire, box = Wire(), Box()
    answer = reply(wire, [box])
    feed(answer, box, "a")
    box.take_text = lambda: 1 / 0  # type: ignore[assignment, method-assign]
    feed(answer, box, "b")
    assert '"code":"request"' in wire.body and "ZeroDivisionError" not in wire.body
    assert "ZeroDivisionError" in caplog.text


async def test_a_connection_that_fails_is_of_one_request() -> None:
    wire, box = Wire(), Box()
    answer = reply(wire, [box])
    feed(answer, box, "a")

    async def send(_: Any) -> None:
        raise RuntimeError("the handler is closed")

    answer.sender._send = send
    feed(answer, box, "b")  # raises nothing: others of the step come behind it
    assert '"text":"b"' not in wire.body


async def test_a_silent_stream_shows_that_the_server_is_there() -> None:
    wire, box = Wire(), Box()
    answer = reply(wire, [box])
    later = time.monotonic() + stream.KEEP_ALIVE_SECONDS + 1
    answer.keep_alive(later - 2)
    assert not wire.sent
    answer.keep_alive(later)
    assert wire.body == ": keep-alive\n\n" and wire.sent[0]["status"] == 200
    feed(answer, box, "a")
    answer.keep_alive(later + 1)
    feed(answer, box, "", error=RequestError("x"))
    answer.keep_alive(later + 100)
    assert wire.body.count("keep-alive") == 1


async def test_an_answer_that_is_no_stream_has_its_length() -> None:
    wire, boxes = Wire(), [Box(), Box()]
    answer = reply(wire, boxes, streams=False)
    feed(answer, boxes[1], "second", finish="length")
    answer.keep_alive(time.monotonic() + 100)
    assert not wire.sent
    feed(answer, boxes[0], "first", finish="stop")
    head, body = wire.sent
    assert (b"content-length", b"%d" % len(body["body"])) in head["headers"]
    assert wire.body.index("first") < wire.body.index("second")
