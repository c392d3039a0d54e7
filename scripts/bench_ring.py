"""What it costs to bring a step's plan to the other ranks of an engine: rank 0's share of it, until they have it, and
until rank 0 knows that. On one host by the ring, over several by the link between them (here over loopback).

    python scripts/bench_ring.py [--ranks 2] [--steps 2000]

Prints a Markdown table, medians and in brackets the 99th percentile. No GPU, no model; other processes on the machine
show in all of it. A rank that waits for longer than 50 us sleeps, and the system wakes it: steps of 2 ms show that.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import numpy as np

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.plan import NewRequest, StepPlan
from wavecore.engine_core.tensor_parallel.group_runner import WorkerWords
from wavecore.engine_core.tensor_parallel.plan_codec import decode, encode
from wavecore.transport.curve import create_keys
from wavecore.transport.io.host_link import RankPlace
from wavecore.transport.io.step_link import StepLink
from wavecore.transport.processes import group_memory
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage
from wavecore.transport.processes.step_ring import StepChannel, StepRing

PAUSE_SECONDS = 2e-3
TIMES = 4000  # words of the group's memory, behind those of its ranks
KINDS = {"1 row": (1, 0), "256 rows": (256, 0), "256 rows, a prompt of 8,192 tokens begins": (256, 8192)}


def plan(step: int, rows: int, prompt: int) -> StepPlan:
    """A step of decoding rows, in which perhaps one request begins."""
    new = NewRequest(0, np.zeros(prompt, np.int32), prompt, SamplingParams(temperature=1.0, top_p=0.9, seed=1))
    column = np.arange(rows, dtype=np.int32)
    ones = np.ones(rows, np.int32)
    return StepPlan(step, column.astype(np.intp), column, ones, ones.astype(np.bool_), (new,) if prompt else ())


class Group:
    """Ranks in processes that come of this one by a fork.

    Args:
        folder: for keys, where they meet over tcp; None: they share memory.
    """

    def __init__(self, ranks: int, folder: Path | None, until: ExitStack) -> None:
        self.ranks, self._folder = ranks, folder
        (_, self._memory), (_, self._store), *bells = group_memory.create(ranks, until)
        self._bells = [bell for _, bell in bells]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    @contextmanager
    def join(self, rank: int) -> Iterator[tuple[GroupMemory, StepChannel]]:
        """The memory of all, for times; and what a runner or a worker is given."""
        page = ProgressPage(ProgressPage.create_fd())
        memory = GroupMemory(rank, os.dup(self._memory), self._store, self._bells, page)
        if self._folder is None:
            yield memory, StepRing(memory)
            return
        place = RankPlace(self._address, f"127.0.0.{rank + 2}", rank, self.ranks, self.ranks)
        alone = GroupMemory.alone(page)
        with closing(StepLink(place, self._folder, alone, range(rank, rank + 1), lambda e: sys.exit(str(e)))) as link:
            link.meet(30)
            yield memory, link


def follow(group: Group, rank: int, steps: int) -> None:
    """A worker: notes when it had each plan."""
    with group.join(rank) as (memory, channel):
        words = WorkerWords(channel)
        bytes(memory.records)  # has its pages, as after the first steps of an engine
        for step in range(steps):
            decode(channel.read()[1])
            memory.words[TIMES + rank] = time.monotonic_ns()
            words.tell(WorkerWords.LAUNCHED, step)


def measure(
    ranks: int, folder: Path | None, steps: int, rows: int, prompt: int, pause: float
) -> tuple[list[float], ...]:
    """Microseconds of each step: to encode and write; and from the beginning until every worker has the plan, and
    until rank 0 knows so."""
    taken = list[list[float]]()
    with ExitStack() as stack:
        group, workers = Group(ranks, folder, stack), []
        for rank in range(1, ranks):
            if not (pid := os.fork()):
                follow(group, rank, steps)
                os._exit(0)
            workers.append(pid)
        with group.join(0) as (memory, channel):
            words = WorkerWords(channel)
            memory.records[:] = bytes(len(memory.records))
            for step in range(steps):
                found = plan(step, rows, prompt)
                start = time.monotonic_ns()
                channel.write(0, encode(found))
                written = time.monotonic_ns()
                words.wait_for(WorkerWords.LAUNCHED, step)
                known = time.monotonic_ns()
                there = max(memory.words[TIMES + 1 : TIMES + ranks])
                taken.append([(end - start) / 1e3 for end in (written, there, known)])
                time.sleep(pause)
            for pid in workers:
                os.waitpid(pid, 0)
    return tuple(list(times) for times in zip(*taken, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    given = parser.parse_args()
    print(
        f"| {given.ranks} ranks | by | pause ms | rank 0: encode, write us | until all have it us | and it knows us |"
    )
    print("|---|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        create_keys(Path(folder) / "keys")
        for name, (rows, prompt) in KINDS.items():
            for way, keys in (("ring", None), ("link", Path(folder) / "keys")):
                for pause in (0.0, PAUSE_SECONDS):
                    columns = measure(given.ranks, keys, given.steps, rows, prompt, pause)
                    cells = [f"{np.median(values):.0f} ({np.percentile(values, 99):.0f})" for values in columns]
                    print(f"| {name} | {way} | {pause * 1e3:g} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
