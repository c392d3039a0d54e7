"""Shared prefixes on a real model: prompt tokens computed and time, prefix cache on against off.

    python scripts/bench_prefix.py [--model default] [--requests 16] [--prefix 512] [--tokens 16]

Every request is the same system prompt of `prefix` tokens and 24 tokens of its own; they arrive at once, then once more
as the next turn (first prompt + answer + 24 tokens). Greedy; the outputs with and without the cache are compared.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.startup.factory import make_runner
from wavecore.transport.wire.messages import Add, TensorFrame

CLIENT = b"benchmark client"
OWN_TOKENS = 24

Prompts = list[list[int]]


def run(core: EngineCore, prompts: Prompts, tokens: int, first_handle: int) -> Prompts:
    for i, ids in enumerate(prompts, first_handle):
        frame = TensorFrame("int32", (len(ids),), np.array(ids, np.int32).tobytes())
        params = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        core.add(core.admit(Add(b"", CLIENT, i + 1, i, frame, params)))
    answers: Prompts = [[] for _ in prompts]
    while core.has_work:
        outputs, _ = core.step()
        for columns in outputs.values():
            for handle, token in zip(columns.handles.tolist(), columns.tokens.tolist(), strict=True):
                answers[handle - first_handle].append(token)
    return answers


def measure(model: str, caching: bool, args: argparse.Namespace) -> tuple[list[float], int, Prompts]:
    """Seconds of each turn, prompt tokens computed, all answers."""
    config = EngineConfig(model=model, device=args.device, enable_prefix_caching=caching, max_model_len=2048)
    core = EngineCore(config, make_runner(config, lambda _phase, _fraction: None))
    rng = np.random.default_rng(0)
    ids = rng.integers(100, core.runner.info.vocab_size - 100, args.prefix + 2 * args.requests * OWN_TOKENS).tolist()
    own = [ids[args.prefix + i * OWN_TOKENS :][:OWN_TOKENS] for i in range(2 * args.requests)]
    run(core, [ids[:8]], 2, 10_000)  # first use of every kernel
    prompts = [ids[: args.prefix] + own[i] for i in range(args.requests)]
    before = core.requests.totals.prompt_tokens
    start = time.perf_counter()
    first = run(core, prompts, args.tokens, 0)
    middle = time.perf_counter()
    turns = [prompts[i] + first[i] + own[args.requests + i] for i in range(args.requests)]
    second = run(core, turns, args.tokens, args.requests)
    seconds = [middle - start, time.perf_counter() - middle]
    computed = core.requests.totals.prompt_tokens - before
    return seconds, computed, first + second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prefix", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16)
    args = parser.parse_args()
    off, off_tokens, off_answers = measure(args.model, False, args)
    on, on_tokens, on_answers = measure(args.model, True, args)
    print("| prefix cache | prompt tokens computed | first turn | second turn |")
    print("|---|---:|---:|---:|")
    for name, seconds, tokens in (("off", off, off_tokens), ("on", on, on_tokens)):
        print(f"| {name} | {tokens} | {seconds[0]:.2f} s | {seconds[1]:.2f} s |")
    same = sum(a == b for a, b in zip(on_answers, off_answers, strict=True))
    print(f"\n{same} of {len(on_answers)} answers are the same with and without the cache.")


if __name__ == "__main__":
    main()
