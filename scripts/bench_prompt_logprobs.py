"""How long an event loop stands still while the log-probabilities of long prompts arrive in its program.

    python scripts/bench_prompt_logprobs.py [--prompts 4] [--tokens 20000] [--alternatives 20] [--vocab 4000]

A scripted engine answers at once, so that the time is the client's. Printed are the time until all outputs are there,
the longest times that the loop stood still, and what reading every entry of one output costs afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from bench_detokenize import small_tokenizer

from wavecore import AsyncLLM, SamplingParams
from wavecore.frontend.outputs import RequestOutput

BLOCK_SIZE = 64


async def watch(gaps: list[float]) -> None:
    """Note how long the loop takes for each turn, a millisecond of sleep aside."""
    while True:
        start = time.perf_counter()
        await asyncio.sleep(0.001)
        gaps.append(time.perf_counter() - start - 0.001)


async def measure(folder: Path, prompts: int, tokens: int, alternatives: int, vocab: int) -> None:
    small_tokenizer().save(str(folder / "tokenizer.json"))
    blocks = prompts * (tokens // BLOCK_SIZE + 2)
    script = {"vocab_size": vocab, "max_model_len": tokens + 2, "num_blocks": blocks, "block_size": BLOCK_SIZE}
    (folder / "script.json").write_text(json.dumps(script))
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=alternatives)

    async def one(llm: AsyncLLM, number: int) -> RequestOutput:
        ids = [(number + i * 7) % 3000 + 1 for i in range(tokens)]
        [output] = [o async for o in llm.generate({"prompt_token_ids": ids}, params, output_kind="final")]
        return output

    settings = {"tokenizer": str(folder), "disable_tqdm": True, "max_num_batched_tokens": 8192, "max_logprobs": -1}
    async with await AsyncLLM.start(f"scripted:{folder / 'script.json'}", **settings) as llm:
        gaps: list[float] = []
        watcher = asyncio.create_task(watch(gaps))
        start = time.perf_counter()
        outputs = await asyncio.gather(*[one(llm, number) for number in range(prompts)])
        took = time.perf_counter() - start
        watcher.cancel()
        start = time.perf_counter()
        entries = sum(len(entry or ()) for entry in outputs[0].prompt_logprobs or ())
        read = time.perf_counter() - start
        worst = ", ".join(f"{gap * 1e3:.0f}" for gap in sorted(gaps)[:-4:-1])
        print(f"all outputs after {took:.2f} s; the loop stood still for {worst} ms at most")
        print(f"{entries} entries of one output read in {read:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--alternatives", type=int, default=20, help="-1 for the whole vocabulary")
    parser.add_argument("--vocab", type=int, default=4000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(Path(folder), args.prompts, args.tokens, args.alternatives, args.vocab))


if __name__ == "__main__":
    main()
