"""What a slow link between client and engine costs: a large request under way, and a tiny one behind it.

    python scripts/bench_link.py --rate 5e6

Both ends run here, over tcp with CURVE through a proxy that lets `rate` bytes a second through, in either direction.
A request is answered as soon as it is in.
"""

from __future__ import annotations

import argparse
import queue
import secrets
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from slow_link import SlowLink

from wavecore.transport.curve import CurveClient, CurveServer, create_keys
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.input_pump import InputPump
from wavecore.transport.io.output_pump import ClientGone, OutputPump
from wavecore.transport.wire.messages import UNTOLD, Abort, Add, FinishReason, Ready, Step, Utility
from wavecore.transport.wire.step_tokens import finish_rows
from wavecore.transport.wire.tensors import from_numpy

LARGE, TINY, ABORTED, AFTER = 1, 2, 3, 4


def serve(output: OutputPump, inbound: queue.SimpleQueue[Any]) -> None:
    """The engine's main loop: a request ends as soon as it is here."""
    while (item := inbound.get()) is not None:
        if isinstance(item, Add):
            output.put({item.client_id: finish_rows([item.handle], FinishReason.LENGTH)})
        elif isinstance(item, Utility):
            output.put_result(item.client_id, item.call, "here")
        elif isinstance(item, ClientGone):
            print("  the engine dropped the client:", item.reason or "it left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=5e6, help="bytes a second")
    parser.add_argument("--bytes", type=float, default=40e6, help="of the large request's prompt")
    args = parser.parse_args()
    inbound: queue.SimpleQueue[Any] = queue.SimpleQueue()
    ended: dict[int, float] = {}
    changed = threading.Condition()

    def on_event(_: int, event: Any) -> None:
        with changed:
            if isinstance(event, Ready):
                ended[0] = time.perf_counter()
            elif isinstance(event, Step):
                ended.update(dict.fromkeys(event.output.handles.tolist(), time.perf_counter()))
            changed.notify_all()

    def wait(handle: int) -> float:
        with changed:
            changed.wait_for(lambda: handle in ended)
        return ended[handle]

    with tempfile.TemporaryDirectory() as folder:
        server_key = create_keys(keys := Path(folder) / "keys")
        server = CurveServer.load(keys)
        output = OutputPump(
            "tcp://127.0.0.1:0",
            epoch=secrets.token_bytes(16),
            resolved={},
            load=lambda _: UNTOLD,
            input_queue=inbound,
            curve=server,
        )
        inputs = InputPump("tcp://127.0.0.1:0", output, admit=lambda add: add, input_queue=inbound, curve=server)
        for thread in (inputs, output, threading.Thread(target=serve, args=(output, inbound), daemon=True)):
            thread.start()
        up, down = (SlowLink(end, "tcp://127.0.0.1:0", args.rate) for end in (inputs.endpoint, output.endpoint))
        client = ClientPump(on_event)
        client.connect(0, up.address, down.address, CurveClient.load(keys / "client.key", server_key))
        wait(0)
        prompt = from_numpy(np.zeros(int(args.bytes) // 4, np.int32))
        tiny = from_numpy(np.arange(10, dtype=np.int32))

        start = time.perf_counter()
        client.call_soon(partial(client.send, 0, Add(b"", b"", 0, LARGE, prompt, {})))
        time.sleep(0.2)
        asked = time.perf_counter()
        client.call_soon(partial(client.send, 0, Add(b"", b"", 0, TINY, tiny, {})))
        print(f"tiny request behind one of {args.bytes / 1e6:g} MB: answered after {wait(TINY) - asked:.2f} s")
        print(f"the large one: {wait(LARGE) - start:.1f} s, floor {args.bytes / args.rate:.1f} s")
        time.sleep(1.0)
        print(f"bytes over the link: {up.sent / 1e6:.1f} MB")

        before = up.sent
        client.call_soon(partial(client.send, 0, Add(b"", b"", 0, ABORTED, prompt, {})))
        time.sleep(0.2)
        client.call_soon(partial(client.send, 0, Abort(b"", b"", 0, np.array([ABORTED], np.uint32))))
        asked = time.perf_counter()
        client.call_soon(partial(client.send, 0, Add(b"", b"", 0, AFTER, tiny, {})))
        print(f"tiny request behind an aborted one: answered after {wait(AFTER) - asked:.2f} s")
        time.sleep(2.0)
        print(f"bytes over the link for the aborted one: {(up.sent - before) / 1e6:.1f} MB")
        client.close()
        inbound.put(None)
        inputs.close()
        output.close()


if __name__ == "__main__":
    main()
