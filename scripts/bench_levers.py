"""What each lever of a step wins: turns of the engine's loop on one GPU, with all of them, and without one at a time.

    python scripts/bench_levers.py FOLDER [--steps 40]

`make_checkpoint.py` makes the folder. The engine runs in this process; decode turns are measured when all that they
replay is captured, prompts as they come, alone. A lever is taken out by putting what was there before it in its place.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
from bench_host_loop import CLIENT, row

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.execution.runner import ModelRunner
from wavecore.engine_core.loop.core import OFTEN, EngineCore
from wavecore.engine_core.startup.factory import make_runner
from wavecore.kernels import activation, kv_write, linear, norm, ops
from wavecore.kernels.attention import decode, prefill_hopper
from wavecore.transport.wire.messages import Add, TensorFrame

DECODE: Mapping[str, tuple[int, int, int]] = {  # requests, tokens of their prompts, that they have in common
    "1 x 256": (1, 256, 0),
    "4 x 256": (4, 256, 0),
    "16 x 640": (16, 640, 0),
    "256 x 288": (256, 288, 0),
    "256 x 1,152, 1,024 shared by 32": (256, 1152, 1024),
}
PROMPTS = {"prompt of 8,192": (1, 8192), "8 of 1,024": (8, 1024)}


class Bench:
    """An engine whose turns are measured."""

    def __init__(self, folder: str, steps: int) -> None:
        sizes = {"max_num_seqs": 256, "max_num_batched_tokens": 8192, "max_model_len": 9000, "dtype": "bfloat16"}
        config = EngineConfig(model=folder, device="cuda", skip_tokenizer_init=True, **sizes)  # type: ignore[arg-type]
        runner = make_runner(config, lambda *_: None)
        assert isinstance(runner, ModelRunner)
        self.runner, self.core, self._steps, self._handles = runner, EngineCore(config, runner), steps, 0

    def decode(self, requests: int, tokens: int, shared: int) -> float:
        """Milliseconds of a turn in which each of `requests` gets a token; median."""
        self._add(requests, tokens, shared, None)
        steps = 0
        while steps < 20 or len(self.core.requests.waiting) or self.runner.wants_capture(OFTEN):
            self.core.step()
            steps += 1
        seconds = [self._timed(self.core.step) for _ in range(self._steps)]
        self.core.abort(CLIENT, list(range(self._handles)))
        self._drain()
        return 1e3 * float(np.median(seconds))

    def prompts(self, requests: int, tokens: int) -> float:
        """Milliseconds from prompts that come together until each has a token; the least of five times."""
        return 1e3 * min(self._timed(lambda: self._prompts(requests, tokens)) for _ in range(5))

    def _prompts(self, requests: int, tokens: int) -> None:
        self._add(requests, tokens, 0, 1)
        self._drain()

    def _add(self, requests: int, tokens: int, shared: int, max_tokens: int | None) -> None:
        for i in range(requests):
            self._handles += 1
            ids = np.random.default_rng(self._handles).integers(1, 999, tokens).astype(np.int32)
            ids[:shared] = np.random.default_rng(1000 + i // 32).integers(1, 999, shared)
            frame = TensorFrame("int32", ids.shape, ids.tobytes())
            wishes = {"max_tokens": max_tokens, "ignore_eos": True}
            add = Add(b"", CLIENT, self._handles, self._handles - 1, frame, wishes, {})
            self.core.add(self.core.admit(add))

    def _drain(self) -> None:
        while not self.core.is_idle:  # and not for what idle turns would do
            self.core.step()

    @staticmethod
    def _timed(do: Callable[[], object]) -> float:
        start = time.perf_counter()
        do()
        return time.perf_counter() - start


@contextmanager
def without_graphs(bench: Bench) -> Iterator[None]:
    with patch.object(bench.runner.graphs, "most", 0):
        yield


@contextmanager
def without_overlap(bench: Bench) -> Iterator[None]:
    with patch.object(bench.core, "depth", 1):
        yield


@contextmanager
def without_early_starts(_: Bench) -> Iterator[None]:
    with ExitStack() as patches:
        for module in (activation, decode, kv_write, linear, norm):
            patches.enter_context(patch.object(module, "early", lambda *_: {"EARLY": False}))
        yield


@contextmanager
def without_own_products(_: Bench) -> Iterator[None]:
    ops.linear.replace(ops.linear.twin)
    try:
        yield
    finally:
        ops.linear.replace(None)


@contextmanager
def without_sharing(_: Bench) -> Iterator[None]:
    with patch.object(decode, "bundle_width", lambda *_: 1):
        yield


@contextmanager
def without_hopper_prompts(_: Bench) -> Iterator[None]:
    with patch.object(prefill_hopper, "holds", lambda *_: False):
        yield


@contextmanager
def with_all(_: Bench) -> Iterator[None]:
    yield


LEVERS = {
    "all of them": with_all,
    "no CUDA graphs": without_graphs,
    "one step in flight": without_overlap,
    "no early starts": without_early_starts,
    "cuBLAS for few rows": without_own_products,
    "shared beginnings read by each": without_sharing,
    "prompts' attention without Hopper's": without_hopper_prompts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    bench = Bench(args.folder, args.steps)
    print(row("ms a turn", *DECODE, *PROMPTS))
    print(row(*["---:"] * (1 + len(DECODE) + len(PROMPTS))))
    for name, lever in LEVERS.items():
        with lever(bench):
            bench.runner.graphs.clear()
            found = [bench.decode(*size) for size in DECODE.values()]
            found += [bench.prompts(*size) for size in PROMPTS.values()]
        print(row(name, *(f"{ms:.3f}" for ms in found)), flush=True)


if __name__ == "__main__":
    main()
