"""Outputs that vLLM has and `wavecore` has not: scores of pairs of prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavecore.frontend.outputs import EmbeddingRequestOutput


@dataclass
class ScoringOutput:
    """Attributes:
    score: from -1 to 1.
    """

    score: float


@dataclass
class ScoringRequestOutput:
    """Of one pair, whose ids are those of both."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


def score_of(one: EmbeddingRequestOutput, other: EmbeddingRequestOutput) -> ScoringRequestOutput:
    """The cosine between two embeddings, which are of length 1."""
    return ScoringRequestOutput(
        f"{one.request_id}_{other.request_id}",
        ScoringOutput(float(np.dot(one.outputs.embedding, other.outputs.embedding))),
        [*one.prompt_token_ids, *other.prompt_token_ids],
    )
