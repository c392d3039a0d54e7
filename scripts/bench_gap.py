"""What a long prompt does to requests that are decoding: gaps between their tokens, and its own time to first token.

    python scripts/bench_gap.py            made-up devices and clock: the same table everywhere
    python scripts/bench_gap.py --cpu      the default model on this CPU; a minute or two

Requests with short prompts decode; then a prompt of 30,000 tokens arrives (2,000 with --cpu). Gaps are those of the
decoding requests from that moment until the prompt's first token. The made-up devices take a fixed time a step and a
time a token, which doubles at position 30,000: about an 8B model on one GPU, and a 135M model on two cores.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
from scripted_runner import Script, ScriptedRunner

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.plan import StepPlan, StepResult
from wavecore.engine_core.startup.factory import make_runner
from wavecore.transport.wire.messages import Add, TensorFrame

CLIENT = b"benchmark client"
DEVICES = {"8B on a GPU": (0.012, 50e-6), "135M on a CPU": (0.03, 1.6e-3)}  # seconds a step, a token
TARGETS = (None, 50.0, 100.0, 200.0, 500.0)
LONG = 1 << 20


class MadeUpDevice(ScriptedRunner):
    """Runs one step after the other in made-up time; `wait` moves the clock to the step's end."""

    now = busy_until = 0.0

    def launch(self, plan: StepPlan | None, least: object = None) -> MadeUpStep:  # type: ignore[override]  # noqa: ARG002
        assert plan is not None
        decode = plan.query_lens == 1  # half as much as a prompt's token: weights are read for all at once
        tokens = float((plan.query_lens * np.where(decode, 0.5, 1 + plan.starts / 30_000)).sum())
        self.busy_until = max(self.busy_until, self.now) + self.step_seconds + self.token_seconds * tokens
        return MadeUpStep(self, plan, self.busy_until)

    step_seconds = token_seconds = 0.0


class MadeUpStep:
    def __init__(self, device: MadeUpDevice, plan: StepPlan, end: float) -> None:
        self.device, self.plan, self.end = device, plan, end

    def wait(self) -> StepResult:
        self.device.now = max(self.device.now, self.end)
        tokens = np.where(self.plan.samples, 7, -1).astype(np.int32)
        return StepResult(tokens, np.zeros(len(tokens), np.uint8))


def add(core: EngineCore, handle: int, length: int, max_tokens: int | None) -> None:
    prompt = np.random.default_rng(handle).integers(1, 999, length).astype(np.int32)
    frame = TensorFrame("int32", prompt.shape, prompt.tobytes())
    params = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
    core.add(core.admit(Add(b"", CLIENT, handle + 1, handle, frame, params, {})))


def measure(core: EngineCore, clock: Callable[[], float], rows: int, length: int) -> str:
    """Cells of a table: p50, p99 and most of the gaps, and time to first token, alone and beside the rows."""
    alone = first_token(core, clock, LONG, length)[0]
    for handle in range(rows):
        add(core, handle, 16, None)
    for _ in range(30):
        core.step()
    beside, gaps = first_token(core, clock, LONG + 1, length)
    core.abort_client(CLIENT)
    p50, p99 = np.percentile(gaps, (50, 99)) * 1e3
    return f"{p50:.0f} | {p99:.0f} | {max(gaps) * 1e3:.0f} | {alone:.2f} | {beside:.2f}"


def first_token(core: EngineCore, clock: Callable[[], float], handle: int, length: int) -> tuple[float, list[float]]:
    """Seconds to the first token of a request that comes now, and the gaps of all others meanwhile."""
    begin = clock()
    last: dict[int, float] = {}
    gaps: list[float] = []
    add(core, handle, length, 1)
    while True:
        outputs, _ = core.step()
        now = clock()
        for other in (int(h) for columns in outputs.values() for h in columns.handles):
            gaps += [now - last[other]] if other in last else []
            last[other] = now
        if handle in last:
            return now - begin, gaps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="the default model on this CPU")
    args = parser.parse_args()
    print("| device | decoding | max_inter_token_ms | gap ms p50 | p99 | max | first token s, alone | beside |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    if args.cpu:
        for target in TARGETS[:1] + TARGETS[3:4]:
            config = EngineConfig(device="cpu", max_inter_token_ms=target, enable_prefix_caching=False)
            core = EngineCore(config, make_runner(config, lambda _phase, _fraction: None))
            cells = measure(core, time.monotonic, 4, 2000)
            print(f"| default model | 4 | {'none' if target is None else f'{target:.0f}'} | {cells} |", flush=True)
        return
    for name, (step_seconds, token_seconds) in DEVICES.items():
        for rows in (4, 64):
            for target in TARGETS:
                config = EngineConfig(max_inter_token_ms=target, enable_prefix_caching=False)
                script = Script(
                    vocab_size=1000,
                    max_model_len=40_000,
                    num_blocks=10_000,
                    block_size=64,
                    token_seconds=2 * token_seconds if "CPU" in name else 0.0,
                )
                device = MadeUpDevice(config, script=script)
                device.step_seconds, device.token_seconds = step_seconds, token_seconds
                core = EngineCore(config, device, clock=lambda device=device: device.now)  # type: ignore[misc]
                cells = measure(core, lambda device=device: device.now, rows, 30_000)  # type: ignore[misc]
                print(f"| {name} | {rows} | {'none' if target is None else f'{target:.0f}'} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
