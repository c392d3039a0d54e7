"""Fields of a request to the objects that the client takes, which check their bounds."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.prompts import Prompt, as_prompt
from wavecore.frontend.serve.api.schema import GenerationRequest
from wavecore.transport.errors import ValidationError

_SHARED = [f.name for f in fields(SamplingParams) if f.name in GenerationRequest.__struct_fields__]


def sampling_params(defaults: SamplingParams, body: GenerationRequest, **changes: Any) -> SamplingParams:
    """The parameters of a request: what it gives, else the model authors' recommendation.

    Args:
        changes: what the endpoint says itself.

    Raises:
        ValidationError: a value out of bounds.
    """
    if body.stream and body.prompt_logprobs is not None:
        raise ValidationError("prompt_logprobs", "are not streamed; leave stream out")
    given = {name: value for name in _SHARED if (value := getattr(body, name)) is not None}
    return replace(defaults, best_of=body.best_of, **{**given, **changes})


def prompts_of(field: str, given: str | Sequence[Any], n: int, most: int) -> list[Prompt]:
    """One prompt or several, as text or token ids.

    Args:
        n: choices of each.
        most: choices that the engine's queue takes.

    Raises:
        ValidationError: none, or too many, or of mixed forms.
    """
    is_one = isinstance(given, str) or (len(given) > 0 and all(isinstance(part, int) for part in given))
    listed = [given] if is_one else list(given)
    if not listed or not all(listed):
        raise ValidationError(field, "is empty; give at least one character or token id")
    if len(listed) * n > most:
        raise ValidationError(field, f"{len(listed)} prompts with n={n} never fit into the queue of {most}")
    if not all(isinstance(prompt, type(listed[0])) and not isinstance(prompt, int) for prompt in listed):
        raise ValidationError(field, "must be one text, one list of token ids, or a list of either")
    return [as_prompt(prompt) for prompt in listed]
