"""Embedding requests: rows without sampling, pooled and normalised in the engine."""

from __future__ import annotations

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.frontend.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from wavecore.transport.errors import RequestError

EMBEDDING_PARAMS = SamplingParams(max_tokens=0, temperature=0.0, detokenize=False)


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
