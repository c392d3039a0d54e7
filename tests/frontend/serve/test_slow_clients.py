"""Clients that take their time over a request (A-28)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import uvicorn
from starlette.exceptions import HTTPException

from wavecore.frontend.serve.http import http_call, protocol
from wavecore.frontend.serve.http.http_call import Answer, HttpCall
from wavecore.frontend.serve.http.protocol import LimitedProtocol


class Body(msgspec.Struct):
    x: int


async def app(scope: Any, receive: Any, send: Any) -> None:
    await HttpCall(scope, receive, send, 100, lambda *_: Answer(b"")).answer(Answer(b"{}"))


@contextlib.asynccontextmanager
async def listening() -> AsyncIterator[int]:
    server = uvicorn.Server(uvicorn.Config(app, http=LimitedProtocol, port=0, lifespan="off", log_config=None))
    server.capture_signals = contextlib.nullcontext  # type: ignore[assignment, method-assign]
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.001)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await serving


@pytest.mark.parametrize("sent", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nx: y\r\n"])
@pytest.mark.parametrize("behind_another", [False, True])
async def test_a_head_that_never_ends(monkeypatch: pytest.MonkeyPatch, sent: bytes, behind_another: bool) -> None:
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    async with listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        if behind_another:
            if not sent:  # an idle connection between two requests is uvicorn's to close
                sent = b"G"
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        writer.write(sent)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()


async def test_more_connections_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol.resource, "getrlimit", lambda _: (protocol.KEPT_DESCRIPTORS + 2, 0))
    async with listening() as port:
        opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, _ in opened[2:]:
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503") and json.loads(body)["error"]["type"] == "server_error"
        reader, writer = opened[0]
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()


@pytest.mark.parametrize("ends", [False, True])
async def test_a_body_that_never_ends(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    monkeypatch.setattr(http_call, "BODY_SECONDS", 0.05)
    parts = [{"type": "http.request", "body": b'{"x"', "more_body": True}]

    async def receive() -> Any:
        if not parts and not ends:
            await asyncio.Event().wait()
        return parts.pop() if parts else {"type": "http.disconnect"}

    async def send(_: Any) -> None:
        pytest.fail("nothing is sent")

    call = HttpCall({"headers": [(b"content-type", b"application/json")]}, receive, send, 100, lambda *_: Answer(b""))
    with pytest.raises(HTTPException) as caught:
        await call.read(Body, lambda *_: True)
    assert caught.value.status_code == (400 if ends else 408)
