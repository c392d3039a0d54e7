"""The forms a prompt may take, made into one. Names as in vLLM: text, `TextPrompt`, `TokensPrompt`, `EmbedsPrompt`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from wavecore.transport.errors import NotSupportedError, ValidationError
from wavecore.transport.wire.checks import OF_REQUEST

I32 = npt.NDArray[np.int32]


class TextPrompt(TypedDict):
    """`parse_special` False (text of strangers): what spells a special token stays text."""

    prompt: str
    cache_salt: NotRequired[str]
    parse_special: NotRequired[bool]


class TokensPrompt(TypedDict):
    """`prompt` is the text that the ids stand for, to be shown in outputs."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


class EmbedsPrompt(TypedDict):
    """`prompt_embeds`: floats [n, hidden], a numpy array or a torch tensor; ids beside them are not read."""

    prompt_embeds: Any
    prompt_token_ids: NotRequired[Sequence[int]]
    prompt_is_token_ids: NotRequired[Sequence[bool]]
    cache_salt: NotRequired[str]


PromptType = str | TextPrompt | TokensPrompt | EmbedsPrompt | Sequence[int]

_KNOWN = frozenset({"prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "parse_special"})
_REFUSED = {
    **dict.fromkeys(("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs"), "images, audio and video"),
    **dict.fromkeys(("encoder_prompt", "decoder_prompt"), "encoder-decoder models"),
    "media_io_kwargs": "images, audio and video",
    "token_type_ids": "types of tokens",
    "prompt_token_offsets": "places in the text",
    "prompt_is_token_ids": "ids among embeddings",
}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, not tokenised yet. Exactly one of text, ids and embeds is the input; text may accompany ids.

    `cache_salt` is as it was given: `RequestOptions` checks it. `seconds` have gone into making the ids, and count for
    the request's deadlines.
    """

    text: str | None = None
    ids: I32 | None = None
    embeds: Any = None
    cache_salt: str | None = None
    parse_special: bool = True
    seconds: float = 0.0


def as_prompts(prompts: Any) -> list[Prompt]:
    """A list from what `LLM.generate` accepts: one prompt or a list of prompts of any form.

    Raises:
        ValidationError: no prompts, or a malformed one.
    """
    if isinstance(prompts, str | Mapping | Prompt) or _are_ids(prompts):
        return [as_prompt(prompts)]
    if not isinstance(prompts, Sequence):
        raise ValidationError("prompts", f"must be a prompt or a list of prompts, not {type(prompts).__name__}")
    return [as_prompt(p) for p in prompts]


def as_prompt(prompt: Any) -> Prompt:
    """One prompt from any form.

    Raises:
        ValidationError: empty or malformed.
        NotSupportedError: a form of a model kind that is not supported.
    """
    if isinstance(prompt, Prompt):
        return prompt
    if isinstance(prompt, str):
        return Prompt(text=_text(prompt))
    if _are_ids(prompt) or (isinstance(prompt, Sequence) and not prompt):
        return Prompt(ids=token_ids(prompt))
    if not isinstance(prompt, Mapping):
        raise ValidationError("prompt", f"must be text, token ids or a dictionary, not {type(prompt).__name__}")
    for name, value in prompt.items():
        if name in _REFUSED and (any(value) if isinstance(value, list) else value):
            raise NotSupportedError(f"{name}: {_REFUSED[name]} are not supported")
        if name not in _KNOWN | _REFUSED.keys():
            raise ValidationError("prompt", f"unknown key {name!r:.40}; known are {', '.join(sorted(_KNOWN))}")
    salt = prompt.get("cache_salt")
    if prompt.get("prompt_embeds") is not None:
        return Prompt(embeds=prompt["prompt_embeds"], cache_salt=salt)
    if prompt.get("prompt_token_ids") is not None:
        text = prompt.get("prompt")
        return Prompt(_text(text) if text else None, token_ids(prompt["prompt_token_ids"]), cache_salt=salt)
    if prompt.get("prompt") is None:
        raise ValidationError("prompt", 'a dictionary needs "prompt", "prompt_token_ids" or "prompt_embeds"')
    parse = OF_REQUEST.flag("parse_special", prompt.get("parse_special", True))
    return Prompt(text=_text(prompt["prompt"]), cache_salt=salt, parse_special=parse)


def token_ids(ids: Any) -> I32:
    """Checked int32 ids.

    Raises:
        ValidationError: empty, not whole numbers, negative or above int32.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise ValidationError("prompt_token_ids", f"must be a list of whole numbers: {error}") from error
    if array.ndim != 1 or not array.size:
        raise ValidationError("prompt_token_ids", "must be a list of at least one token id")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValidationError("prompt_token_ids", "must be a list of whole numbers from 0 to 2147483647")
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > 0x7FFFFFFF:
        raise ValidationError("prompt_token_ids", f"{low if low < 0 else high} is not a token id")
    return np.ascontiguousarray(array, dtype=np.int32)


def _are_ids(prompt: Any) -> bool:
    if isinstance(prompt, np.ndarray):
        return True
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], int | np.integer)


def _text(text: Any) -> str:
    if not isinstance(text, str):
        raise ValidationError("prompt", f"must be text, not {type(text).__name__}")
    if not text:
        raise ValidationError("prompt", "is empty; give at least one character")
    return text
