"""A tiny OpenAI server that answers as a test says: what it sends, piece by piece, and what it was asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

Script = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text: str, **more: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}], **more}).encode() + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def answer(*parts: bytes) -> bytes:
    """A whole streamed response, a chunk a part."""
    return HEAD + b"".join(map(chunked, parts)) + b"0\r\n\r\n"


@dataclass
class FakeServer:
    url: str
    heads: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[FakeServer]:
    """Each connection carries one request; `script` gets its body, and writes."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:"))
        body = json.loads(await reader.readexactly(length))
        found.heads.append(head)
        found.bodies.append(body)
        await script(body, writer)
        writer.close()
        tasks.discard(task)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    found = FakeServer(f"http://127.0.0.1:{port}/v1/completions")
    async with server:
        yield found
    for task in tasks:
        task.cancel()
