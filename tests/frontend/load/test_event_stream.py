"""Answers of servers that are well, slow, ill, or none."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from tests.support.fake_openai import DONE, HEAD, answer, chunked, event, serving, usage

from wavecore.frontend.load.event_stream import StreamedEvent, events, split_url
from wavecore.transport.errors import ConfigError, RequestError

CHAT = b'data: {"choices":[{"delta":{"role":"assistant"}},{"delta":{"content":"b"}}],"x":1}\n\n'


async def ask(raw: bytes, pieces: int = 1, key: str = "") -> tuple[list[StreamedEvent], str]:
    """The events of an answer that leaves in so many pieces, and the head of the request."""

    async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        size = -(-len(raw) // pieces)
        for start in range(0, len(raw), size):
            writer.write(raw[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)

    async with serving(script) as server:
        found = [event async for event in events(server.url, {"prompt": [1, 2], "stream": True}, key)]
        assert server.bodies == [{"prompt": [1, 2], "stream": True}]
        return found, server.heads[0]


@pytest.mark.parametrize("pieces", [1, 7, 1000])
async def test_events_whatever_the_pieces(pieces: int) -> None:
    named = b"event: x\r\n" + event("!").replace(b"data: ", b"data:").replace(b"\n", b"\r\n")  # as some servers do
    raw = answer(event("Hel"), b": still there\n\n", event("lo \u00fc") + named, CHAT, usage(2, 5), DONE)
    found, head = await ask(raw, pieces)
    assert [event.text for event in found] == ["Hel", "lo \u00fc", "!", "b", ""]
    last = found[-1].usage
    assert last is not None and (last.prompt_tokens, last.completion_tokens) == (2, 5)
    assert head.startswith("POST /v1/completions HTTP/1.1\r\n") and "authorization" not in head.lower()


async def test_the_key_is_sent() -> None:
    _, head = await ask(answer(DONE), key="secret")
    assert "Authorization: Bearer secret\r\n" in head


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b'HTTP/1.1 429 No\r\ncontent-length: 14\r\n\r\n{"error":"no"}', 'status 429: {"error":"no"}'),
        (
            answer(event("a"), b'data: {"error":{"message":"engine died"}}\n\n'),
            "error event: {'message': 'engine died'}",
        ),
        (HEAD + chunked(event("a")), "no end"),
        (answer(event("a")), "status 200"),  # ended without [DONE]
        (b"", "status 0, and the answer has no end"),
        (b"SSH-2.0-OpenSSH_9\r\n", "no answer of an OpenAI server"),
        (answer(b"data: {broken\n\n"), "no answer of an OpenAI server"),
        (answer(b'data: {"choices": 5}\n\n'), "no answer of an OpenAI server"),
    ],
)
async def test_what_is_no_answer(raw: bytes, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        await ask(raw)
    assert words in str(caught.value)


async def test_nobody_listens() -> None:
    with socket.socket() as taken:  # bound and not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        with pytest.raises(RequestError, match="no answer of an OpenAI server"):
            async for _ in events(f"http://127.0.0.1:{taken.getsockname()[1]}/v1/completions", {}):
                pass


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://", "http:///v1"])
def test_no_url(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        split_url(url)
