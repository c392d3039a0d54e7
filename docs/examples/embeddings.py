"""Embeddings of texts, and how alike the texts are.

python docs/examples/embeddings.py [MODEL]
"""

from __future__ import annotations

import sys

from wavecore import LLM

TEXTS = ["A cat sleeps on the sofa.", "The kitten naps on the couch.", "Interest rates rose again."]


def main(model: str) -> None:
    with LLM(model) as llm:
        # The model's last hidden states, averaged over the tokens ("last" takes the last token's), of length 1.
        vectors = [output.outputs.embedding for output in llm.embed(TEXTS, pooling="mean", use_tqdm=False)]
    print(f"{len(vectors)} vectors of {len(vectors[0])} numbers")
    for text, vector in zip(TEXTS[1:], vectors[1:], strict=True):
        print(f"{float(vectors[0] @ vector):.3f} between {TEXTS[0]!r} and {text!r}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "default")
