"""Two models in a row: one drafts, the other rewrites each sentence as soon as it is there.

    python docs/examples/draft_and_rewrite.py [DRAFT_MODEL [REWRITE_MODEL]]

By default both are the same small model, in an engine each.
"""

from __future__ import annotations

import sys

from wavecore import ModelPipeline


def main(draft: str, rewrite: str) -> None:
    pipeline = ModelPipeline()
    # Both on GPU 0, each with its share of the memory; `gpus=[1]` gives a stage another one. A CPU needs neither.
    pipeline.add_stage("draft", draft, prompt="A short story about {prompt}:", gpu_memory_utilization=0.45)
    # A template may name any earlier stage. With overlap, {draft} is one sentence; without, all of it.
    pipeline.add_stage("rewrite", rewrite, prompt="{draft} Or better:", overlap=True, gpu_memory_utilization=0.45)
    with pipeline:  # the engines start here and end with the block
        for new in pipeline.stream("a lighthouse", max_tokens=40, temperature=0.0):
            print(f"{new.stage}: {new.text!r}")
        outputs = pipeline.run("a ship", max_tokens=40, temperature=0.0)
    for name, output in outputs.items():
        print(f"whole {name}: {output.text!r} ({len(output.token_ids)} tokens, {output.finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "default", sys.argv[-1] if len(sys.argv) > 1 else "default")
