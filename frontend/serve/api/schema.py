"""What requests hold, as msgspec structs: strict types, and errors with the path of the value.

Null stands for "not given", as in OpenAI's API. Bounds are those of `SamplingParams` and `RequestOptions`, which the
values go through. Fields that are known and mean nothing here, and those that would change the answer, stand in
`fields.json`; whatever neither of them has is ignored, and named in the answer's `x-wavecore-ignored`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from wavecore.frontend.compat import FOREIGN_SAMPLING, check_foreign

FIELDS: Mapping[str, Mapping[str, Any]] = FOREIGN_SAMPLING | json.loads(
    Path(__file__).with_name("fields.json").read_text(encoding="utf-8")
)
"""A field that no struct has -> its "default", "allowed" values that ask for nothing, "otherwise" the way out."""


def is_known(name: str, value: Any) -> bool:
    """Whether a field that a struct lacks is a known one that asks for nothing.

    Raises:
        NotSupportedError: it would change the answer; with the way out.
    """
    if name not in FIELDS:
        return False
    check_foreign(FIELDS, name, value)
    return True


class StreamOptions(msgspec.Struct):
    """`include_usage`: a last chunk with the numbers of tokens. `continuous_usage_stats`: in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool | None = None


class OfModel(msgspec.Struct, kw_only=True):
    """What all requests share."""

    model: str | None = None


class EngineRequestFields(OfModel, kw_only=True):
    """What requests share that an engine gets."""

    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    data_parallel_rank: int | None = None


class GenerationRequest(EngineRequestFields, kw_only=True):
    """What requests of chats and of completions share."""

    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """Of /v1/completions. `parse_special` False: what spells a special token in the prompt stays text."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    parse_special: bool | None = None


class GenerateRequest(EngineRequestFields, kw_only=True):
    """Of /inference/v1/generate: token ids in and out. `sampling_params` are those of `SamplingParams`."""

    token_ids: list[int]
    sampling_params: dict[str, Any] = {}
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class EmbeddingRequest(EngineRequestFields, kw_only=True):
    """Of /v1/embeddings."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    pooling: Literal["mean", "last"] | None = None


class TokenizeRequest(OfModel, kw_only=True):
    """Of /tokenize: a prompt or a conversation."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(OfModel, kw_only=True):
    """Of /detokenize."""

    tokens: list[int]
