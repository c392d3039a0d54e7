"""How evenly one client's requests are spread over the engines of a deployment, and what choosing costs.

    python scripts/bench_balance.py

Engines are real processes with a scripted model, whose steps take a made-up time, so that many share few cores; each
has 16 slots. *Equal*: a burst of 256 requests of 64 tokens of output. *Ragged*: 256, with 8 to 512 tokens. *One ahead*:
128 are at engine 0, half of them bound to it, when engine 1 gets free. An engine's end is that of its last request.
*Cost*: a client without sockets submits 2,000 requests and hears a report of an engine after each tenth.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import ChainMap, Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from wavecore import LLM, SamplingParams, connect
from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.frontend.client.engines import EngineState, RemoteEngine
from wavecore.frontend.client.in_flight import InFlight
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.frontend.prompts import as_prompt
from wavecore.transport.wire.messages import Load

BURST = 256
STEP_SECONDS = 0.01
SCRIPT = {"vocab_size": 1000, "eos_token_id": [], "max_model_len": 2048, "num_blocks": 20_000}


@contextmanager
def deployment(engines: int, **settings: Any) -> Iterator[LLM]:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps({**SCRIPT, "step_seconds": STEP_SECONDS}))
        settings |= {"data_parallel_size": engines, "disable_tqdm": True}
        with LLM(f"scripted:{script}", skip_tokenizer_init=True, **settings) as llm:
            while len(llm._service.client.engines) < engines:
                time.sleep(0.01)
            yield llm


def submit(llm: LLM, lengths: Sequence[int], rank: int | None = None) -> list[Mailbox]:
    service, draw = llm._service, random.Random(0)
    options = RequestOptions(data_parallel_rank=rank)
    mailboxes = []
    for length in lengths:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
        request = service.prepare(as_prompt([draw.randrange(1000) for _ in range(32)]), params, options)
        mailboxes.append(service.mailbox(request, ThreadNotifier(), OutputKind.FINAL))
    for mailbox in mailboxes:
        service.client.submit(mailbox)
    return mailboxes


def follow(llms: Sequence[LLM], mailboxes: Sequence[Mailbox]) -> tuple[Counter[int], dict[int, float]]:
    """Wait for all ends. Returns how many requests ended at each engine, and the seconds until the last of them."""
    started, open_ = time.monotonic(), dict.fromkeys(mailboxes, -1)
    flights = ChainMap(*[llm._service.client._requests._flights for llm in llms])
    counts, ends = Counter[int](), dict[int, float]()
    while open_:
        time.sleep(0.002)
        for mailbox in list(open_):
            flight = flights.get(mailbox)
            if flight is not None and (at := flight.at) is not None:
                open_[mailbox] = at.engine.index
            elif mailbox.ended:
                index = open_.pop(mailbox)
                counts[index] += 1
                ends[index] = time.monotonic() - started
    return counts, ends


def shown(values: Sequence[float], form: str) -> str:
    return f"{' '.join(format(v, form) for v in values)} | {100 * (max(values) / min(values) - 1):.0f} %"


def bench_spread(engines: int, ragged: bool) -> None:
    draw = random.Random(1)
    lengths = [draw.randrange(8, 512) if ragged else 64 for _ in range(BURST)]
    with deployment(engines, max_num_seqs=16) as llm:
        counts, ends = follow([llm], submit(llm, lengths))
    spread = shown([counts[i] for i in range(engines)], "d")
    print(f"| {'ragged' if ragged else 'equal'} | {engines} | 1 | {spread} | {shown(list(ends.values()), '.2f')} |")


def bench_two_clients(engines: int) -> None:
    with deployment(engines, max_num_seqs=16) as llm, connect(llm.runtime_dir) as other:
        while len(other._service.client.engines) < engines:
            time.sleep(0.01)
        mailboxes = [mailbox for client in (llm, other) for mailbox in submit(client, [64] * (BURST // 2))]
        counts, ends = follow([llm, other], mailboxes)
    spread = shown([counts[i] for i in range(engines)], "d")
    print(f"| equal | {engines} | 2 | {spread} | {shown(list(ends.values()), '.2f')} |")


def bench_one_ahead() -> None:
    with deployment(2, max_num_seqs=16) as llm:
        blocking = submit(llm, [1000] * 100, rank=1)
        bound, free = submit(llm, [64] * 64, rank=0), submit(llm, [64] * 64)
        time.sleep(0.2)
        for mailbox in blocking:
            llm._service.client.abort(mailbox)
        counts, ends = follow([llm], [*bound, *free])
    print(f"| one ahead | 2 | 1 | {shown([counts[0], counts[1]], 'd')} | {shown([ends[0], ends[1]], '.2f')} |")


class Silent:
    """Stands in for the sockets."""

    def send(self, *_: object) -> bytes:
        return b""


def cost(engines: int, prompt: int, repeats: int = 5, count: int = 2000) -> float:
    """Microseconds a request in the IO thread: make its message, choose, name and count it; without encoding."""
    params = SamplingParams(temperature=0.0, max_tokens=64)
    draw = np.random.default_rng(0)
    found = []
    for _ in range(repeats):
        remotes = [
            RemoteEngine(i, EngineState.UP, client_id=b"", resolved={"enable_prefix_caching": True})
            for i in range(engines)
        ]
        requests = InFlight(Silent(), remotes)  # type: ignore[arg-type]
        mailboxes = [
            Mailbox(
                EngineRequest("r", None, draw.integers(0, 1000, prompt, np.int32), params, {}),
                None,
                ThreadNotifier(),
                OutputKind.FINAL,
            )
            for _ in range(count)
        ]
        begin = time.thread_time()
        for i, mailbox in enumerate(mailboxes):
            requests.submit(mailbox)
            if i % 10 == 9:
                requests.report(remotes[i // 10 % engines], Load(0, i % 3, 1000))
        found.append(time.thread_time() - begin)
    return 1e6 * statistics.median(found) / count


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(f"Python {sys.version.split()[0]}, {os.cpu_count()} cores; load of the machine: {os.getloadavg()[0]:.1f}\n")
    print("| work | engines | clients | requests that ended at each | spread | seconds to its last end | spread |")
    print("|---|---:|---:|---|---:|---|---:|")
    for engines in (2, 4):
        bench_spread(engines, ragged=False)
        bench_spread(engines, ragged=True)
        bench_two_clients(engines)
    bench_one_ahead()
    print("\n| engines | us a request, prompt of 32 tokens | 1,024 | 16,384 |")
    print("|---:|---:|---:|---:|")
    for engines in (1, 2, 8):
        print(f"| {engines} | {' | '.join(f'{cost(engines, prompt):.1f}' for prompt in (32, 1024, 16_384))} |")


if __name__ == "__main__":
    main()
