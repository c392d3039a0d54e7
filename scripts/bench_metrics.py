"""What watching costs: an engine's answer to the utility `metrics`, and a scrape of an API process.

    python scripts/bench_metrics.py

No processes and no sockets: an EngineCore with the device faked, and the collector over what it says. Prints a Markdown
table of medians in CPU milliseconds. The engine's loop stands still for the first column, once a second and API
process; a scrape is made beside the event loop of its process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from bench_host_loop import SCRIPT, FakeDevice, make_add, row

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.frontend.serve.metrics import Metrics
from wavecore.transport.wire.messages import Result

SHAPES = ((256, 0, 1), (256, 10_000, 1), (256, 0, 8))


class FakeClient:
    """So many engines, all of which say what one has said."""

    def __init__(self, engines: int, value: dict[str, Any], resolved: dict[str, Any]) -> None:
        self.engines, self.resolved, self.places = list(range(engines)), resolved, list[str]()
        self._answer: Future[Result] = Future()
        self._answer.set_result(Result(b"", 0, 0, "", "", value))

    def call(self, *_: Any, **__: Any) -> Future[Result]:
        return self._answer


def median_ms(work: Callable[[], object]) -> str:
    times = []
    for _ in range(50):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return f"{1e3 * float(np.median(times)):.2f}"


def bench(running: int, waiting: int, engines: int) -> str:
    config = EngineConfig(max_num_seqs=running, max_num_queued_reqs=1 << 20)
    core = EngineCore(config, FakeDevice(config, script=SCRIPT))
    for handle in range(running + waiting):
        core.add(core.admit(make_add(handle)))
    for _ in range(100):
        core.step()
    answer, _ = core.utilities.call("metrics", {})
    resolved = {"block_size": 64, "num_blocks": 1024, "num_host_blocks": 0, "max_num_queued_reqs": 1 << 20}
    client: Any = FakeClient(engines, answer, resolved)
    both, ours = (Metrics(client, "model", vllm=vllm) for vllm in (True, False))
    both.refresh()
    ours.refresh()
    cells = [median_ms(lambda: core.utilities.call("metrics", {})), median_ms(both.refresh)]
    cells += [median_ms(both.exposition), median_ms(ours.exposition), f"{len(both.exposition()) / 1024:.0f}"]
    return row(running, waiting, engines, *cells)


def main() -> None:
    heads = ("running", "waiting", "engines", "the engine's answer", "refresh", "scrape", "scrape, our names", "KiB")
    print(row(*heads))
    print(row(*["---:"] * len(heads)))
    for shape in SHAPES:
        print(bench(*shape), flush=True)


if __name__ == "__main__":
    main()
