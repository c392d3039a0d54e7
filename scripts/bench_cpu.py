"""Tokens a second on a CPU: this engine against transformers' generate, same machine, same run, alternating.

    python scripts/bench_cpu.py [--model default] [--tokens 64] [--repeats 3]

Greedy, the same prompts for both, no stop at end-of-sequence; the prompt pass counts too; best of the repeats. Prints a
Markdown table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

from wavecore.engine_core.api.config import Dtype, EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.models.files import resolve_model
from wavecore.engine_core.startup.factory import make_runner
from wavecore.transport.wire.messages import Add
from wavecore.transport.wire.tensors import from_numpy

Bench = Callable[[int, int], float]
PROMPT_TOKENS = 32


def prompt(i: int, vocab: int) -> list[int]:
    ids: list[int] = np.random.default_rng(i).integers(100, vocab - 100, PROMPT_TOKENS).tolist()
    return ids


def ours(model: Path, dtype: Dtype) -> Bench:
    """Seconds for `batch` requests of `tokens` tokens through an EngineCore in this process."""
    config = EngineConfig(model=str(model), device="cpu", dtype=dtype, max_num_seqs=16, enable_prefix_caching=False)
    core = EngineCore(config, make_runner(config, lambda _phase, _fraction: None))
    vocab, handle = core.runner.info.vocab_size, 0

    def run(batch: int, tokens: int) -> float:
        nonlocal handle
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0).to_wire()
        begin = time.perf_counter()
        for i in range(batch):
            handle += 1
            frame = from_numpy(np.array(prompt(i, vocab), np.int32))
            core.add(core.admit(Add(b"", bytes(16), handle, handle, frame, params)))
        produced = 0
        while core.has_work:
            outputs, _ = core.step()
            produced += sum(len(columns.tokens) for columns in outputs.values())
        assert produced == batch * tokens
        return time.perf_counter() - begin

    return run


def theirs(model: Path, dtype: str) -> Bench:
    folder, extra = (model.parent, {"gguf_file": model.name}) if model.is_file() else (model, {})
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **extra).eval()
    vocab = reference.config.vocab_size

    @torch.inference_mode()
    def run(batch: int, tokens: int) -> float:
        ids = torch.tensor([prompt(i, vocab) for i in range(batch)])
        begin = time.perf_counter()
        out = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - begin
        assert out.shape[1] == PROMPT_TOKENS + tokens
        return seconds

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    model = resolve_model(args.model)
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.get_num_threads()} threads\n")
    print("| dtype | batch | wavecore tok/s | transformers tok/s | ratio |")
    print("|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        engines = {"ours": ours(model, dtype), "theirs": theirs(model, dtype)}
        for batch in (1, 16):
            seconds: dict[str, list[float]] = {name: [] for name in engines}
            for engine in engines.values():
                engine(batch, 8)
            for _ in range(args.repeats):
                for name, engine in engines.items():
                    seconds[name].append(engine(batch, args.tokens))
            rates = {name: batch * args.tokens / min(times) for name, times in seconds.items()}
            ratio = rates["ours"] / rates["theirs"]
            print(f"| {dtype} | {batch} | {rates['ours']:.1f} | {rates['theirs']:.1f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
