"""A thousand streams at once."""

from __future__ import annotations

import asyncio
import json
import math
import re
import resource
import time

import httpx
import pytest
from tests.support.scripted_model import scripted_output
from tests.support.served import served
from tests.support.waiting import until

from wavecore.frontend.serve.http.protocol import KEPT_DESCRIPTORS

STREAMS, TOKENS = 1000, 40
CONNECTIONS = 10_000


async def read(host: str, port: int, place: int) -> tuple[str, int]:
    """The answer's bytes, and how many tokens it says it has."""
    reader, writer = await asyncio.open_connection(host, port)
    asked = {"prompt": [310 + place % 190, place // 190], "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
    body = json.dumps({**asked, "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True})
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    data = (await reader.read()).decode()
    writer.close()
    found = re.findall(r'"token_ids":\[([\d,]*)\]', data)
    ids = [int(token) for part in found for token in part.split(",") if token]
    assert ids == scripted_output(asked["prompt"], max_tokens=TOKENS, ignore_eos=True, temperature=0)[0]
    assert "data: [DONE]" in data[-40:]
    return data, len(ids)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_none_is_lost(scripted_files: list[str]) -> None:
    async def all_of_them(host: str, port: int) -> int:
        return sum(count for _, count in await asyncio.gather(*[read(host, port, i) for i in range(STREAMS)]))

    with served(*scripted_files, "--max-num-seqs", "1024", "--num-gpu-blocks-override", "8192") as server:
        address = httpx.URL(server.url)
        assert asyncio.run(all_of_them(address.host, int(address.port or 0))) == STREAMS * TOKENS
        until(server.is_idle, "the end of all requests")
        assert "loop_lag_seconds" in server.get("/livez").json()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_connections_that_say_nothing_keep_nobody_out(scripted_files: list[str]) -> None:
    """A-28: a thousand idle connections, and some that send a byte now and then."""

    async def sit(host: str, port: int) -> None:
        opened = [await asyncio.open_connection(host, port) for _ in range(STREAMS)]
        for _, writer in opened[:100]:
            writer.write(b"GET /v1/mod")
        await read(host, port, 3)
        for _, writer in opened:
            writer.close()

    with served(*scripted_files) as server:
        address = httpx.URL(server.url)
        asyncio.run(sit(address.host, int(address.port or 0)))
        assert server.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ten_thousand_connections(scripted_files: list[str]) -> None:
    """As many as the server has descriptors for; the rest are refused within a second, and nobody who is in notices."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = 4000
    if hard < CONNECTIONS + 500:
        pytest.skip(f"ulimit -Hn is {hard}")

    async def refused(host: str, port: int) -> float:
        """Seconds until one more is refused; infinity if it is taken."""
        begin = time.monotonic()
        reader, writer = await asyncio.open_connection(host, port)
        try:
            head = await asyncio.wait_for(reader.read(), 1.0)
        except TimeoutError:
            return math.inf
        finally:
            writer.close()
        assert head.startswith(b"HTTP/1.1 503") and b'"type":"server_error"' in head
        return time.monotonic() - begin

    async def fill(host: str, port: int) -> None:
        opened, waits = [], []
        for _ in range(CONNECTIONS // 100):
            found = await asyncio.gather(*[asyncio.open_connection(host, port) for _ in range(100)])
            opened += found
        closed = await asyncio.gather(*[asyncio.wait_for(reader.read(1), 30) for reader, _ in opened[room:]])
        assert all(byte == b"H" for byte in closed)  # of HTTP/1.1 503
        for _ in range(20):
            waits.append(await refused(host, port))
        assert max(waits) < 1.0, waits
        reader, writer = opened[0]
        writer.write(b"GET /ready HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
        for _, writer in opened:
            writer.close()

    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with served(*scripted_files) as server:
        api = server.process_named("api server 0")
        resource.prlimit(api.pid, resource.RLIMIT_NOFILE, (room + KEPT_DESCRIPTORS, hard))
        address = httpx.URL(server.url)
        asyncio.run(fill(address.host, int(address.port or 0)))
        until(lambda: server.get("/health").status_code == 200, "an end of all connections")
