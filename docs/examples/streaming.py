"""Two answers at once, as they come, and a third that is cut short.

python docs/examples/streaming.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys

from wavecore import AsyncLLM, SamplingParams

PARAMS = SamplingParams(temperature=0.7, seed=1, max_tokens=40)


async def stream(llm: AsyncLLM, prompt: str) -> None:
    # Each output holds what is new. A slow reader gets fewer and longer ones, never a backlog.
    async for delta in llm.generate(prompt, PARAMS):
        print(f"{prompt!r}: {delta.outputs[0].text!r}")


async def first_words(llm: AsyncLLM, prompt: str) -> None:
    text = ""
    async for delta in llm.generate(prompt, PARAMS):
        text += delta.outputs[0].text
        if len(text) > 20:
            break  # leaving the loop ends the request in the engine, as cancelling the task does
    print(f"{prompt!r}, its first words: {text!r}")


async def main(model: str) -> None:
    async with await AsyncLLM.start(model) as llm:  # the event loop is free while the engine starts
        await asyncio.gather(stream(llm, "Once upon a time"), stream(llm, "In the year 2100"))
        await first_words(llm, "A long story:")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "default"))
