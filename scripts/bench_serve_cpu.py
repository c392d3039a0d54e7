"""CPU of an API process over HTTP: what one delta of one stream costs, in microseconds, beside bare uvicorn.

    python scripts/bench_serve_cpu.py [--streams 1 256 1024] [--cases text logprobs stops n4] [--requests 300]
        [--processes 1 2 4] [--memory]

A scripted engine takes its time for each step, so that every stream is written in every step and no deltas merge. A
process of its own reads all streams. "bare uvicorn" is an application that writes as many constant bytes to as many
connections, in one loop over all of them. CPU is that of the process, with the kernel's part, from the first step that
all streams share to the last: a core that others use makes the clock late, and this only a little.

"late" is how long GET /livez takes meanwhile, on a connection of its own: the event loop's lag, and the request itself.

"API processes": 256 streams of an engine that takes no time, so that deltas merge, and what a scrape takes meanwhile.
"Memory": of an API process, for 1,000 streams that are read, that are idle, and that nobody reads, so that the system's
buffers are full and deltas merge.

"A request before it is sent" is a chat of one message, short or long, at /v1/chat/completions/render, which does all
but send it, and what leads there: HTTP alone (/version), a text that is encoded, a chat that is counted. Each goes
again and again over one connection, and over 16 at once, as on a server that has work; beside them what the chat's
template and its encoding cost alone, in this process, by transformers and by the server's code. The template's own
process is in none.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvicorn
from bench_detokenize import small_tokenizer
from transformers import PreTrainedTokenizerFast

from wavecore.frontend.text.messages import ChatOptions
from wavecore.frontend.text.tokenizer_files import load_tokenizer

CHUNK = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","object":"text_completion","created":1796056409,"model":"m",'
)
CHUNK += b'"choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null}]}\n\n'
STEP_SECONDS = {1: 0.004, 256: 0.05, 1024: 0.2}
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
)
CASES: dict[str, dict[str, Any]] = {
    "text": {},
    "logprobs": {"logprobs": 2},
    "stops": {"stop": ["\n\n\n\n"]},
    "n4": {"n": 4},
}


class Bare:
    """uvicorn, and as little as can be beside it."""

    def __init__(self, streams: int, steps: int, step_seconds: float) -> None:
        self.streams, self.steps, self.step_seconds = streams, steps, step_seconds
        self._sends: list[Any] = []

    async def __call__(self, _scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self._sends.append(send)
        if len(self._sends) == self.streams:
            self._ticker = asyncio.create_task(self._tick())
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _tick(self) -> None:
        for step in range(self.steps):
            await asyncio.sleep(self.step_seconds)
            for send in self._sends:
                await send({"type": "http.response.body", "body": CHUNK, "more_body": step + 1 < self.steps})


class Reader(asyncio.Protocol):
    """One stream: counts its chunks."""

    def __init__(self, request: bytes, state: dict[str, Any]) -> None:
        self._request, self._state = request, state
        self._seen = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._state["chunks"] += data.count(b"data: {")
        if not self._seen and b"data: {" in data:
            self._seen = True
            self._state["begun"] += 1
        if data.endswith(b"0\r\n\r\n"):
            self._state["ended"] += 1
            self._transport.close()


async def read_all(
    port: int, request: bytes, streams: int, pid: int, late: list[float] | None = None
) -> tuple[float, int]:
    """CPU seconds of process `pid`, and chunks, from the moment when all streams have begun to the end of the first.

    Args:
        late: gets the milliseconds of GET /livez, again and again.
    """
    loop = asyncio.get_running_loop()
    state: dict[str, Any] = {"chunks": 0, "begun": 0, "ended": 0}
    for _ in range(streams):
        await loop.create_connection(lambda: Reader(request, state), "127.0.0.1", port)
    while state["begun"] < streams:
        await asyncio.sleep(0.001)
    cpu, chunks = cpu_of(pid), state["chunks"]
    while not state["ended"]:
        await asyncio.sleep(0.01)
        if late is not None:
            late.append(await asyncio.to_thread(get_ms, port, "/livez"))
    cpu, chunks = cpu_of(pid) - cpu, state["chunks"] - chunks
    while state["ended"] < streams:
        await asyncio.sleep(0.01)
    return cpu, chunks


def get_ms(port: int, path: str) -> float:
    """Milliseconds of a GET, until its answer is whole."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        begin = time.perf_counter()
        exchange(connection, f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        return 1e3 * (time.perf_counter() - begin)


def exchange(connection: socket.socket, sent: bytes) -> None:
    """A request and its whole answer."""
    connection.sendall(sent)
    answer = connection.recv(1 << 20)
    while (found := re.search(rb"content-length: (\d+)\r\n(?:.+\r\n)*\r\n", answer)) is None or len(
        answer
    ) < found.end() + int(found[1]):
        answer += connection.recv(1 << 20)


def cpu_of(pid: int) -> float:
    """Seconds that all threads of a process have computed, to the nanosecond: Linux's `schedstat`."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


@contextlib.contextmanager
def bare(streams: int, steps: int) -> Iterator[tuple[int, int]]:
    with socket.create_server(("127.0.0.1", 0), backlog=4096) as listener:
        command = [sys.executable, __file__, "--bare", str(listener.fileno()), str(streams), str(steps)]
        process = subprocess.Popen(command, pass_fds=[listener.fileno()])
        try:
            yield listener.getsockname()[1], process.pid
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def served(folder: Path, step_seconds: float, processes: int = 1) -> Iterator[tuple[int, list[int]]]:
    """Port and process ids of API processes over a scripted engine."""
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    words = tokenizer.encode("The capital of France is Paris, and that of Italy is Rome. " * 200).ids
    script = folder / "script.json"
    values = {"step_seconds": step_seconds, "eos_token_id": [], "vocab_size": 4000, "num_blocks": 1 << 15}
    script.write_text(json.dumps({**values, "scripts": {"*": words}}))
    command = [sys.executable, "-m", "wavecore.frontend.cli.main", "serve", f"scripted:{script}", "--port", "0"]
    command += ["--tokenizer", str(folder), "--max-num-seqs", "4096"]
    command += ["--api-server-count", str(processes)]
    paths = os.pathsep.join(sys.path)  # where an engine finds the scripted runner
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+);", process.stdout.readline())
        assert found is not None
        children = [p for p in psutil.Process(process.pid).children() if "api server" in " ".join(p.cmdline())]
        yield int(found[1]), [child.pid for child in children]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def compare_processes(counts: list[int], streams: int = 256, steps: int = 400) -> None:
    """Tokens a second that are written, and the milliseconds of scrapes."""
    print("\n| API processes | tokens a second | scrape, ms: median, most |\n|---:|---:|---:|")
    body = {"prompt": [7, 8, 9], "max_tokens": steps, "stream": True, "ignore_eos": True}
    for count in counts:
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), 0.0, count) as (port, pids):
            asked, begin, scrapes = request("/v1/completions", body), time.perf_counter(), []
            with ThreadPoolExecutor() as beside:
                reading = beside.submit(asyncio.run, read_all(port, asked, streams, pids[0]))
                while not reading.done():
                    scrapes.append(get_ms(port, "/metrics"))
                    time.sleep(0.2)
            rate = streams * steps / (time.perf_counter() - begin)
        scrapes.sort()
        print(f"| {count} | {rate:,.0f} | {scrapes[len(scrapes) // 2]:.1f}, {scrapes[-1]:.1f} |", flush=True)


def compare_memory(streams: int = 1000) -> None:
    """MiB of an API process beyond what it has before, private to it."""
    body = {"prompt": [7, 8, 9], "max_tokens": 3900, "stream": True, "ignore_eos": True}
    print("\n| 1,000 streams | MiB more than without |\n|---|---:|")
    for name, step_seconds, reads in (
        ("read", 0.2, True),
        ("idle: a token in 3 s", 3.0, True),
        ("stalled", 0.2, False),
    ):
        with tempfile.TemporaryDirectory() as folder, served(Path(folder), step_seconds) as (port, [pid]):
            before, connections = private_mib(pid), []
            for _ in range(streams):
                connections.append(socket.socket())
                connections[-1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connections[-1].connect(("127.0.0.1", port))
                connections[-1].sendall(request("/v1/completions", body))
            until = time.perf_counter() + 40  # 200 tokens: about 35 kB a stream
            while time.perf_counter() < until:
                time.sleep(0.1)
                for connection in connections if reads else ():
                    with contextlib.suppress(BlockingIOError):
                        connection.recv(1 << 20, socket.MSG_DONTWAIT)
            print(f"| {name} | {private_mib(pid) - before:.0f} |", flush=True)
            for connection in connections:
                connection.close()


def private_mib(pid: int) -> float:
    return psutil.Process(pid).memory_full_info().uss / (1 << 20)


def compare_requests(requests: int, repeats: int, connections: int = 16) -> None:
    """What a chat costs before it is sent to an engine, and what shorter ways cost."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    long = [{"role": "user", "content": Path(__file__).read_text()[:5000]}]
    asked = {
        "GET /version": b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n",
        "/tokenize, a text": request("/tokenize", {"prompt": messages[0]["content"]}),
        "/tokenize, a chat": request("/tokenize", {"messages": messages}),
        "a chat before it is sent": request(
            "/v1/chat/completions/render", {"messages": messages, "max_tokens": 9, "seed": 5}
        ),
        "a long one": request("/v1/chat/completions/render", {"messages": long, "max_tokens": 9, "seed": 5}),
    }
    with tempfile.TemporaryDirectory() as folder, served(Path(folder), 0.0) as (port, [pid]):
        tokenizer = load_tokenizer(Path(folder))
        tokenizer.make_fast()  # as the server's
        peer = PreTrainedTokenizerFast.from_pretrained(folder)
        count = len(tokenizer.render_chat(long, ChatOptions())[1])
        ways: dict[str, Callable[[], object]] = {
            "transformers": lambda: peer.apply_chat_template(messages, tokenize=True),
            "the server's": lambda: tokenizer.render_chat(messages, ChatOptions()),
            f"of {count} tokens: transformers": lambda: peer.apply_chat_template(long, tokenize=True),
            "the server's, too": lambda: tokenizer.render_chat(long, ChatOptions()),
        }
        alone = {name: list[float]() for name in ways}
        costs = {(name, n): list[float]() for name in asked for n in (1, connections)}
        with ThreadPoolExecutor(connections) as pool:
            for _ in range(repeats):
                for name, way in ways.items():
                    way()
                    begin = time.thread_time()
                    for _ in range(requests):
                        way()
                    alone[name].append(1e6 * (time.thread_time() - begin) / requests)
                for (name, n), found in costs.items():
                    work = partial(repeat_request, port, asked[name], requests // n)
                    work()
                    cpu = cpu_of(pid)
                    list(pool.map(lambda _, work=work: work(), range(n)))
                    found.append(1e6 * (cpu_of(pid) - cpu) / (requests // n * n))
        tokenizer.close()
    words = [f"{name} {sorted(found)[repeats // 2]:.0f} us ({min(found):.0f})" for name, found in alone.items()]
    print(f"\nits template and encoding alone: {', '.join(words)}\n")
    print(f"| us a request, median (least) | one at a time | {connections} at once |\n|---|---:|---:|")
    for name in asked:
        both = [sorted(costs[name, n]) for n in (1, connections)]
        print(f"| {name} | {' | '.join(f'{found[repeats // 2]:.0f} ({found[0]:.0f})' for found in both)} |", flush=True)


def repeat_request(port: int, sent: bytes, count: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(count):
            exchange(connection, sent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 256, 1024])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--memory", action="store_true", help="of 1,000 streams; takes two minutes more")
    args = parser.parse_args()
    print("| streams | case | us a delta, median (least) | x bare uvicorn | late, ms: median, 99 % |")
    print("|---:|---|---:|---:|---:|")
    for streams in args.streams:
        steps = args.steps if streams > 1 else 10 * args.steps
        get = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
        costs = []
        for _ in range(args.repeats):
            with bare(streams, steps) as (port, pid):
                cpu, chunks = asyncio.run(read_all(port, get, streams, pid))
            costs.append(1e6 * cpu / chunks)
        floor = sorted(costs)[len(costs) // 2]
        print(f"| {streams:,} | bare uvicorn | {floor:.1f} ({min(costs):.1f}) | 1.0 | |", flush=True)
        for case in args.cases:
            with (
                tempfile.TemporaryDirectory() as folder,
                served(Path(folder), STEP_SECONDS.get(streams, 0.2)) as (port, [pid]),
            ):
                n = CASES[case].get("n", 1)
                body = {"prompt": [7, 8, 9], "max_tokens": steps, "stream": True, "ignore_eos": True, **CASES[case]}
                costs = []
                asked = request("/v1/completions", body)
                for _ in range(args.repeats):
                    cpu, chunks = asyncio.run(read_all(port, asked, max(1, streams // n), pid))
                    costs.append(1e6 * cpu / chunks)
                late: list[float] = []
                asyncio.run(read_all(port, asked, max(1, streams // n), pid, late))  # a run of its own: it costs, too
            late.sort()
            lateness = f"{late[len(late) // 2]:.1f}, {late[len(late) * 99 // 100]:.1f}"
            middle = sorted(costs)[len(costs) // 2]
            cost = f"{middle:.1f} ({min(costs):.1f}) | {middle / floor:.2f}"
            print(f"| {streams:,} | {case} | {cost} | {lateness} |", flush=True)
    if args.requests:
        compare_requests(args.requests, args.repeats)
    if args.processes:
        compare_processes(args.processes)
    if args.memory:
        compare_memory()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--bare"]:
        fd, count, length = (int(word) for word in sys.argv[2:])
        app = Bare(count, length, STEP_SECONDS.get(count, 0.2))
        server = uvicorn.Server(
            uvicorn.Config(app, loop="uvloop", http="httptools", access_log=False, log_level="error")
        )
        os.set_inheritable(fd, False)
        server.run(sockets=[socket.socket(fileno=fd)])
    else:
        main()
