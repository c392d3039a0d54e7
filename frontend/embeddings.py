"""Embedding requests: rows without sampling, pooled and normalised in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from wavecore.engine_core.sampling_params import SamplingParams
from wavecore.frontend.mailbox import Mailbox
from wavecore.frontend.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from wavecore.transport.errors import RequestError, ValidationError


@dataclass(frozen=True, slots=True)
class Embedded:
    """How a prompt becomes one vector: "mean" or "last" of the hidden states."""

    pooling: str
    params: SamplingParams = field(
        default_factory=lambda: SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)
    )

    def __post_init__(self) -> None:
        if self.pooling not in ("mean", "last"):
            raise ValidationError("pooling", f'must be "mean" or "last", not {self.pooling!r:.40}')


def pooled(mailbox: Mailbox, output: RequestOutput) -> EmbeddingRequestOutput:
    """The vector of a finished request.

    Raises:
        WavecoreError: the request failed.
    """
    if output.error is not None:
        raise output.error
    vector = mailbox.embedding
    if vector is None:
        raise RequestError(
            f"request {output.request_id} ended ({output.outputs[0].finish_reason}) without an embedding"
        )
    return EmbeddingRequestOutput(
        output.request_id, output.prompt_token_ids, EmbeddingOutput(vector), metrics=output.metrics
    )
