"""A client process: connects, asks for endless requests, says "running" once tokens come, and reads on."""

from __future__ import annotations

import sys
import threading

import numpy as np

from wavecore.transport.client_pump import ClientPump, Event
from wavecore.transport.messages import Add, Ready, Step
from wavecore.transport.tensors import from_numpy


def main() -> None:
    ready, running = threading.Event(), threading.Event()

    def on_event(_: int, event: Event) -> None:
        if isinstance(event, Ready):
            ready.set()
        elif isinstance(event, Step):
            running.set()

    pump = ClientPump(on_event, version="test")
    pump.connect(0, sys.argv[1], sys.argv[2])
    ready.wait()
    for handle in range(int(sys.argv[3])):
        prompt = from_numpy(np.arange(3, dtype=np.int32))
        pump.send(0, Add(b"", b"", 0, handle, prompt, {"count": 1 << 30, "per_step": 1}))
    running.wait()
    print("running", flush=True)
    sys.stdin.read()
    pump.close()


if __name__ == "__main__":
    main()
