"""What swaps cost the requests that stay: token gaps of a steady batch while a long sequence is pushed out and returns.

    python scripts/bench_swap.py FOLDER [--steady 64] [--long 8192] [--rounds 10] [--every 50]

All slots of the engine are taken, by the steady requests and by a long one of lower priority. Every so many steps a
short urgent request arrives: it needs the long one's place, whose blocks leave for the host and come back after it. One
row of the table each for:

    never pushed out            no urgent request arrives
    computed again              the long one's blocks are dropped
    swapped beside the steps    on a stream of their own: what the engine does
    swapped in line with them   on the steps' stream, so that steps wait (only on CUDA)

On a CPU all copies are in line. The prefix cache is off, so all blocks move at once and none are found again.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.plan import Runner
from wavecore.engine_core.request import State
from wavecore.engine_core.startup.factory import make_runner
from wavecore.transport.wire.messages import Add, TensorFrame

CLIENT = b"benchmark client"
LONG = 1 << 20  # handles: steady ones count from 0, urgent ones from LONG + 1
BLOCK = 32
PROMPT, URGENT_PROMPT, URGENT_TOKENS = 128, 16, 8
MARGIN = 256  # steps beside the measured ones
NEVER, AGAIN, BESIDE, IN_LINE = ROWS = (
    "never pushed out",
    "computed again",
    "swapped beside the steps",
    "swapped in line with them",
)
COLUMNS = ("the long one is", "pushed out", "steps", "gap ms p50", "p99", "max", "MB out", "long one's gap ms p50")


class Load:
    """An engine core under the steady load, and the gaps between the tokens of its requests.

    Args:
        steps: how many will be asked for in all.
        swap_gib: host memory; the long sequence must fit.
    """

    def __init__(self, model: str, device: str, steady: int, long: int, steps: int, swap_gib: float) -> None:
        steps += MARGIN
        blocks = steady * (PROMPT + steps) + long + steps + URGENT_PROMPT + URGENT_TOKENS
        config = EngineConfig(
            model=model,
            device=device,
            max_num_seqs=steady + 1,
            max_num_batched_tokens=max(8192, steady + 1),
            max_model_len=long + steps,
            block_size=BLOCK,
            num_gpu_blocks_override=blocks // BLOCK + steady + 4,  # last blocks are not full, and there is a null block
            swap_space_gib=swap_gib,
            watermark=0.0,
            enable_prefix_caching=False,
            scheduling_policy="priority",
        )
        self.core = EngineCore(config, make_runner(config, lambda _phase, _fraction: None))
        self.steady = steady
        self.urgent = LONG
        self.last: dict[int, float] = {}
        self.gaps: list[float] = []
        self.long_gaps: list[float] = []
        for handle in range(steady):
            self.add(handle, PROMPT, None, priority=1)
        self.add(LONG, long, None, priority=2)
        self.long = self.core.requests.by_client[CLIENT][LONG]
        while len(self.last) <= steady:  # until all of them decode
            self.step()

    def add(self, handle: int, length: int, max_tokens: int | None, priority: int) -> None:
        prompt = np.random.default_rng(handle).integers(10, 500, length).astype(np.int32)
        frame = TensorFrame("int32", prompt.shape, prompt.tobytes())
        params = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        self.core.add(self.core.admit(Add(b"", CLIENT, handle + 1, handle, frame, params, {"priority": priority})))

    def step(self) -> None:
        outputs, _ = self.core.step()
        now = time.perf_counter()
        for columns in outputs.values():
            for handle in columns.handles.tolist():
                before = self.last.get(handle)
                if handle > LONG:
                    continue
                if before is not None:
                    (self.long_gaps if handle == LONG else self.gaps).append(now - before)
                self.last[handle] = now

    def push(self, swaps: bool) -> None:
        """An urgent request arrives."""
        self.core.requests.kv.swap_pays = swaps
        self.urgent += 1
        self.add(self.urgent, URGENT_PROMPT, URGENT_TOKENS, priority=0)

    def settle(self) -> None:
        """Until the long one decodes again."""
        while self.long.state is not State.RUNNING or self.core.requests.slots.prefilling[self.long.slot]:
            self.step()


def measure(load: Load, name: str, rounds: int, every: int) -> list[str]:
    """The cells of one row."""
    load.settle()
    totals = load.core.requests.totals
    swapped, pushed, steps = totals.swapped_tokens, totals.preemptions, totals.steps
    load.gaps, load.long_gaps = [], []
    for _ in range(rounds):
        if name != NEVER and load.long.state is State.RUNNING:
            load.push(swaps=name != AGAIN)
        for _ in range(every):
            load.step()
    load.settle()
    pushed = totals.preemptions - pushed
    swapped = totals.swapped_tokens - swapped
    if (swapped > 0) != (name in (BESIDE, IN_LINE)):
        raise SystemExit(f"{name}: {swapped} tokens were swapped; the long sequence must fit into the swap space")
    stats = load.core.runner.memory_stats()
    token_bytes = stats["kv_cache_bytes"] / (load.core.runner.info.num_blocks * BLOCK)
    away = sorted(load.long_gaps)[-pushed:] if pushed else load.long_gaps
    gaps = [1000 * float(np.percentile(load.gaps, p)) for p in (50, 99, 100)]
    return [
        name,
        str(pushed),
        str(totals.steps - steps),
        *(f"{gap:.2f}" for gap in gaps),
        f"{swapped * token_bytes / 1e6:.1f}",
        f"{1000 * float(np.median(away)):.1f}",
    ]


def copy_in_line(runner: Runner) -> bool:
    """Let the steps' own stream do the copies; False where there are no streams."""
    if runner.info.device == "cpu":
        return False
    import torch  # not before the engine's factory, which sets how its threads wait

    from wavecore.engine_core.execution.runner import ModelRunner

    assert isinstance(runner, ModelRunner)
    runner.copies.swaps = torch.cuda.current_stream(runner.device)
    return True


def line(values: Sequence[str]) -> None:
    print(f"| {' | '.join(values)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or scripted:FILE")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--steady", type=int, default=64, help="requests that decode all the time")
    parser.add_argument("--long", type=int, default=8192, help="tokens in the prompt of the one that is pushed out")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--every", type=int, default=50, help="steps from one urgent request to the next")
    parser.add_argument("--swap-space-gib", type=float, default=4.0)
    args = parser.parse_args(argv)
    steps = len(ROWS) * args.rounds * args.every
    load = Load(args.model, args.device, args.steady, args.long, steps, args.swap_space_gib)
    info = load.core.runner.info
    print(f"{args.model}, {info.dtype} on {info.device}: {args.steady} steady requests, a long one of {args.long}\n")
    line(COLUMNS)
    line(["---", *["---:"] * (len(COLUMNS) - 1)])
    for name in ROWS:
        if name != IN_LINE or copy_in_line(load.core.runner):
            line(measure(load, name, args.rounds, args.every))


if __name__ == "__main__":
    main()
