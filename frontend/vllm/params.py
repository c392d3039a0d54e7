"""vLLM's parameter classes: plain objects that may be changed after they were made, checked when made and when used."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum, IntEnum
from typing import Any, Self

from wavecore.engine_core.api import sampling_params as core
from wavecore.engine_core.api.fields import defaults
from wavecore.frontend.client.mailbox import OutputKind
from wavecore.frontend.compat import FOREIGN_SAMPLING, check_foreign
from wavecore.transport.errors import NotSupportedError, ValidationError


class RequestOutputKind(Enum):
    """What a stream yields: all so far, what is new, or all once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


OUTPUT_KINDS = {
    RequestOutputKind.CUMULATIVE: OutputKind.CUMULATIVE,
    RequestOutputKind.DELTA: OutputKind.DELTA,
    RequestOutputKind.FINAL_ONLY: OutputKind.FINAL,
}


class SamplingType(IntEnum):
    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


@dataclass
class SamplingParams:
    """As `wavecore.SamplingParams`, with vLLM's order of fields; `output_kind` is for `AsyncLLM`.

    The last block holds what vLLM has and we do not: at its default it asks for nothing.

    Raises:
        ValidationError: a value out of bounds.
        NotSupportedError: a value that asks for what is not here; with the way out.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    best_of: int | None = None

    watermarking: bool | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    structured_outputs: Any = None
    guided_decoding: Any = None
    extra_args: Mapping[str, Any] | None = None
    logits_processors: Any = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: Any = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Sequence[int] | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        if isinstance(self.stop, str):
            self.stop = [self.stop]
        self.checked()

    def checked(self) -> core.SamplingParams:
        """The same as the engine's own, checked now."""
        for name in FOREIGN_SAMPLING:
            check_foreign(FOREIGN_SAMPLING, name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise ValidationError("output_kind", f"must be a RequestOutputKind, not {self.output_kind!r:.60}")
        return core.SamplingParams(best_of=self.best_of, **{name: getattr(self, name) for name in _SHARED})

    @classmethod
    def of(cls, params: core.SamplingParams) -> Self:
        return cls(**{name: value for name in _SHARED if (value := getattr(params, name)) not in (None, ())})

    @classmethod
    def from_optional(cls, **values: Any) -> Self:
        """From values of which None stands for the default."""
        return cls(**{name: value for name, value in values.items() if value is not None or name == "max_tokens"})

    def clone(self) -> Self:
        return copy.deepcopy(self)

    @property
    def sampling_type(self) -> SamplingType:
        if self.temperature == 0:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED


_SHARED = [f.name for f in fields(SamplingParams) if f.name in defaults(core.SamplingParams)]


def checked(params: Any) -> Any:
    """What `LLM.generate` takes as sampling parameters, as our own `LLM` takes it."""
    if isinstance(params, SamplingParams):
        return params.checked()
    return [checked(one) for one in params] if isinstance(params, Sequence) else params


@dataclass
class BeamSearchParams:
    """Of `LLM.beam_search`.

    Attributes:
        temperature: must be 0: beams are not drawn.
        length_penalty: a beam's score is its log-probability divided by its length to this power.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: Sequence[int] | None = None


@dataclass
class LoRARequest:
    """Can be made, since programs do so whether they use one or not; `LLM.generate` refuses it."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""


class UsageContext(Enum):
    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


def refuse_extras(**values: Any) -> None:
    """Raises:
    NotSupportedError: an argument of vLLM's that we can only take where it asks for nothing.
    """
    for name, value in values.items():
        empty = value is None or (isinstance(value, Sequence | Mapping) and not any(value))
        if not empty:
            raise NotSupportedError(f"{name}: {_WAYS_OUT[name]}")


_WAYS_OUT = {
    "lora_request": "merge the adapter into the weights first",
    "mm_processor_kwargs": "images, audio and video are not supported",
    "tokenization_kwargs": "only add_special_tokens is supported; give prompt_token_ids for more",
    "data_parallel_rank": "a client chooses the engine with the least work",
    "session_id": "requests are not bound to sessions",
    "kv_hints": "the prefix cache needs no hints",
    "pooling_params": 'use pooling="last" or "mean"',
    "structured_outputs": "constrained decoding is not supported",
    "allowed_token_ids": "beams are of all tokens",
    "reasoning_ended": "constrained decoding is not supported",
    "reasoning_parser_kwargs": "constrained decoding is not supported",
}
