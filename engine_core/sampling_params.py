"""How one request is sampled and when it stops. Knows no torch and no text processing.

Every value is bounded here, before it costs anything; the frontend builds the object and the engine rebuilds it from
the wire, so the same bounds hold twice. Bounds that need the model (vocabulary, context length) are checked by
`SamplingParams.check_model`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from wavecore.transport.errors import ValidationError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64
MAX_TOKENS = 1 << 24
SEED_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping rules of one request; names and defaults as in vLLM and OpenAI's API.

    Attributes:
        n: number of choices.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p (nucleus, arXiv 1904.09751).
        min_p: drop tokens below min_p times the largest probability (arXiv 2407.01082).
        seed: None draws fresh entropy; the effective seed is reported back.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen (arXiv 1909.05858).
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: all other tokens are masked.
        bad_words: texts whose last token is masked when it would complete them; the frontend turns them
            into `bad_words_token_ids`.
        stop: strings that end the text; matched in the frontend, over token and chunk borders.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        min_tokens: no stop before this many output tokens.
        max_tokens: None runs to the context length.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        logprobs, prompt_logprobs: how many alternatives to report, by the raw model distribution.
        skip_special_tokens, spaces_between_special_tokens, detokenize: how the frontend renders text.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        put = object.__setattr__  # normalising a frozen value once, at birth
        _whole("n", self.n, 1, MAX_N)
        _real("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, -1, (1 << 31) - 1)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise ValidationError("top_p", "must be above 0; for greedy decoding set temperature=0")
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.logit_bias is not None:
            put(self, "logit_bias", _bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            ids = _token_ids("allowed_token_ids", self.allowed_token_ids, 1 << 20)
            if not ids:
                raise ValidationError("allowed_token_ids", "must not be empty; leave it out to allow all tokens")
            put(self, "allowed_token_ids", ids)
        put(self, "bad_words", _strings("bad_words", self.bad_words, MAX_BAD_WORDS))
        if self.bad_words_token_ids is not None:
            if len(self.bad_words_token_ids) > 2 * MAX_BAD_WORDS:
                raise ValidationError("bad_words", f"at most {MAX_BAD_WORDS} entries")
            words = tuple(_token_ids("bad_words", w, MAX_STOP_LENGTH) for w in self.bad_words_token_ids)
            put(self, "bad_words_token_ids", words)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        put(self, "stop", _strings("stop", stop, MAX_STOP_STRINGS))
        put(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids or (), MAX_STOP_TOKENS))
        _whole("min_tokens", self.min_tokens, 0, MAX_TOKENS)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, MAX_TOKENS)
            if self.min_tokens > self.max_tokens:
                raise ValidationError("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            if not isinstance(getattr(self, name), bool):
                raise ValidationError(name, f"must be true or false, not {getattr(self, name)!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_model(self, vocab_size: int) -> None:
        """Check every token id against the model.

        Raises:
            ValidationError: naming the field that holds an id outside [0, vocab_size).
        """
        groups: dict[str, Sequence[int]] = {
            "logit_bias": tuple(self.logit_bias or ()),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids or (),
            "bad_words": [i for word in self.bad_words_token_ids or () for i in word],
        }
        for name, ids in groups.items():
            if ids and max(ids) >= vocab_size:
                raise ValidationError(name, f"token id {max(ids)} is outside the vocabulary of {vocab_size}")

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain msgpack values."""
        values = asdict(self)
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Rebuild from `to_wire`.

        Raises:
            ValidationError: on an unknown field or a value out of bounds.
        """
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise ValidationError(str(name)[:64], "is not a sampling parameter")
        try:
            return cls(**values)
        except ValidationError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ValidationError("sampling_params", f"malformed: {error}") from error


def _whole(name: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValidationError(name, f"must be a whole number from {low} to {high}, not {value!r:.80}")


def _real(name: str, value: Any, low: float, high: float) -> None:
    good = type(value) in (int, float) and math.isfinite(value) and low <= value <= high
    if not good:
        raise ValidationError(name, f"must be a number from {low} to {high}, not {value!r:.80}")


def _token_ids(name: str, ids: Sequence[int], limit: int) -> tuple[int, ...]:
    if isinstance(ids, str | bytes) or len(ids) > limit:
        raise ValidationError(name, f"must be a list of at most {limit} token ids")
    for i in ids:
        _whole(name, i, 0, (1 << 31) - 1)
    return tuple(ids)


def _strings(name: str, values: Sequence[str] | None, limit: int) -> tuple[str, ...]:
    values = tuple(values or ())
    if len(values) > limit:
        raise ValidationError(name, f"at most {limit} entries, not {len(values)}")
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_LENGTH:
            raise ValidationError(name, f"each entry must be a string of 1 to {MAX_STOP_LENGTH} characters")
    return values


def _bias(bias: Mapping[int, float]) -> dict[int, float]:
    if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
        raise ValidationError("logit_bias", f"must map at most {MAX_LOGIT_BIAS} token ids to numbers")
    out: dict[int, float] = {}
    for token, value in bias.items():
        try:
            number = int(token) if isinstance(token, str) else token
        except ValueError:
            raise ValidationError("logit_bias", f"{token!r:.40} is not a token id") from None
        _whole("logit_bias", number, 0, (1 << 31) - 1)
        _real("logit_bias", value, -100.0, 100.0)
        out[number] = float(value)
    return out
