"""How one request is sampled and when it stops. Knows no torch and no text processing.

Every value is bounded here, before it costs anything; the frontend builds the object and the engine rebuilds it from
the wire, so the same bounds hold twice. Bounds that need the model (vocabulary, context length) are checked by
`SamplingParams.check_model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Any, Self

from wavecore.engine_core.api.bounds import biases, entries, flag, real, strings, token_ids, whole
from wavecore.transport.errors import NotSupportedError, ValidationError

MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1 << 14  # of all bad words together, in both spellings
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64
MAX_TOKENS = 1 << 24
SEED_LIMIT = 1 << 63
MAX_ALLOWED = 1 << 20
# Of a request's options, which travel beside these parameters
MAX_PRIORITY = 1 << 20
MAX_SECONDS = 7 * 86400.0
MAX_SALT = 256  # bytes


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
        self._put("n", whole("n", self.n, 1, MAX_N))
        self._put("temperature", real("temperature", self.temperature, 0.0, 100.0))
        self._put("top_k", whole("top_k", self.top_k, -1, (1 << 31) - 1))
        self._put("top_p", real("top_p", self.top_p, 0.0, 1.0))
        if self.top_p == 0.0:
            raise ValidationError("top_p", "must be above 0; for greedy decoding set temperature=0")
        self._put("min_p", real("min_p", self.min_p, 0.0, 1.0))
        if self.seed is not None:
            self._put("seed", whole("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1))
        self._put("presence_penalty", real("presence_penalty", self.presence_penalty, -2.0, 2.0))
        self._put("frequency_penalty", real("frequency_penalty", self.frequency_penalty, -2.0, 2.0))
        self._put("repetition_penalty", real("repetition_penalty", self.repetition_penalty, 0.01, 100.0))
        if self.logit_bias is not None:
            self._put("logit_bias", biases("logit_bias", self.logit_bias, MAX_LOGIT_BIAS))
        self._check_words()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        self._put("stop", strings("stop", () if stop is None else stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH))
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        self._put("stop_token_ids", token_ids("stop_token_ids", ids, MAX_STOP_TOKENS))
        self._put("min_tokens", whole("min_tokens", self.min_tokens, 0, MAX_TOKENS))
        if self.max_tokens is not None:
            self._put("max_tokens", whole("max_tokens", self.max_tokens, 0, MAX_TOKENS))
            if self.min_tokens > self.max_tokens:
                raise ValidationError("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._put(name, whole(name, getattr(self, name), 0, MAX_LOGPROBS))
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "detokenize",
        ):
            flag(name, getattr(self, name))

    def _check_words(self) -> None:
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED)
            if not allowed:
                raise ValidationError("allowed_token_ids", "must not be empty; leave it out to allow all tokens")
            self._put("allowed_token_ids", allowed)
        bad = () if self.bad_words is None else self.bad_words
        self._put("bad_words", strings("bad_words", bad, MAX_BAD_WORDS, MAX_STOP_LENGTH))
        if self.bad_words_token_ids is not None:
            listed = entries("bad_words", self.bad_words_token_ids, 2 * MAX_BAD_WORDS)
            words = tuple([token_ids("bad_words", word, MAX_STOP_LENGTH) for word in listed])
            if (size := sum(map(len, words))) > MAX_BAD_WORD_TOKENS:
                raise ValidationError("bad_words", f"{size} tokens in all are more than {MAX_BAD_WORD_TOKENS}")
            self._put("bad_words_token_ids", words or None)
            banned = {word[0] for word in words if len(word) == 1}
            if self.allowed_token_ids and banned.issuperset(self.allowed_token_ids):
                raise ValidationError("allowed_token_ids", "bad_words forbids every one of them")

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # past the check of all fields that an assignment from outside makes

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def check_model(self, vocab_size: int, eos_token_ids: Sequence[int] = ()) -> None:
        """Check every token id and count of tokens against the model.

        Raises:
            ValidationError: naming the field that holds an id outside [0, vocab_size), asks for more tokens, or leaves
                no token that may come first.
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
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                raise ValidationError(name, f"{getattr(self, name)} is more than the vocabulary of {vocab_size}")
        banned = {word[0] for word in self.bad_words_token_ids or () if len(word) == 1}
        if self.min_tokens:
            banned.update(self.stop_token_ids or (), () if self.ignore_eos else eos_token_ids)
        allowed = self.allowed_token_ids
        if banned.issuperset(allowed) if allowed is not None else len(banned) >= vocab_size:
            name = "bad_words" if allowed is None else "allowed_token_ids"
            raise ValidationError(
                name, "no token is left: bad_words, or min_tokens with its stop tokens, forbid them all"
            )

    def clone(self) -> Self:
        """A copy that may be changed, as in vLLM."""
        return replace(self)

    def to_wire(self) -> dict[str, Any]:
        """The fields that differ from their defaults, as plain msgpack values."""
        return {name: value for name, default in _DEFAULTS if (value := getattr(self, name)) not in (default, ())}

    @classmethod
    def from_wire(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Rebuild from `to_wire`.

        Raises:
            ValidationError: on an unknown field or a value out of bounds.
        """
        for name in values:
            if name not in _NAMES:
                raise ValidationError(str(name)[:64], "is not a sampling parameter")
        try:
            return cls(**values)
        except ValidationError:
            raise
        except (TypeError, ValueError, AttributeError) as error:
            raise ValidationError("sampling_params", f"malformed: {error}") from error


_DEFAULTS = [(f.name, f.default) for f in fields(SamplingParams)]
_NAMES = frozenset(name for name, _ in _DEFAULTS)
_REFUSED = {
    "best_of": "ask for n choices and pick one",
    "use_beam_search": "beam search is not supported",
    "guided_decoding": "structured output is not supported",
    "structured_outputs": "structured output is not supported",
    "logits_processors": "code is never sent to an engine; logit_bias, bad_words and allowed_token_ids may do",
    "output_kind": "give output_kind= to AsyncLLM.generate",
    "truncate_prompt_tokens": "cut the prompt's token ids",
    "extra_args": "there are no plug-ins that could read them",
    "logprob_token_ids": "logprobs= reports the most likely tokens",
    "repetition_detection": "not supported in this version",
}
_generated_init = SamplingParams.__init__


@wraps(_generated_init)
def _init(self: SamplingParams, *args: Any, **values: Any) -> None:
    """The generated constructor, with a word on what vLLM's would have taken."""
    for name in values.keys() - _NAMES:
        if name not in _REFUSED:
            raise ValidationError(name[:64], "is not a sampling parameter")
        if values.pop(name) not in (None, False, 0, [], {}):
            raise NotSupportedError(f"{name}: {_REFUSED[name]}")
    if args:
        raise ValidationError("sampling_params", f"name each value, for instance n={args[0]!r:.40}")
    _generated_init(self, **values)


def _assign(self: SamplingParams, name: str, value: Any) -> None:
    """`params.max_tokens = 100`, as scripts for vLLM do: all fields are checked again."""
    changed = replace(self, **{name: value})
    for field, _ in _DEFAULTS:
        object.__setattr__(self, field, getattr(changed, field))


if not TYPE_CHECKING:  # type checkers see the plain frozen dataclass
    SamplingParams.__init__ = _init
    SamplingParams.__setattr__ = _assign
