"""A program, not a test: which launches of a fresh engine wait for the device?

CUDA loads a kernel when it is first launched, and a load waits until the device has nothing to do. So an engine
starts, warm-up included, and then runs every scenario once, each launch while the device sleeps; nothing ran before
that might have loaded what the warm-up forgot. Prints JSON: the steps whose launch returned after the device woke up,
by scenario, and whether a kernel that nobody has launched yet makes the host wait.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from tests.gpu.allocator import grow_allocator
from tests.gpu.scenarios import SCENARIOS, chunk_of, sleep
from tests.support.model_driver import ModelDriver, load

from wavecore.engine_core.plan import PendingStep, StepPlan


def main(folder: Path, dtype: str) -> None:
    runner: Any = load(folder, device="cuda", dtype=dtype, block_size=16, max_logprobs=-1)
    runner.graphs.most = 0  # a graph loads nothing that was not loaded when its steps ran without one
    grow_allocator(runner)
    sleep().synchronize()  # the kernel that sleeps is loaded, too
    found = {name: late_launches(runner, name) for name in SCENARIOS}
    found["probe"] = [0] if waits_for_a_new_kernel() else []
    json.dump(found, sys.stdout)


def late_launches(runner: Any, name: str) -> list[int]:
    """Steps of a scenario, by number, whose launch waited."""
    late: list[int] = []
    launch, driver = runner.launch, ModelDriver(runner)

    def launching(plan: StepPlan) -> PendingStep:
        awake = sleep()
        pending: PendingStep = launch(plan)
        if awake.query():  # type: ignore[no-untyped-call]
            late.append(plan.step_id)
        return pending

    runner.launch = launching
    driver.run(SCENARIOS[name](driver), chunk=chunk_of(name))
    runner.launch = launch
    return late


def waits_for_a_new_kernel() -> bool:
    x = torch.ones(8, device="cuda")
    awake = sleep()
    torch.hypot(x, x)  # no engine ever calls it
    waited: bool = awake.query()  # type: ignore[no-untyped-call]
    return waited


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
