"""Host time of the engine's loop without sockets: with the device faked, on one core, or with a model on the GPU.

    python scripts/bench_host_loop.py [--steps 2000] [--model FOLDER]

Prints Markdown tables: schedule and update per step at 1 to 1,024 running requests, alone and with 10,000 waiting; and
deadlines set, cancelled and rung. With a model of `make_checkpoint.py`: the phases of turns that
replay graphs, of so many decoding requests.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from scripted_runner import Script, ScriptedRunner

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import OFTEN, EngineCore
from wavecore.engine_core.loop.stats import PHASES
from wavecore.engine_core.plan import Runner, StepPlan, StepResult
from wavecore.engine_core.scheduling.timers import Timers
from wavecore.engine_core.startup.factory import make_runner
from wavecore.transport.wire.messages import Add, TensorFrame

T = TypeVar("T")
SCRIPT = Script(vocab_size=1000, num_blocks=1024 * 80, block_size=64, max_model_len=5120)
CLIENT = b"benchmark client"
SHAPES = ((1, 0), (32, 0), (256, 0), (1024, 0), (256, 10_000), (1024, 10_000))


class FakeDevice(ScriptedRunner):
    """Gives token 7 for every row, at once."""

    def launch(self, plan: StepPlan | None, least: object = None) -> FakeStep:  # type: ignore[override]  # noqa: ARG002
        assert plan is not None
        return FakeStep(plan.num_rows)


class FakeStep:
    def __init__(self, rows: int) -> None:
        self.rows = rows

    def wait(self) -> StepResult:
        return StepResult(np.full(self.rows, 7, np.int32), np.zeros(self.rows, np.uint8))


def make_add(handle: int) -> Add:
    prompt = np.random.default_rng(handle).integers(1, 999, 64 + handle % 64).astype(np.int32)
    frame = TensorFrame("int32", prompt.shape, prompt.tobytes())
    return Add(b"", CLIENT, handle + 1, handle, frame, {"max_tokens": None, "ignore_eos": True}, {"timeout": 3600.0})


def bench_loop(running: int, waiting: int, steps: int) -> str:
    config = EngineConfig(max_num_seqs=running, max_num_batched_tokens=max(8192, running), max_num_queued_reqs=1 << 20)
    core = EngineCore(config, FakeDevice(config, script=SCRIPT))
    adds = [make_add(handle) for handle in range(running + waiting)]
    requests = [core.admit(add) for add in adds]
    for request in requests[:running]:
        core.add(request)
    while len(core.requests.waiting) or core.requests.totals.steps < 50:
        core.step()
    enqueue = per_item(requests[running:], core.add)
    seconds = []
    whole = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        core.step()
        whole.append(time.perf_counter() - start)
        sums = core.stats.report()
        seconds.append([sums["schedule_seconds"], sums["update_seconds"]])
    cancel = per_item(list(range(running, running + waiting)), lambda handle: core.abort(CLIENT, [handle]))
    schedule, update = 1e6 * np.diff(seconds, axis=0).T
    both = schedule + update
    step = 1e6 * np.median(whole)  # with the statistics of the step, which no phase holds
    cells = [np.median(schedule), np.median(update), np.median(both), np.percentile(both, 99), step]
    return row(running, waiting, *(f"{cell:.0f}" for cell in cells), enqueue, cancel)


def bench_turns(runner: Runner, config: EngineConfig, running: int, steps: int) -> str:
    """Median and 90th percentile of each phase, in ms, once all that such steps replay is captured."""
    core = EngineCore(config, runner)
    for handle in range(running):
        core.add(core.admit(make_add(handle)))
    while len(core.requests.waiting) or core.requests.totals.steps < 50 or runner.wants_capture(OFTEN):
        core.step()
    seconds = []
    for _ in range(steps + 1):
        sums = core.stats.report()
        seconds.append([sums[f"{name}_seconds"] for name in PHASES])
        core.step()
    phases = 1e3 * np.diff(seconds, axis=0).T
    host = phases.sum(axis=0) - phases[PHASES.index("wait")]
    core.abort(CLIENT, list(range(running)))
    while core.has_work:
        core.step()
    cells = (f"{np.median(ms):.3f} ({np.percentile(ms, 90):.3f})" for ms in (*phases, host, phases.sum(axis=0)))
    return row(running, *cells)


def bench_model(folder: str, steps: int) -> None:
    sizes = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 4096, "dtype": "bfloat16"}
    config = EngineConfig(model=folder, device="cuda", skip_tokenizer_init=True, **sizes)  # type: ignore[arg-type]
    runner = make_runner(config, lambda *_: None)
    print(row("running", *(f"{name} ms (p90)" for name in (*PHASES, "host", "turn"))))
    print(row(*["---:"] * 7))
    for running in (1, 256, 1024):
        print(bench_turns(runner, config, running, min(steps, 300)), flush=True)


def per_item(items: list[T], do: Callable[[T], object]) -> str:
    if not items:
        return ""
    start = time.perf_counter()
    for item in items:
        do(item)
    return f"{(time.perf_counter() - start) / len(items) * 1e6:.1f}"


def bench_timers(count: int) -> str:
    timers: Timers[object] = Timers()
    rng = random.Random(1)
    deadlines = [rng.uniform(1.0, 600.0) for _ in range(count)]
    start = time.perf_counter()
    for i, deadline in enumerate(deadlines):
        timers.insert(deadline, i)
    inserted = time.perf_counter()
    for step in range(2000):
        timers.advance(step * 0.0005)  # steps of half a millisecond in which nothing is due
    ticked = time.perf_counter()
    for i in range(count * 9 // 10):
        timers.cancel(i)
    cancelled = time.perf_counter()
    left = len(timers._heap)
    timers.advance(700.0)
    drained = time.perf_counter()
    return row(
        f"{(inserted - start) / count * 1e6:.2f}",
        f"{(ticked - inserted) / 2000 * 1e6:.2f}",
        f"{(cancelled - ticked) / (count * 9 // 10) * 1e6:.2f}",
        left,
        f"{(drained - cancelled) * 1e3:.1f}",
    )


def row(*cells: object) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--model", metavar="FOLDER")
    args = parser.parse_args()
    steps = args.steps
    if args.model:
        bench_model(args.model, steps)
        return
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(
        row("running", "waiting", "schedule us", "update us", "both us", "p99 us", "step us", "enqueue us", "cancel us")
    )
    print(row(*["---:"] * 9))
    for running, waiting in SHAPES:
        print(bench_loop(running, waiting, steps), flush=True)
    print()
    print(row("insert us", "tick us", "cancel us", "entries left", "rest fires, ms"))
    print(row(*["---:"] * 5))
    print(bench_timers(10_000))


if __name__ == "__main__":
    main()
