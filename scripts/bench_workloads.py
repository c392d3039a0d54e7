"""What the processes of bench_compare.py have in common: names of workloads, and the engine's side of their talk."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Sequence

from wavecore.frontend.cli.workload import WORKLOADS, WorkItem, random_work

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
