"""Long runs: nothing grows."""

from __future__ import annotations

import gc
import random
import sys
from typing import Any

import psutil
import pytest

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.prompts import as_prompt


@pytest.mark.parametrize("count", [3_000, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
def test_many_short_requests_with_random_aborts(deploy: Any, count: int) -> None:
    """Thousands of short requests come and go, a third of them aborted at a random moment.

    No object of any stays in the client, the engine's memory stays flat, and the number of free cache blocks is what it
    was at the start.
    """
    with deploy(num_gpu_blocks_override=200, max_num_seqs=64) as deployed:
        chance = random.Random(count)
        service, notifier = deployed.llm._service, ThreadNotifier()
        client = service.client
        engine = psutil.Process(deployed.engine.pid)
        params = [SamplingParams(max_tokens=n, temperature=0) for n in (1, 2, 4)]
        live: dict[Mailbox, None] = {}
        sent = ended = 0
        settled: tuple[int, int] | None = None
        while ended < count:
            while sent < count and len(live) < 200:
                prompt = as_prompt(
                    {"prompt_token_ids": [chance.randrange(1, 1000) for _ in range(chance.randrange(1, 40))]}
                )
                request = service.prepare(prompt, chance.choice(params))
                mailbox = service.mailbox(request, notifier, OutputKind.FINAL)
                service.client.submit(mailbox)
                live[mailbox] = None
                sent += 1
            if chance.random() < 0.33:
                client.abort(next(iter(live)))
            mailbox = notifier.wait(30)
            while mailbox is not None:
                assert mailbox.take().error is None
                del live[mailbox]
                ended += 1
                mailbox = notifier.wait(0)
            if settled is None and ended > count // 4:
                settled = _objects(), engine.memory_info().rss
        assert client.num_live == 0 and settled is not None
        objects, grown = _objects() - settled[0], engine.memory_info().rss - settled[1]
        print(f"{count} requests; grown since the first quarter: client {objects} objects, engine {grown} bytes")
        assert objects < count // 4, "one object of each request makes three quarters of them"
        assert grown < 16 << 20
        assert deployed.call("memory_stats")["blocks_in_use"] == 0


def _objects() -> int:
    """Blocks that Python's allocator holds in this process."""
    gc.collect()
    return sys.getallocatedblocks()
