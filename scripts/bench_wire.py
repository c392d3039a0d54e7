"""What the wire costs: one Step of 256 and of 1024 one-token rows, a long prompt, and round trips on real sockets.

    python scripts/bench_wire.py

Goal for the arrays themselves (no message around them): pack below 1 us; unpack 5 us at 256 and 24 us at 1024 rows.
Per-request objects would cost 46 + 56 us at 256 and 191 + 231 us at 1024 rows.
"""

from __future__ import annotations

import queue
import secrets
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.input_pump import InputPump
from wavecore.transport.io.output_pump import OutputPump
from wavecore.transport.wire.codec import decode, encode
from wavecore.transport.wire.messages import UNTOLD, Add, Ready, Step, StepTokens
from wavecore.transport.wire.step_tokens import merge
from wavecore.transport.wire.tensors import from_numpy

TOKEN = b"0123456789abcdef"


def microseconds(function: Callable[[], object]) -> float:
    """Best of seven rounds: other processes can only make it slower."""
    rounds = timeit.repeat(function, number=2000, repeat=7)
    return min(rounds) / 2000 * 1e6


def step_of(rows: int) -> Step:
    output = StepTokens(
        np.arange(rows, dtype=np.uint32),
        np.ones(rows, np.uint32),
        np.arange(rows, dtype=np.int32),
        np.zeros(rows, np.uint8),
    )
    return Step(TOKEN, 1, output)


def read(step: Step) -> list[tuple[int, int, int]]:
    """What a client does with a Step: one tuple a request."""
    output = step.output
    return list(zip(output.handles.tolist(), output.tokens.tolist(), output.finish.tolist(), strict=True))


def bench_codec() -> None:
    for rows in (256, 1024):
        step = step_of(rows)
        frames = encode(step)
        size = sum(map(len, frames))
        print(
            f"step of {rows:5d} rows, {size:6d} bytes: encode {microseconds(partial(encode, step)):6.1f} us, "
            f"decode {microseconds(partial(decode, frames)):6.1f} us, "
            f"to Python {microseconds(partial(read, step)):6.1f} us, "
            f"merge of two {microseconds(partial(merge, step.output, step.output)):6.1f} us"
        )
    for tokens in (1000, 32_000):
        add = Add(TOKEN, TOKEN, 1, 1, from_numpy(np.arange(tokens, dtype=np.int32)), {"max_tokens": 100, "seed": 1})
        frames = encode(add)
        print(
            f"request of {tokens} tokens: encode {microseconds(partial(encode, add)):.1f} us, "
            f"decode {microseconds(partial(decode, frames)):.1f} us"
        )


def bench_sockets(rounds: int = 2000) -> None:
    """One request's way there and back, then Steps at full speed."""
    inbound: queue.SimpleQueue[Any] = queue.SimpleQueue()
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        output = OutputPump(
            f"ipc://{folder}/output",
            epoch=secrets.token_bytes(16),
            resolved={},
            load=lambda _: UNTOLD,
            input_queue=inbound,
        )
        inputs = InputPump(f"ipc://{folder}/input", output, admit=lambda add: add, input_queue=inbound)
        inputs.start()
        output.start()
        client = ClientPump(lambda _, event: events.put(event))
        client.connect(0, inputs.endpoint, output.endpoint)

        def next_event(kind: type) -> Any:
            while not isinstance(event := events.get(timeout=60), kind):
                continue
            return event

        next_event(Ready)
        prompt = from_numpy(np.arange(100, dtype=np.int32))
        trips = []
        for handle in range(rounds):
            start = time.perf_counter()
            client.call_soon(partial(client.send, 0, Add(b"", b"", 0, handle, prompt, {})))
            add = inbound.get(timeout=60)
            output.put({add.client_id: step_of(1).output})
            next_event(Step)
            trips.append((time.perf_counter() - start) * 1e6)
        ninety_nine = statistics.quantiles(trips, n=100)[98]
        print(f"request and answer over ipc: {statistics.median(trips):.0f} us, {ninety_nine:.0f} us at p99")

        tokens, client_id = step_of(256).output, client.client_id(0)
        assert client_id is not None
        start, seen = time.perf_counter(), 0
        for _ in range(rounds):
            output.put({client_id: tokens})
        while seen < rounds * 256:
            seen += int(next_event(Step).output.counts.sum())
        seconds = time.perf_counter() - start
        print(f"steps of 256 rows, merged as the client keeps up: {rounds / seconds:.0f} a second")
        client.close()
        inputs.close()
        output.close()


if __name__ == "__main__":
    bench_codec()
    bench_sockets()
