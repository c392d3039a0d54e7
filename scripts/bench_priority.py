"""Time to first token of an urgent request that arrives among 200 long ones, by scheduling policy.

    python scripts/bench_priority.py

The device is made up and so is time: a step takes 4 ms plus 20 us a token (a mid-size model on one GPU), so the table
is the same on every machine. The urgent request (256 tokens of prompt) arrives after 2 s of load.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from scripted_runner import Script, ScriptedRunner

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.plan import StepPlan, StepResult
from wavecore.transport.wire.messages import Add, TensorFrame

CLIENT = b"benchmark client"
Policy = Literal["fcfs", "priority", "hybrid"]
POLICIES: tuple[Policy, ...] = ("fcfs", "priority", "hybrid")
URGENT = 10_000
STEP_SECONDS, TOKEN_SECONDS = 0.004, 20e-6


class MadeUpDevice(ScriptedRunner):
    """Runs one step after the other in made-up time; `wait` moves the clock to the step's end."""

    now = busy_until = 0.0

    def launch(self, plan: StepPlan | None, least: object = None) -> MadeUpStep:  # type: ignore[override]  # noqa: ARG002
        assert plan is not None
        self.busy_until = max(self.busy_until, self.now) + STEP_SECONDS + TOKEN_SECONDS * plan.num_tokens
        return MadeUpStep(self, plan.num_rows, self.busy_until)


class MadeUpStep:
    def __init__(self, device: MadeUpDevice, rows: int, end: float) -> None:
        self.device, self.rows, self.end = device, rows, end

    def wait(self) -> StepResult:
        self.device.now = max(self.device.now, self.end)
        return StepResult(np.full(self.rows, 7, np.int32), np.zeros(self.rows, np.uint8))


def add(core: EngineCore, handle: int, length: int, max_tokens: int, priority: int) -> None:
    prompt = np.random.default_rng(handle).integers(1, 999, length).astype(np.int32)
    frame = TensorFrame("int32", prompt.shape, prompt.tobytes())
    params = {"max_tokens": max_tokens, "ignore_eos": True}
    core.add(core.admit(Add(b"", CLIENT, handle + 1, handle, frame, params, {"priority": priority})))


def measure(policy: Policy, max_num_seqs: int) -> tuple[float, float, int]:
    """Seconds to the urgent request's first token, seconds until all is done, preemptions."""
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=2048, scheduling_policy=policy, ageing_seconds=10.0
    )
    device = MadeUpDevice(config, script=Script(num_blocks=8192, block_size=16, vocab_size=1000))
    core = EngineCore(config, device, clock=lambda: device.now)
    for handle in range(200):
        add(core, handle, 1024, 256, priority=1)
    arrived: float | None = None
    first: float | None = None
    while core.has_work:
        if arrived is None and device.now >= 2.0:
            arrived = device.now
            add(core, URGENT, 256, 32, priority=0)
        outputs, _ = core.step()
        if first is None and any(URGENT in columns.handles for columns in outputs.values()):
            first = device.now
    assert arrived is not None and first is not None
    return first - arrived, device.now, core.requests.totals.preemptions


def main() -> None:
    print("| slots | policy | first token of the urgent one | against fcfs | all done | preemptions |")
    print("|---:|---|---:|---:|---:|---:|")
    for max_num_seqs in (32, 256):
        base = 0.0
        for policy in POLICIES:
            seconds, total, preemptions = measure(policy, max_num_seqs)
            base = base or seconds
            change = f"{100 * (seconds / base - 1):.0f} %"
            print(f"| {max_num_seqs} | {policy} | {seconds * 1e3:.0f} ms | {change} | {total:.1f} s | {preemptions} |")


if __name__ == "__main__":
    main()
