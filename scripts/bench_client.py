"""CPU of the client alone: what one stream costs in one step, in microseconds, on both of its threads.

    python scripts/bench_client.py [--streams 256 1024] [--steps 100] [--repeats 5] [--tokenizer PATH] [--only NAME ...]
    python scripts/bench_client.py --turns 8 32 128 4096    what else runs in a loop, by the tasks woken in a turn of it

A thread without sockets stands in for the engine and the wire. It answers each request with a first token; when all are
there it runs steps of one token each: it decodes a Step from bytes and hands it to the client, as the IO thread does.
Streams are in lockstep: a step comes when every stream has given the last one to its reader, so no deltas merge.

CPU is that of the threads, not of the clock, from the first common step to the end of the last, so what else runs on
the machine counts little. Printed are the median and the least of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import queue
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np
from bench_detokenize import small_tokenizer

from wavecore import LLM, AsyncLLM, SamplingParams
from wavecore.frontend.client.service import Service
from wavecore.transport.io.connection import EngineEvent
from wavecore.transport.processes.deployment import Deployment, EngineEntry
from wavecore.transport.wire.codec import Frames, decode, encode
from wavecore.transport.wire.messages import Abort, Add, FinishReason, Ready, Step, StepTokens, Utility

EPOCH = bytes(16)
VOCAB = 4000
PROMPT = [1, 2, 3, 4]
START_SECONDS = 5.0
TIMER_SECONDS = 0.0005


class Script:
    """What the engine will do, and what it cost.

    Attributes:
        lockstep: whether a step waits until the one before was read.
        late_ms: how late a timer beside the streams was, each time, if there was one.
    """

    def __init__(self, streams: int, steps: int, lockstep: bool, with_timer: bool = False) -> None:
        self.streams, self.steps, self.lockstep, self.with_timer = streams, steps, lockstep, with_timer
        self.late_ms: list[float] = []
        self._consumer = time.pthread_getcpuclockid(threading.get_ident())
        self._begin = self._io_thread = 0.0
        self._unread = streams
        self._all_read = threading.Semaphore(0)
        self._done = threading.Event()

    def read(self) -> None:
        """A reader has had its delta."""
        self._unread -= 1
        if not self._unread:
            self._unread = self.streams
            self._all_read.release()

    def run(self, handles: Sequence[int], deliver: Callable[[Frames], None]) -> None:
        """All steps but the first, in the IO thread."""
        rows = np.array(handles, np.uint32)
        ones, draw = np.ones(len(rows), np.uint32), np.random.default_rng(0)
        messages = []
        for i in range(self.steps):
            finish = np.full(len(rows), FinishReason.LENGTH if i + 1 == self.steps else FinishReason.NONE, np.uint8)
            tokens = draw.integers(0, VOCAB, len(rows), np.int32)
            messages.append(encode(Step(EPOCH, i + 1, StepTokens(rows, ones, tokens, finish))))
        for i, frames in enumerate(messages):
            if self.lockstep:
                self._all_read.acquire()
            if i == 0:
                self._begin, begin = time.clock_gettime(self._consumer), time.thread_time()
            deliver(frames)
        self._io_thread = time.thread_time() - begin
        self._done.set()

    def costs(self) -> tuple[float, float]:
        """Microseconds a stream and step, of the consumer and of the IO thread. In the consumer's thread."""
        consumer = time.thread_time() - self._begin
        self._done.wait()
        scale = 1e6 / (self.streams * self.steps)
        return consumer * scale, self._io_thread * scale


class ScriptedPump:
    """Stands in for `ClientPump`: its thread is the IO thread."""

    script: Script
    tokenizer: str

    def __init__(self, on_event: Callable[[int, EngineEvent], None]) -> None:
        self._on_event = on_event
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._handles: list[int] = []
        self._answered = 0
        threading.Thread(target=self._run, name="client IO", daemon=True).start()

    def call_soon(self, call: Callable[[], object]) -> None:
        self._calls.put(call)

    def call_later(self, *_: object) -> None:
        """Nothing in here has a deadline."""

    def connect(self, index: int, *_: object) -> None:
        resolved = {
            "max_model_len": 100_000,
            "vocab_size": VOCAB,
            "eos_token_ids": [],
            "max_num_queued_reqs": 4096,
            "max_logprobs": 64,
            "tokenizer": self.tokenizer,
        }
        self.call_soon(lambda: self._on_event(index, Ready(EPOCH, resolved)))

    def client_id(self, _: int) -> bytes:
        return EPOCH

    def send(self, _: int, message: Add | Abort | Utility) -> bytes:
        if isinstance(message, Add):
            self._handles.append(message.handle)
        return EPOCH

    def close(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            new = self._handles[self._answered :]
            if not new:
                continue
            self._answered += len(new)
            rows = np.array(new, np.uint32)
            zeros = np.zeros(len(new), np.uint8)
            first = StepTokens(rows, np.ones(len(new), np.uint32), np.ones(len(new), np.int32), zeros)
            self._on_event(0, Step(EPOCH, 0, first))
            if self._answered == self.script.streams:
                self.script.run(self._handles, self._deliver)
                self._handles, self._answered = [], 0

    def _deliver(self, frames: Frames) -> None:
        step = decode(frames)
        assert isinstance(step, Step)
        self._on_event(0, step)


@contextmanager
def service(script: Script, tokenizer: str) -> Iterator[Service]:
    """A client whose engine plays the script."""
    ScriptedPump.script, ScriptedPump.tokenizer = script, tokenizer
    found = Deployment("ready", 1, (EngineEntry(0, "ready", input="ipc:///in", output="ipc:///out"),))
    with (
        mock.patch("wavecore.frontend.client.client.ClientPump", ScriptedPump),
        mock.patch("wavecore.transport.processes.deployment.read", lambda _: found),
    ):
        yield Service([Path("/nowhere")], None, START_SECONDS)


def generate(script: Script, service: Service, params: SamplingParams) -> None:
    llm = LLM.__new__(LLM)
    llm._attach(service)
    outputs = llm.generate([PROMPT] * script.streams, params, use_tqdm=False)
    assert all(len(output.outputs[0].token_ids) == script.steps + 1 for output in outputs)


def stream(script: Script, service: Service, params: SamplingParams) -> None:
    """One thread reads all streams in turn."""
    llm = LLM.__new__(LLM)
    llm._attach(service)
    streams = [llm.stream(PROMPT, params) for _ in range(script.streams)]
    for _ in range(script.steps + 1):
        for deltas in streams:
            assert len(next(deltas).outputs[0].token_ids) == 1
            script.read()


def tasks(script: Script, service: Service, params: SamplingParams) -> None:
    """A task a stream."""
    llm = AsyncLLM.__new__(AsyncLLM)
    llm._attach(service)

    async def one() -> None:
        async for output in llm.generate(PROMPT, params):
            assert len(output.outputs[0].token_ids) == 1
            script.read()

    async def late() -> None:
        while True:
            due = time.perf_counter() + TIMER_SECONDS
            await asyncio.sleep(TIMER_SECONDS)
            script.late_ms.append(1e3 * (time.perf_counter() - due))

    async def together() -> None:
        timer = asyncio.create_task(late()) if script.with_timer else None
        await asyncio.gather(*[one() for _ in range(script.streams)])
        if timer:
            timer.cancel()

    asyncio.run(together())


CASES: dict[str, tuple[Callable[[Script, Service, SamplingParams], None], bool, str | None]] = {
    "LLM.generate, ids": (generate, False, None),
    "LLM.generate, text": (generate, True, None),
    "LLM.generate, a stop string": (generate, True, "\n\n\n"),
    "LLM.stream, text": (stream, True, None),
    "AsyncLLM, ids": (tasks, False, None),
    "AsyncLLM, text": (tasks, True, None),
}


def measure(name: str, script: Script, tokenizer: str) -> tuple[float, float]:
    run, detokenize, stop = CASES[name]
    params = SamplingParams(max_tokens=script.steps + 1, ignore_eos=True, detokenize=detokenize, stop=stop)
    with service(script, tokenizer) as client:
        if client.tokenizer is not None:  # its table is filled, as after some minutes of serving
            client.tokenizer.detokenizer(params, []).feed(range(VOCAB))
        gc.collect()
        run(script, client, params)
        costs = script.costs()
        client.close()
    return costs


def compare_clients(args: argparse.Namespace, tokenizer: str) -> None:
    print(f"us a stream and step, median (least) of {args.repeats}\n")
    print("| client | streams | both threads | consumer | IO thread |")
    print("|---|---:|---:|---:|---:|")
    for name in [name for name in CASES if name.startswith(tuple(args.only))]:
        lockstep = CASES[name][0] is not generate
        for streams in args.streams:
            costs = [measure(name, Script(streams, args.steps, lockstep), tokenizer) for _ in range(args.repeats)]
            both = [a + b for a, b in costs]
            consumer, io_thread = (statistics.median(column) for column in zip(*costs, strict=True))
            total = f"{statistics.median(both):.2f} ({min(both):.2f})"
            print(f"| {name} | {streams:,} | {total} | {consumer:.2f} | {io_thread:.2f} |", flush=True)


def compare_turns(args: argparse.Namespace, tokenizer: str) -> None:
    print(f"a timer of {1e3 * TIMER_SECONDS} ms in the loop, the least cost of {args.repeats}\n")
    print("| tasks a turn | streams | us a delta | timer late, ms: median | 90 % |")
    print("|---:|---:|---:|---:|---:|")
    for turn in args.turns:
        for streams in args.streams:
            scripts = [Script(streams, args.steps, lockstep=True, with_timer=True) for _ in range(args.repeats)]
            with mock.patch("wavecore.frontend.client.notifiers.STREAMS_A_TURN", turn):
                cost = min(sum(measure("AsyncLLM, text", script, tokenizer)) for script in scripts)
            late = sorted(ms for script in scripts for ms in script.late_ms)
            middle, most = late[len(late) // 2], late[len(late) * 9 // 10]
            print(f"| {turn:,} | {streams:,} | {cost:.2f} | {middle:.2f} | {most:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokenizer", default="", help="folder or tokenizer.json; else a small one is trained")
    parser.add_argument("--only", nargs="+", default=list(CASES), help="cases that begin so")
    parser.add_argument("--turns", type=int, nargs="+", help="tasks that are woken in one turn of the loop")
    args = parser.parse_args()
    print(f"Python {sys.version.split()[0]}; ", end="")
    with tempfile.TemporaryDirectory() as folder:
        if not args.tokenizer:
            small_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        (compare_turns if args.turns else compare_clients)(args, args.tokenizer or folder)


if __name__ == "__main__":
    main()
