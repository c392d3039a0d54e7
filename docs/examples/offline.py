"""A batch of prompts, answered together.

    python docs/examples/offline.py [MODEL]

MODEL is a folder in Hugging Face form, a .gguf file or a hub id; without it a small model is fetched.
"""

from __future__ import annotations

import sys

from wavecore import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Two and two are", "The sky is blue because"]


def main(model: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=32)
    # The engine is a process of its own; the end of the block ends it.
    with LLM(model) as llm:
        # One call for all prompts, in any number: the engine batches them as they fit.
        for output in llm.generate(PROMPTS, params):
            answer = output.outputs[0]
            if answer.error is not None:  # a request that fails alone says so, the others have their answers
                print(f"{output.prompt!r} failed: {answer.error}")
            else:
                print(f"{output.prompt!r} -> {answer.text!r} ({answer.finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "default")
