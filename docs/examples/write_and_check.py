"""One model writes code, the next one checks it; many tasks at once.

python docs/examples/write_and_check.py [MODEL]
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

from wavecore import ModelPipeline, SamplingParams, WavecoreError

TASKS = ("adds two numbers", "reverses a string", "counts words")


# A stage's prompt may be a function. Messages go through the model's chat template, in which what a model or a user
# wrote stays text, even where it spells a special token.
def write(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Write a Python function that {texts['prompt']}. Only code."}]


def check(texts: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Is it right that this {texts['prompt']}? {texts['write']}"}]


async def solve(pipeline: ModelPipeline, task: str) -> None:
    try:
        outputs = await pipeline.arun(task, timeout=600.0)  # for both stages together
    except WavecoreError as error:  # says in which stage it was
        print(f"{task}: failed: {error}")
    else:
        print(f"{task}: {outputs['write'].text!r} -> {outputs['check'].text!r}")


async def main(model: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    pipeline = ModelPipeline()
    pipeline.add_stage("write", model, prompt=write, sampling_params=params, gpu_memory_utilization=0.45)
    pipeline.add_stage("check", model, prompt=check, sampling_params=params, gpu_memory_utilization=0.45)
    async with pipeline:
        # Each engine batches the runs that have come to it; while it checks some, the other one writes for others.
        await asyncio.gather(*(solve(pipeline, task) for task in TASKS))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "default"))
