"""What it costs to bring a step's plan to the other ranks of an engine: rank 0's share of it, and until they have it.

    python scripts/bench_ring.py [--ranks 2] [--steps 2000]

Prints a Markdown table, medians and in brackets the 99th percentile. No GPU, no model; other processes on the machine
show in all of it. A rank that waits for longer than 50 us sleeps, and the system wakes it: steps of 2 ms show that.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack

import numpy as np

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import NewRequest, StepPlan
from wavecore.engine_core.tensor_parallel.plan_codec import decode, encode
from wavecore.transport.processes import group_memory
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage
from wavecore.transport.processes.step_ring import StepReader, StepWriter

PAUSE_SECONDS = 2e-3
KINDS = {"1 row": (1, 0), "256 rows": (256, 0), "256 rows, a prompt of 8,192 tokens begins": (256, 8192)}


def plan(step: int, rows: int, prompt: int) -> StepPlan:
    """A step of decoding rows, in which perhaps one request begins."""
    new = NewRequest(0, np.zeros(prompt, np.int32), prompt, SamplingParams(temperature=1.0, top_p=0.9, seed=1))
    column = np.arange(rows, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    return StepPlan(step, column.astype(np.intp), column, ones, ones.astype(np.bool_), (new,) if prompt else ())


def follow(memory: GroupMemory, steps: int) -> None:
    """A worker: notes when it had each plan."""
    reader = StepReader(memory)
    bytes(memory.records)  # has its pages, as after the first steps of an engine
    for _ in range(steps):
        decode(reader.read()[1])
        memory.words[memory.ranks + memory.rank] = time.monotonic_ns()


def measure(ranks: int, steps: int, rows: int, prompt: int, pause: float) -> list[list[float]]:
    """Microseconds of each step: to encode, to write, and from the beginning until every worker has the plan."""
    taken: list[list[float]] = []
    with ExitStack() as stack:
        (_, fd), (_, store), *bells = group_memory.create(ranks, stack)
        numbers, workers = [bell for _, bell in bells], []
        for rank in range(ranks):
            pid = os.fork() if rank else 0
            if pid:
                workers.append(pid)
            elif rank:
                follow(GroupMemory(rank, fd, store, numbers, ProgressPage(ProgressPage.create_fd())), steps)
                os._exit(0)
        memory = GroupMemory(0, os.dup(fd), store, numbers, ProgressPage(ProgressPage.create_fd()))
        memory.records[:] = bytes(len(memory.records))
        writer, places = StepWriter(memory), range(ranks + 1, 2 * ranks)
        for step in range(steps):
            found = plan(step, rows, prompt)
            start = time.monotonic_ns()
            parts = encode(found)
            encoded = time.monotonic_ns()
            writer.write(0, parts)
            written = time.monotonic_ns()
            while min(memory.words[place] for place in places) < start:
                os.sched_yield()
            there = max(memory.words[place] for place in places)
            taken.append([(end - begin) / 1e3 for begin, end in ((start, encoded), (encoded, written), (start, there))])
            time.sleep(pause)
        for pid in workers:
            os.waitpid(pid, 0)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    print(f"| {given.ranks} ranks | pause ms | encode us | write us | rank 0, both us | until all have it us |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, (rows, prompt) in KINDS.items():
        for pause in (0.0, PAUSE_SECONDS):
            encoded, written, there = np.array(measure(given.ranks, given.steps, rows, prompt, pause)).T
            cells = [
                f"{np.median(values):.0f} ({np.percentile(values, 99):.0f})"
                for values in (encoded, written, encoded + written, there)
            ]
            print(f"| {name} | {1000 * pause:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
