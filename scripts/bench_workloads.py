"""The workloads of docs/benchmarks.md by name, and the engine's side of the talk of bench_compare.py's processes."""

from __future__ import annotations

import json
import os
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence

from wavecore.frontend.cli.workload import WorkItem, random_ids, random_work


def shared_prefix_work(
    groups: int, per_group: int, prefix_len: int = 2048, tail_len: int = 64, output_len: int = 64, seed: int = 0
) -> list[WorkItem]:
    """Groups of requests that begin with the same tokens, as under one system prompt; in mixed order, greedy."""
    draw = random.Random(seed)
    work: list[WorkItem] = []
    for _ in range(groups):
        prefix = random_ids(draw, prefix_len)
        work += [WorkItem(prefix + random_ids(draw, tail_len), output_len) for _ in range(per_group)]
    draw.shuffle(work)
    return work


WORKLOADS: Mapping[str, Callable[[], list[WorkItem]]] = {
    "ragged-256": lambda: random_work(256, (100, 1024), (100, 1024), temperature=0.6),
    "ragged-1024": lambda: random_work(1024, (100, 1024), (100, 1024), temperature=0.6),
    "in1024-out256-x512": lambda: random_work(512, (1024, 1024), (256, 256)),
    "decode-heavy-x256": lambda: random_work(256, (32, 32), (512, 512)),
    "prefill-heavy-x128": lambda: random_work(128, (4096, 4096), (8, 8)),
    "shared-prefix-16x32": lambda: shared_prefix_work(16, 32),
    "single-in128-out256": lambda: random_work(1, (128, 128), (256, 256)),
    "single-in8192-out16": lambda: random_work(1, (8192, 8192), (16, 16)),
}
"""The workloads of docs/benchmarks.md by name; token ids lie in [10, 10,000)."""

UNIFORM = re.compile(r"x(\d+)-in(\d+)-out(\d+)")


def work_named(name: str) -> list[WorkItem]:
    """One of WORKLOADS, or `x8-in128-out64`: eight greedy requests of these lengths.

    Raises:
        ValueError: it is neither.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]()
    if found := UNIFORM.fullmatch(name):
        count, inputs, outputs = map(int, found.groups())
        return random_work(count, (inputs, inputs), (outputs, outputs))
    raise ValueError(f"{name} is neither one of {', '.join(WORKLOADS)} nor like x8-in128-out64")


def answer_requests(seconds: Callable[[Sequence[WorkItem]], float], answers: int) -> None:
    """Run the workload of each line of standard input and write its seconds to a descriptor, until the input ends.

    A line says "ready" first. Standard output is left to what the engine prints.
    """
    with os.fdopen(answers, "w", buffering=1) as out:
        print(json.dumps("ready"), file=out)
        for line in sys.stdin:
            print(json.dumps(seconds(work_named(line.strip()))), file=out)
