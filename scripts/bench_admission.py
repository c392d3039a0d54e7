"""Host time of many requests at once, from `LLM.generate` to the launch of their first step, microseconds a request.

    python scripts/bench_admission.py [--requests 256] [--tokens 32] [--repeats 15]

Every station does the work of all requests in one go, alone, without a model and without reading or writing sockets; so
what stations take from each other in one process is not in it. The last one runs on the GPU where there is one;
elsewhere torch does its copy.
Time is that of the thread, not of the clock; printed is the least of the repeats.
"""

from __future__ import annotations

import argparse
import gc
import queue
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import scripted_runner
import torch
from bench_client import EPOCH, VOCAB, Script, service
from bench_detokenize import small_tokenizer
from bench_host_loop import FakeDevice

from wavecore import LLM, SamplingParams
from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.execution.device_state import DeviceState
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.plan import RunnerInfo
from wavecore.engine_core.request import Request
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.client.service import Service
from wavecore.frontend.prompts import as_prompts
from wavecore.transport.io.client_stream import ClientInput
from wavecore.transport.io.input_pump import InputPump
from wavecore.transport.wire.codec import Frames, encode
from wavecore.transport.wire.delivery import Outbox

PARAMS = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


class Output:
    """Stands in for the output thread: one client, and nobody hears of it."""

    def __init__(self) -> None:
        self.client = ClientInput(EPOCH, 1)

    def find(self, *_: object) -> ClientInput:
        return self.client

    def report_received(self, *_: object) -> None:
        """The client would be told."""


def prepare(llm: LLM, prompts: list[list[int]]) -> list[EngineRequest]:
    """What `LLM.generate` does before it sends the first."""
    return llm._requests(as_prompts(prompts), PARAMS, None, False, RequestOptions())


def outboxed(requests: list[EngineRequest]) -> list[Frames]:
    """What the client's IO thread sends, in this order."""
    outbox, frames = Outbox(EPOCH, EPOCH, (1 << 20, 1 << 30)), []
    for handle, request in enumerate(requests):
        message = request.message(handle, [], None, 0.0)
        for name in ("epoch", "client_id"):
            object.__setattr__(message, name, EPOCH)
        outbox.append(encode(message), 0, handle)
        found = outbox.peek()
        assert found is not None
        outbox.advance()
        frames.append(found)
    return frames


class Input:
    """The input thread's work, without its thread."""

    def __init__(self, core: EngineCore, folder: str) -> None:
        self.taken: queue.SimpleQueue[Any] = queue.SimpleQueue()
        output: Any = Output()
        self.output = output
        self.pump = InputPump(f"ipc://{folder}/in", output, admit=core.admit, input_queue=self.taken)

    def receive(self, messages: list[Frames]) -> list[Any]:
        """Everything from the socket to the queue of the main loop."""
        for frames in messages:
            self.pump._receive(frames)
        return [self.taken.get_nowait() for _ in messages]


def mailboxes(served: Service, requests: list[EngineRequest]) -> list[Mailbox]:
    notifier = ThreadNotifier()
    return [served.mailbox(request, notifier, OutputKind.FINAL) for request in requests]


def add_all(core: EngineCore, requests: list[Request]) -> None:
    for request in requests:
        core.add(request)


def forget(core: EngineCore) -> None:
    """As if all requests had ended, and nothing of them were cached."""
    core.requests.slots.in_flight[:] = 0
    core.abort_client(EPOCH)
    core.requests.kv.reset()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=32, help="of each prompt")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    count = args.requests
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = EngineConfig(max_num_seqs=count, max_num_batched_tokens=max(8192, count), max_num_queued_reqs=1 << 16)
    script = scripted_runner.Script(vocab_size=VOCAB, num_blocks=1 << 16, block_size=16, max_model_len=8192)
    info: RunnerInfo = FakeDevice(config, script=script).info
    draw = np.random.default_rng(0)
    prompts = draw.integers(1, VOCAB, (count, args.tokens)).tolist()
    state = DeviceState(count, info, device, range(VOCAB))
    least: dict[str, float] = {}

    def timed(station: str, work: Callable[..., Any], *given: Any) -> Any:
        begin = time.thread_time()
        result = work(*given)
        least[station] = min(least.get(station, 1e9), time.thread_time() - begin)
        return result

    with tempfile.TemporaryDirectory() as folder:
        small_tokenizer().save(str(Path(folder) / "tokenizer.json"))
        with service(Script(count, 1, lockstep=False), folder) as served:
            llm = LLM.__new__(LLM)
            llm._attach(served)
            requests = prepare(llm, prompts)
            core = EngineCore(config, FakeDevice(config, script=script))
            incoming, messages = Input(core, folder), outboxed(requests)
            gc.collect()
            gc.freeze()  # as the engine does when it is ready
            for _ in range(args.repeats):
                timed("caller: prompts to requests", prepare, llm, prompts)
                timed("caller: mailboxes", mailboxes, served, requests)
                timed("client IO: messages to frames", outboxed, requests)
                incoming.output.client = ClientInput(EPOCH, 1)
                admitted = timed("input thread: frames to requests", incoming.receive, messages)
                timed("main loop: queue", add_all, core, admitted)
                plan = timed("main loop: schedule", core.scheduler.schedule)
                timed("launch: what new requests bring", state.begin, plan.new_requests)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                forget(core)
            incoming.pump.close()
    print(f"{count} requests of {args.tokens} tokens; last line on {device.type}\n")
    print("| station | us a request |\n| --- | ---: |")
    for station, seconds in least.items():
        print(f"| {station} | {1e6 * seconds / count:.1f} |")
    print(f"| all | {1e6 * sum(least.values()) / count:.1f} |")


if __name__ == "__main__":
    main()
