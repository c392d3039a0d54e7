"""How one request is sampled and when it stops.

Every value is bounded here, before it costs anything; the frontend builds the object and the engine rebuilds it from
the wire, so the same bounds hold twice. Bounds that need the model's vocabulary are checked by
`SamplingParams.check_model`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from functools import partial
from itertools import chain
from typing import Annotated, Any, Self

from wavecore.engine_core.api.fields import Bounds, WireFields, field_checks, make_plain
from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import MAX_TOKEN_ID, OF_REQUEST, shown

MAX_N = 128
MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 128
MAX_BAD_WORDS = 128
MAX_BAD_WORD_TOKENS = 1 << 14  # of all bad words together, in both spellings
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 64  # for which every row of a step has room; more travel apart, see `plan.report_values`
MAX_PROMPT_LOGPROBS_CELLS = 1 << 24  # positions x alternatives of one request's prompt_logprobs
MAX_TOKENS = 1 << 24
COUNTED_OUTPUT = 1024  # tokens in the load; beyond them max_tokens says little, as most choices end long before
SEED = Bounds(-(1 << 63), (1 << 63) - 1)
MAX_ALLOWED = 1 << 20


def _biases(name: str, biases: Any) -> dict[int, float]:
    """Token ids, as numbers or as JSON's texts, to what is added to their logits."""
    if not isinstance(biases, Mapping) or len(biases) > MAX_LOGIT_BIAS:
        raise ValidationError(name, f"must map at most {MAX_LOGIT_BIAS} token ids to numbers")
    found: dict[int, float] = {}
    for token, bias in biases.items():
        try:
            number = int(token) if isinstance(token, str) else token
        except ValueError:
            raise ValidationError(name, f"{shown(token)} is not a token id") from None
        found[OF_REQUEST.whole(name, number, 0, MAX_TOKEN_ID)] = OF_REQUEST.real(name, bias, -100.0, 100.0)
    return found


def _allowed(name: str, ids: Any) -> tuple[int, ...]:
    found = OF_REQUEST.token_ids(name, ids, MAX_ALLOWED)
    if not found:
        raise ValidationError(name, "must not be empty; leave it out to allow all tokens")
    return found


def _bad_word_ids(name: str, words: Any) -> tuple[tuple[int, ...], ...]:
    listed = OF_REQUEST.entries(name, words, 2 * MAX_BAD_WORDS)
    found = tuple([OF_REQUEST.token_ids(name, word, MAX_STOP_LENGTH) for word in listed])
    if (size := sum(map(len, found))) > MAX_BAD_WORD_TOKENS:
        raise ValidationError("bad_words", f"{size} tokens in all are more than {MAX_BAD_WORD_TOKENS}")
    return found


def _stop(name: str, stop: Any) -> tuple[str, ...]:
    return OF_REQUEST.texts(name, [stop] if isinstance(stop, str) else stop, MAX_STOP_STRINGS, MAX_STOP_LENGTH)


_bad_words = partial(OF_REQUEST.texts, limit=MAX_BAD_WORDS, longest=MAX_STOP_LENGTH)
_stop_ids = partial(OF_REQUEST.token_ids, limit=MAX_STOP_TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams(WireFields):
    """Sampling and stopping rules of one request; names and defaults as in vLLM and OpenAI's API.

    Attributes:
        n: number of choices.
        best_of: accepted as in older vLLM where it equals n, and not kept.
        temperature: 0 is greedy.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p (nucleus, arXiv 1904.09751).
        min_p: drop tokens below min_p times the largest probability (arXiv 2407.01082).
        seed: None or -1 draws fresh entropy; the effective seed is reported back.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the output.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen (arXiv 1909.05858).
        logit_bias: added to the logits of these token ids.
        allowed_token_ids: all other tokens are masked.
        bad_words: texts whose last token is masked when it would complete them; the frontend turns them
            into `bad_words_token_ids`.
        stop: strings that end the text; matched in the frontend, over token and chunk borders. With skip_special_tokens
            one that is a special token ends the output at that token, too, which stays out of the text; one that holds
            a special token among other text is refused, because it never comes.
        stop_token_ids: token ids that end the output.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        min_tokens: no stop before this many output tokens.
        max_tokens: None runs to the context length.
        ignore_eos: do not stop at the model's end-of-sequence tokens.
        logprobs, prompt_logprobs: how many alternatives to report, by the raw model distribution; True is 1, and -1 the
            whole vocabulary. The engine's max_logprobs bounds them.
        skip_special_tokens, spaces_between_special_tokens, detokenize: how the frontend renders text.
    """

    n: Annotated[int, Bounds(1, MAX_N)] = 1
    best_of: InitVar[int | None] = None
    temperature: Annotated[float, Bounds(0.0, 100.0)] = 1.0
    top_k: Annotated[int, Bounds(-1, (1 << 31) - 1)] = 0
    top_p: Annotated[float, Bounds(0.0, 1.0)] = 1.0
    min_p: Annotated[float, Bounds(0.0, 1.0)] = 0.0
    seed: Annotated[int | None, SEED] = None
    presence_penalty: Annotated[float, Bounds(-2.0, 2.0)] = 0.0
    frequency_penalty: Annotated[float, Bounds(-2.0, 2.0)] = 0.0
    repetition_penalty: Annotated[float, Bounds(0.01, 100.0)] = 1.0
    logit_bias: Annotated[Mapping[int, float] | None, _biases] = None
    allowed_token_ids: Annotated[Sequence[int] | None, _allowed] = None
    bad_words: Annotated[Sequence[str] | None, _bad_words] = None
    bad_words_token_ids: Annotated[Sequence[Sequence[int]] | None, _bad_word_ids] = None
    stop: Annotated[str | Sequence[str] | None, _stop] = None
    stop_token_ids: Annotated[Sequence[int] | None, _stop_ids] = None
    include_stop_str_in_output: bool = False
    min_tokens: Annotated[int, Bounds(0, MAX_TOKENS)] = 0
    max_tokens: Annotated[int | None, Bounds(0, MAX_TOKENS)] = 16
    ignore_eos: bool = False
    logprobs: Annotated[int | None, Bounds(-1, MAX_TOKEN_ID)] = None
    prompt_logprobs: Annotated[int | None, Bounds(-1, MAX_TOKEN_ID)] = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self, best_of: int | None) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(value := getattr(self, name), bool):
                object.__setattr__(self, name, int(value) or None)
        make_plain(self, _CHECKS)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        if best_of is not None and OF_REQUEST.whole("best_of", best_of, 1, MAX_N) != self.n:
            way_out = "ask for that many as n, with logprobs=0, and keep those of the highest cumulative_logprob"
            raise ValidationError("best_of", f"must be n, {self.n}, not {best_of}; {way_out}")
        if self.top_p == 0.0:
            raise ValidationError("top_p", "must be above 0; for greedy decoding set temperature=0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValidationError("min_tokens", f"{self.min_tokens} is above max_tokens {self.max_tokens}")

    @property
    def counted_output(self) -> int:
        """Tokens that the output of a choice counts for in the load of its engine."""
        return COUNTED_OUTPUT if self.max_tokens is None else min(self.max_tokens, COUNTED_OUTPUT)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def of_model(self, vocab_size: int) -> Self:
        """With the number of alternatives that -1 stands for."""
        whole = {name: vocab_size for name in ("logprobs", "prompt_logprobs") if getattr(self, name) == -1}
        return self.clone(**whole) if whole else self

    def check_model(self, vocab_size: int, eos_token_ids: Sequence[int] = (), max_logprobs: int = -1) -> None:
        """Check every token id and count of tokens against the model and its engine.

        Raises:
            ValidationError: naming the field that holds an id outside [0, vocab_size), asks for more tokens, or leaves
                no token that may come first.
        """
        groups: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "stop_token_ids": self.stop_token_ids or (),
            "bad_words": chain.from_iterable(self.bad_words_token_ids or ()),
        }
        for name, ids in groups.items():
            if (highest := max(ids, default=-1)) >= vocab_size:
                raise ValidationError(name, f"token id {highest} is outside the vocabulary of {vocab_size}")
        for name in ("logprobs", "prompt_logprobs"):
            if (asked := getattr(self, name) or 0) > vocab_size:
                raise ValidationError(name, f"{asked} is more than the vocabulary of {vocab_size}")
            if asked > max_logprobs >= 0:
                raise ValidationError(name, f"{asked} is above max_logprobs {max_logprobs}; start with more, or -1")
        self._check_first_token(vocab_size, eos_token_ids)

    def check_prompt(self, length: int) -> None:
        """Check what is asked of a prompt of so many tokens.

        Raises:
            ValidationError: its log-probabilities would not fit into a message.
        """
        if length * (self.prompt_logprobs or 0) > MAX_PROMPT_LOGPROBS_CELLS:
            raise ValidationError("prompt_logprobs", f"{self.prompt_logprobs} for {length} tokens is too much")

    def _check_first_token(self, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        banned = {word[0] for word in self.bad_words_token_ids or () if len(word) == 1}  # bad words of one token
        if self.min_tokens:
            banned.update(self.stop_token_ids or (), () if self.ignore_eos else eos_token_ids)
        allowed = self.allowed_token_ids
        if banned.issuperset(allowed) if allowed is not None else len(banned) >= vocab_size:
            field = "bad_words" if allowed is None else "allowed_token_ids"
            raise ValidationError(field, "no token is left: bad_words, or min_tokens with its stop tokens, forbid all")

    def seeded(self, seed: int) -> Self:
        """A copy with a seed that is in bounds: unlike `clone` it checks nothing again."""
        copy = object.__new__(type(self))
        for name in _CHECKS:
            object.__setattr__(copy, name, getattr(self, name))
        object.__setattr__(copy, "seed", seed)
        return copy

    def clone(self, **changes: Any) -> Self:
        """A copy with some fields changed and all of them checked again."""
        return replace(self, **changes)


_CHECKS = field_checks(SamplingParams, OF_REQUEST)
