"""What a caller gets back. Shapes and names as in vLLM, so that code that reads them moves over unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from wavecore.transport.errors import RequestError, WavecoreError

FinishName = Literal["stop", "length", "abort", "error", "timeout"]


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token by the raw model distribution (before temperature, penalties and truncation).

    Attributes:
        rank: 1 for the most likely token of the whole vocabulary.
        decoded_token: the token's text on its own; None without a tokenizer.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Token id -> Logprob at one position: the chosen token first, then the most likely ones."""
SampleLogprobs = Sequence[PositionLogprobs]
PromptLogprobs = Sequence[PositionLogprobs | None]


@dataclass(slots=True)
class CompletionOutput:
    """One choice. In a stream of deltas, `text`, `token_ids` and `logprobs` hold what is new.

    Attributes:
        cumulative_logprob: of all tokens so far; None where logprobs were not asked for.
        logprobs: one entry a token: a list, or with more than 64 alternatives a sequence whose entries are made when
            they are read. None where they were not asked for.
        finish_reason: None while it runs.
        stop_reason: the stop string or the stop token id that ended it, or which deadline passed; else None.
        seed: the effective seed: the one asked for, or the one drawn for this request.
        error: why it ended where finish_reason is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishName | None = None
    stop_reason: int | str | None = None
    seed: int | None = None
    error: WavecoreError | None = None
    # Of what vLLM has and we do not, so that it can be read
    lora_request = routed_experts = sampling_mask = spec_decode_metrics = weight_versions = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Measured in the client.

    Attributes:
        arrival_time: seconds since the epoch.
        first_token_latency: seconds from arrival to the first token; None before it.
        last_token_latency: seconds from arrival to the newest token; None before the first.
        num_generation_tokens: of all choices.
    """

    arrival_time: float
    first_token_latency: float | None = None
    last_token_latency: float | None = None
    num_generation_tokens: int = 0

    @property
    def time_per_token(self) -> float | None:
        """Seconds a token after the first; None below two tokens."""
        first, last, count = self.first_token_latency, self.last_token_latency, self.num_generation_tokens
        return None if first is None or last is None or count < 2 else (last - first) / (count - 1)


@dataclass(slots=True)
class RequestOutput:
    """A request's output so far, all of it, or what is new since the last one.

    Attributes:
        prompt: the prompt's text, None where it was given as token ids.
        prompt_logprobs: one entry a prompt token, the first None; None where not asked for. An entry is made when it
            is read.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache, counted once for all choices.
        embedding: float32 [hidden] of an embedding request that is finished.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: PromptLogprobs | None = None
    num_cached_tokens: int | None = None
    embedding: npt.NDArray[np.float32] | None = None
    # Of what vLLM has and we do not, so that it can be read
    lora_request = encoder_prompt = encoder_prompt_token_ids = num_cache_creation_tokens = None
    prompt_token_id_logprobs = kv_transfer_params = ec_transfer_params = None

    @property
    def error(self) -> WavecoreError | None:
        """The first error among the choices."""
        for output in self.outputs:  # read with every delta: a generator would cost twice as much
            if output.error is not None:
                return output.error
        return None


def shown(output: RequestOutput | None) -> Iterable[RequestOutput]:
    """What a stream yields for one `Mailbox.take`: nothing, the output, or what a failed request had before it failed.

    Raises:
        WavecoreError: the request failed; the stream's end is the exception.
    """
    if output is None:
        return ()
    return (output,) if output.error is None else _failed(output, output.error)


def _failed(output: RequestOutput, error: WavecoreError) -> Iterator[RequestOutput]:
    if any(o.token_ids for o in output.outputs):
        outputs = [replace(o, finish_reason=None, error=None) if o.error else o for o in output.outputs]
        yield replace(output, outputs=outputs, finished=False)
    raise error


@dataclass(slots=True)
class EmbeddingOutput:
    """Attributes:
    embedding: float32 [hidden], of length 1 in the Euclidean norm.
    """

    embedding: npt.NDArray[np.float32]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """An embedding request that has ended.

    Attributes:
        error: why there is no embedding; `outputs.embedding` is empty then.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    metrics: RequestMetrics
    finished: bool = True
    error: WavecoreError | None = None
    num_cached_tokens: int | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        embedding, error = output.embedding, output.error
        if embedding is None:
            ended = output.outputs[0].finish_reason
            error = error or RequestError(f"request {output.request_id} ended ({ended}) without an embedding")
            embedding = np.empty(0, np.float32)
        vector, ids, cached = EmbeddingOutput(embedding), output.prompt_token_ids, output.num_cached_tokens
        return cls(output.request_id, ids, vector, output.metrics, error=error, num_cached_tokens=cached)
