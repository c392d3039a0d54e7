"""The hot path: a step's mailboxes to the bytes of their streams, in one call of the event loop.

A generator, a task or a future a delta would cost more than all else. So nothing waits for a mailbox: the client's IO
thread tells a whole step at once (`LoopNotifier`), and the loop calls `Reply.on_news` for each of its mailboxes, which
writes. The request's own task sleeps meanwhile until its client has left or has everything.

ASGI's `send` is a coroutine that seldom waits, only behind a reader that is slow. `_Sender` therefore runs it like a
function, and keeps it where it does wait; what arrives until the reader is back merges in the mailbox.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.frontend.client.notifiers import LoopNotifier
from wavecore.frontend.outputs import RequestOutput
from wavecore.frontend.serve.http.http_call import Answer, Headers, HttpCall, Message
from wavecore.transport.errors import RequestError, RequestTimeout, WavecoreError

KEEP_ALIVE_SECONDS = 15.0  # of silence on a stream, after which a comment shows that the server is there
SWEEP_SECONDS = 1.0
STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
escaped = msgspec.json.Encoder().encode

logger = logging.getLogger(__name__)


Whole = Callable[[Sequence[RequestOutput]], bytes]
"""Makes the body of an answer of the outputs of all prompts."""


class StreamForm(Protocol):
    """What an endpoint makes of outputs as they come. `place` numbers the request's prompts."""

    def around(self, place: int) -> tuple[bytes, bytes] | None:
        """What stands around a text, as JSON, in a chunk of this prompt; None where `chunks` has to make it."""

    def chunks(self, place: int, output: RequestOutput) -> bytes:
        """The events of what is new of one prompt; perhaps none."""

    def last(self) -> bytes:
        """The events that end the stream."""


class _Sender:
    """Runs one response's `send` from callbacks, in order.

    Attributes:
        blocked_since: monotonic time since when the reader takes nothing; None while it keeps up.
    """

    __slots__ = ("_on_ready", "_queue", "_send", "blocked_since")

    def __init__(self, send: Callable[[Message], Any], on_ready: Callable[[], None]) -> None:
        self._send, self._on_ready = send, on_ready
        self._queue: deque[Message] = deque()
        self.blocked_since: float | None = None

    def put(self, message: Message) -> None:
        if self.blocked_since is not None:
            self._queue.append(message)
        else:
            self._go_on(self._send(message))

    def _go_on(self, sending: Coroutine[Any, None, None]) -> None:
        try:
            waits_for: Any = sending.send(None)
        except StopIteration:  # nearly every time
            self.blocked_since = None
        else:
            self.blocked_since = time.monotonic()
            waits_for.add_done_callback(lambda _: self._resume(sending))

    def _resume(self, sending: Coroutine[Any, None, None]) -> None:
        self._go_on(sending)
        while self._queue and self.blocked_since is None:
            self.put(self._queue.popleft())
        if self.blocked_since is None:
            self._on_ready()


_OF_REQUEST = "call", "sender", "_places", "_stream", "_whole", "_write_part"
_OF_ANSWER = "_around", "_finished", "_missed", "_outputs", "_running", "_silent_since", "_started", "_wrote"


class Reply:
    """The answer to one request of generation, whole or as a stream of server-sent events.

    Args:
        mailboxes: one a prompt.
        whole: what becomes of their outputs, where there is no stream.
        stream: what becomes of them as they come; None sends one body at the end.

    Attributes:
        sender: of its bytes.
    """

    __slots__ = (*_OF_REQUEST, *_OF_ANSWER)  # see `Choice`

    def __init__(self, call: HttpCall, mailboxes: Sequence[Mailbox], whole: Whole, stream: StreamForm | None) -> None:
        self.sender = _Sender(call.send, self._catch_up)
        self.call, self._whole, self._stream = call, whole, stream
        self._write_part = call.write
        self._places = {mailbox: place for place, mailbox in enumerate(mailboxes)}
        self._running = len(mailboxes)
        self._outputs: dict[int, RequestOutput] = {}
        self._missed: dict[Mailbox, None] = {}  # what arrived while the reader was slow
        self._around: tuple[bytes, bytes] | None = None  # of one prompt, if its chunks are nothing but text
        self._finished = False  # all of it was handed to the sender
        self._started = False  # the head was sent: from here on a fault is an event
        self._wrote = False  # since the last look of `keep_alive`
        self._silent_since = time.monotonic()

    def on_news(self, mailbox: Mailbox) -> None:
        """A mailbox holds something. Never raises."""
        if self.sender.blocked_since is not None:
            self._missed[mailbox] = None
            return
        if self._finished:
            return
        try:
            around = self._around
            if around is not None and (text := mailbox.take_text()) is not None:  # nearly every time
                if text:
                    part = b"%b%b%b" % (around[0], escaped(text), around[1])
                    if not self._write_part(part):
                        self._write(part)
                    self._wrote = True
            elif (output := mailbox.take()) is not None:
                self._take(mailbox, output)
        except Exception as error:  # of one request; the others of the step are to hear of theirs
            logger.exception("request %s: its answer cannot be written", self.call.id)
            with suppress(Exception):  # where it is the connection that fails
                self._fail(RequestError(f"{error!r:.300}"))

    def keep_alive(self, now: float) -> None:
        """Show on a stream that has been silent for long that the server is there."""
        if self._wrote or self.sender.blocked_since is not None:
            self._wrote, self._silent_since = False, now
        elif self._stream and now - self._silent_since > KEEP_ALIVE_SECONDS and not self._finished:
            self._write(b": keep-alive\n\n")

    def _catch_up(self) -> None:
        while self._missed and self.sender.blocked_since is None:
            self.on_news(self._missed.popitem()[0])

    def _take(self, mailbox: Mailbox, output: RequestOutput) -> None:
        if (error := output.error or _abnormal(output)) is not None:
            self._fail(error)
            return
        place = self._places[mailbox]
        self._running -= output.finished
        if self._stream:
            data = self._stream.chunks(place, output)
            if not self._running:
                data += self._stream.last()
            if data:
                self._write(data)
            if self._started and len(self._places) == 1:
                self._around = self._stream.around(place)
        elif output.finished:
            self._outputs[place] = output
            if not self._running:
                self._write(self._whole([self._outputs[i] for i in sorted(self._outputs)]))

    def _fail(self, error: WavecoreError) -> None:
        answer = self.call.refusal(error)
        if self._finished:
            return
        self._running = 0
        if self._started:
            self._write(b"data: " + answer.body + b"\n\n")
        else:
            self._begin(answer.status_code, answer.raw_headers)
            self._write(answer.body)

    def _write(self, data: bytes) -> None:
        if not self._started:
            self._begin(200, STREAM_HEADERS if self._stream else Answer(data).raw_headers)
        self._wrote = True
        self._finished = not self._running
        self.sender.put({"type": "http.response.body", "body": data, "more_body": not self._finished})

    def _begin(self, status: int, headers: Headers) -> None:
        self._started, self.call.status = True, status
        self.sender.put({"type": "http.response.start", "status": status, "headers": [*headers, *self.call.notes]})


def _abnormal(output: RequestOutput) -> WavecoreError | None:
    """What the wire of OpenAI has no finish_reason for."""
    for choice in output.outputs:
        if choice.finish_reason == "timeout":
            return RequestTimeout(f"the request's {choice.stop_reason or 'timeout'} passed")
        if choice.finish_reason == "abort":
            return RequestError("the request was ended by the server")
    return None


class Replies:
    """All replies of this process that are not over.

    Args:
        write_timeout: seconds without progress after which a reader is cut off.
        on_end: called whenever one is over.

    Attributes:
        lag: seconds by which the event loop ran late what was due last.
    """

    def __init__(self, client: EngineClient, write_timeout: float, on_end: Callable[[], None]) -> None:
        self.notifier = LoopNotifier(asyncio.get_running_loop())
        self._client = client
        self._write_timeout, self._on_end = write_timeout, on_end
        self._live: set[Reply] = set()
        self.lag = 0.0

    async def run(self, call: HttpCall, mailboxes: Sequence[Mailbox], whole: Whole, stream: StreamForm | None) -> None:
        """Send requests, and write their answer; if the client leaves, they are aborted."""
        reply = Reply(call, mailboxes, whole, stream)
        self._live.add(reply)
        try:
            for mailbox in mailboxes:
                self.notifier.watch(mailbox, reply.on_news)
                self._client.submit(mailbox)
            await call.gone()
        finally:
            self._live.discard(reply)
            self._on_end()
            for mailbox in mailboxes:
                self.notifier.forget(mailbox)
                if not mailbox.ended:
                    self._client.abort(mailbox)

    async def sweep(self) -> None:
        """For ever: show on silent streams that the server is there, and cut off readers that stopped."""
        while True:
            due = time.monotonic() + SWEEP_SECONDS
            await asyncio.sleep(SWEEP_SECONDS)
            now = time.monotonic()
            self.lag = max(0.0, now - due)
            for reply in list(self._live):
                since = reply.sender.blocked_since
                if since is not None and now - since > self._write_timeout:
                    logger.warning("request %s: its reader took nothing for %g s", reply.call.id, now - since)
                    reply.call.cut()
                else:
                    reply.keep_alive(now)
