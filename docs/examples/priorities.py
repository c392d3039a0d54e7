"""An urgent request overtakes a batch.

python docs/examples/priorities.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from wavecore import AsyncLLM, SamplingParams


async def ask(llm: AsyncLLM, name: str, priority: int, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    # A smaller number goes first. "final" gives one output, at the end.
    outputs = llm.generate(f"{name} is", params, priority=priority, timeout=600.0, output_kind="final")
    async for output in outputs:
        print(f"{name}: {output.metrics.last_token_latency:.2f} s", flush=True)


async def main(model: str) -> None:
    # Two slots, so that requests have to queue here; by default 256 run at once. With scheduling_policy="priority" a
    # request of a better priority also takes the place of a running one, which goes on later.
    async with await AsyncLLM.start(model, scheduling_policy="priority", max_num_seqs=2) as llm:
        batch = [asyncio.create_task(ask(llm, f"batch {number}", 1, 48)) for number in range(4)]
        await asyncio.sleep(0.1)  # the batch has begun
        await ask(llm, "urgent", 0, 8)
        await asyncio.gather(*batch)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "default"))
