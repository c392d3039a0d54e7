"""uvicorn's HTTP protocol with limits: the size of a request's head, the time until it is there, and of connections."""

import asyncio
import resource
from functools import partial
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from wavecore.frontend.serve.http.refusals import error_answer

MAX_HEAD = 16 << 10  # bytes of URL and headers
HEAD_SECONDS = 30.0  # from a connection's opening, or a further request's first byte, to the end of the head
KEPT_DESCRIPTORS = 64  # for all that is no connection


class LimitedProtocol(HttpToolsProtocol):
    """One connection. In `scope["extensions"]["wavecore"]` "abort" ends it at once, whatever waits to be read, and
    "write" is `_write_part`.
    """

    _timer: asyncio.TimerHandle | None = None
    _head_size = 0
    _in_head = True
    _refusal = HTTPStatus.BAD_REQUEST, "this is no HTTP"

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._cycles: list[RequestResponseCycle] = []  # requests that have no whole answer: several, where they come
        if len(self.connections) > resource.getrlimit(resource.RLIMIT_NOFILE)[0] - KEPT_DESCRIPTORS:
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, "the server has as many connections as it takes")
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells the last one alone, and an earlier one may not be over
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_size += len(data)  # of a line that has no end yet the parser says nothing
            if self._head_size > 2 * MAX_HEAD:
                self._refuse(*_TOO_LARGE)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()
        own: dict[object, object] = {"abort": self.transport.abort, "write": partial(_write_part, self.cycle)}
        self.scope["extensions"] = {"wavecore": own}
        self._cycles = [*(cycle for cycle in self._cycles if not cycle.response_complete), self.cycle]

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """In OpenAI's form, and with the status of the limit that was passed, if one was."""
        self._refuse(*self._refusal)

    def _begin_head(self) -> None:
        self._end_head()
        self._in_head, self._head_size = True, 0
        self._timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _end_head(self) -> None:
        self._in_head = False
        if self._timer is not None:
            self._timer.cancel()

    def _count(self, size: int) -> None:
        self._head_size += size
        if self._head_size > MAX_HEAD:
            self._refusal = _TOO_LARGE
            raise ValueError  # ends the parsing: `send_400_response`

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        body = error_answer(status, reason, None, "invalid_request").body
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body))
        self.transport.close()


def _write_part(cycle: RequestResponseCycle, part: bytes) -> bool:
    """Write a part of a body that goes on, at a quarter of the cost of `send`. False leaves it to that: it may have to
    wait for the reader, or the body is of another kind."""
    if cycle.flow.write_paused or cycle.disconnected or not cycle.chunked_encoding:
        return False
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
    return True


_TOO_LARGE = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, f"URL and headers are larger than {MAX_HEAD} bytes"
