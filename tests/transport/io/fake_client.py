"""A client process: runs requests, says "running" once tokens come and "ended N" at the end, N = faults it saw."""

from __future__ import annotations

import sys
import threading

import numpy as np

from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.connection import EngineEvent
from wavecore.transport.wire.messages import Add, Ready, Step
from wavecore.transport.wire.tensors import from_numpy


def main() -> None:
    requests, count = int(sys.argv[3]), int(sys.argv[4])
    ready, running, ended = threading.Event(), threading.Event(), threading.Event()
    tokens: dict[int, list[int]] = {handle: [] for handle in range(requests)}
    ends: list[int] = []

    def on_event(_: int, event: EngineEvent) -> None:
        if isinstance(event, Ready):
            ready.set()
        elif isinstance(event, Step):
            start = 0
            output = event.output
            for row, handle in enumerate(output.handles.tolist()):
                stop = start + int(output.counts[row])
                tokens[handle] += output.tokens[start:stop].tolist()
                start = stop
                if output.finish[row]:
                    ends.append(handle)
            running.set()
            if len(ends) >= requests:
                ended.set()

    pump = ClientPump(on_event)
    pump.connect(0, sys.argv[1], sys.argv[2])
    ready.wait()
    for handle in tokens:
        prompt = from_numpy(np.arange(3, dtype=np.int32))
        add = Add(b"", b"", 0, handle, prompt, {"count": count})
        pump.call_soon(lambda add=add: pump.send(0, add))
    running.wait()
    print("running", flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set())).start()
    ended.wait()
    if len(ends) >= requests:
        faults = sum(got != [(handle * 7919 + i) % (1 << 31) for i in range(count)] for handle, got in tokens.items())
        print(f"ended {faults + len(ends) - len(set(ends))}", flush=True)
    pump.close()


if __name__ == "__main__":
    main()
