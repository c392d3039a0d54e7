"""The text side of one model: encode, decode, chat template, detokenizers; `tokenizer_files` finds it.

No torch and no transformers in here: a `Tokenizer` wraps `tokenizers.Tokenizer`, whatever it was made from.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from operator import itemgetter
from typing import Any

import tokenizers

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.text.chat_template import ChatTemplate
from wavecore.frontend.text.detokenizer import ByteDetokenizer, ByteTable, Detokenizer, StreamDetokenizer, is_byte_level
from wavecore.frontend.text.fast_encoder import Encode, fast_encoder
from wavecore.frontend.text.length_bound import LengthBound
from wavecore.frontend.text.messages import ChatOptions, Tools, conversation_json
from wavecore.frontend.text.special_text import SpecialText
from wavecore.frontend.text.template_process import TemplateProcesses
from wavecore.frontend.text.tokenizer_calls import TokenizerCalls
from wavecore.transport.errors import NotSupportedError, ValidationError
from wavecore.transport.wire.checks import OF_REQUEST

MAX_DECODE = 1 << 24  # ids in one call
LONG_TEXT = 2000  # characters; encoding more takes milliseconds, and must not hold up this program's other threads
SHORT_TOKEN = 4  # characters; a text of fewer a token is encoded without a look at its least length


@dataclass(frozen=True)
class Tokenizer(TokenizerCalls):
    """Tokenizer and chat template of a model.

    Attributes:
        backend: the `tokenizers.Tokenizer`.
        origin: the file it came from, for errors.
        chat_template: None where the model has none.
        named_tokens: "bos_token", "eos_token", ... to their text, as a template sees them.
    """

    backend: tokenizers.Tokenizer
    origin: str
    chat_template: ChatTemplate | None = None
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    _fast: Encode | None = field(default=None, init=False, repr=False, compare=False)
    _processes: TemplateProcesses = field(default_factory=TemplateProcesses, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.backend.no_truncation()
        self.backend.no_padding()

    def make_fast(self) -> None:
        """Encode faster from here on, where that is possible. Takes a second; in any thread."""
        object.__setattr__(self, "_fast", fast_encoder(self.backend))

    # --- text to ids ---------------------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: put what the tokenizer puts around a text (a leading BOS, say).
            parse_special: let text that spells a special token become that token; False for text of strangers.

        Raises:
            ValidationError: not encodable (lone surrogates).
        """
        if parse_special:
            return self._encode(text, add_special_tokens)
        ids = self._encode_pieces(self._special_text.apart(text))
        before, after = self._around if add_special_tokens else ([], [])
        return [*before, *ids, *after]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: Tools = None,
        **chat_template_kwargs: Any,
    ) -> Any:
        """Prompt of a conversation, as in transformers: token ids, or its text with `tokenize=False`."""
        options = ChatOptions(chat_template, add_generation_prompt, continue_final_message, tools, chat_template_kwargs)
        text, ids = self.render_chat(messages, options)
        return ids if tokenize else text

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions, max_tokens: int | None = None
    ) -> tuple[str, list[int]]:
        """Text and token ids of a conversation; the text of special tokens in contents is plain text in the ids.

        Args:
            max_tokens: refuse what is certainly longer before it is encoded.

        Raises:
            ValidationError: malformed messages, or the template refused them.
            NotSupportedError: the model has no chat template and none is given.
        """
        given = options.chat_template
        if given is not None and "{" in given:  # else it is a name
            template = ChatTemplate(given)
        elif self.chat_template is not None:
            template = self.chat_template.choose(given, options.tools is not None)
        else:
            way_out = "give one as chat_template=, or use generate() with a whole prompt"
            raise NotSupportedError(f"{self.origin} has no chat template; {way_out}")
        own = {
            "documents": None,
            **self.named_tokens,
            "add_generation_prompt": options.add_generation_prompt and not options.continue_final_message,
        }
        variables = {} if options.chat_template_kwargs is None else options.chat_template_kwargs
        given = conversation_json(messages, options.tools, variables)
        conversation = f"[{json.dumps(own)}, {given}, {json.dumps(options.continue_final_message)}]"
        pieces = template.render(self._processes, [*self.special_tokens.values()], conversation)
        text = "".join(pieces)
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        return text, self._encode_pieces(pieces)

    def check_length(self, text: str, max_tokens: int) -> None:
        """Refuse a text that cannot fit, before the time to encode it is spent.

        Raises:
            ValidationError: longer than any `max_tokens` tokens can be.
        """
        if len(text) > max_tokens * SHORT_TOKEN and self._length_bound.exceeds(text, max_tokens):
            reason = f"{len(text)} characters are more than max_model_len {max_tokens} tokens can hold"
            raise ValidationError("prompt", reason)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """The token sequences that spell each word, at the start of a text and after a space."""
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            for spelling in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self._encode(spelling, False))
                if ids:
                    found[ids] = None
        return tuple(found)

    def special_stops(self, params: SamplingParams) -> dict[int, str]:
        """Stop strings that are special tokens, which `skip_special_tokens` keeps out of the text: by the token's id.

        Raises:
            ValidationError: a stop string holds a special token among other text.
        """
        if not params.stop or not params.skip_special_tokens:
            return {}
        ids = {text: index for index, text in self.special_tokens.items()}
        for stop in params.stop:
            if stop not in ids and (inside := [text for text in ids if text in stop]):
                never = f"{stop!r:.80} never comes: skip_special_tokens leaves {inside[0]!r:.80} out of the text"
                raise ValidationError("stop", f"{never}; stop at that alone, or set skip_special_tokens=False")
        return {ids[stop]: stop for stop in params.stop if stop in ids}

    def close(self) -> None:
        """End the processes of its chat templates; a chat starts them again. No lock is taken."""
        self._processes.close()

    # --- ids to text ---------------------------------------------------------------------------------------------

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        """Text of token ids (a list, an array, a tensor, or one id); ids without a token are skipped.

        Raises:
            ValidationError: no token ids.
        """
        given = ids.tolist() if hasattr(ids, "tolist") else ids
        checked = OF_REQUEST.token_ids("ids", [given] if isinstance(given, int) else given, MAX_DECODE)
        return self.backend.decode(list(checked), skip_special_tokens=skip_special_tokens)

    def decode_token(self, token: int) -> str:
        """One token inside a text, special tokens included, as logprobs show it."""
        if self.byte_level:
            entry = self._all_bytes[token]
            return entry if isinstance(entry, str) else entry.decode("utf-8", "replace")
        # At the start of a text many decoders strip a space, which the token has behind others: such as itself.
        alone = self.backend.decode([token], skip_special_tokens=False)
        return self.backend.decode([token, token], skip_special_tokens=False)[len(alone) :]

    def detokenizer(self, params: SamplingParams, prompt: Sequence[int]) -> Detokenizer:
        """A fresh detokenizer for one sequence after `prompt`."""
        if self.byte_level:
            return ByteDetokenizer(self._visible_bytes if params.skip_special_tokens else self._all_bytes)
        bare = not (params.skip_special_tokens or params.spaces_between_special_tokens)
        added = {i: t.content for i, t in self._added.items()} if bare else None
        return StreamDetokenizer(self.backend, params.skip_special_tokens, prompt, added)

    # --- facts ---------------------------------------------------------------------------------------------------

    @cached_property
    def byte_level(self) -> bool:
        return is_byte_level(self.backend)

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        return {i: t.content for i, t in self._added.items() if t.special}

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        return self.backend.get_added_tokens_decoder()

    @cached_property
    def _special_text(self) -> SpecialText:
        return SpecialText(list(self.special_tokens.values()))

    @cached_property
    def _length_bound(self) -> LengthBound:
        return LengthBound(self.backend)

    @cached_property
    def _visible_bytes(self) -> ByteTable:
        return ByteTable(self.backend, frozenset(self.special_tokens))

    @cached_property
    def _all_bytes(self) -> ByteTable:
        return ByteTable(self.backend, frozenset())

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The ids that `add_special_tokens` puts before and after a text."""
        whole = self.backend.encode("a")
        before = list(takewhile(itemgetter(1), zip(whole.ids, whole.special_tokens_mask, strict=True)))
        after = whole.special_tokens_mask[len(before) :].count(1)
        return whole.ids[: len(before)], whole.ids[len(whole.ids) - after :]

    def _encode_pieces(self, pieces: Sequence[str]) -> list[int]:
        """Ids of a text that is cut, so that no token forms across a cut."""
        ids = self._encode(pieces[0], False)
        line_end = self._encode("\n", False) if pieces[1:] else []
        for piece in pieces[1:]:
            # Behind the end of a line, because many tokenizers put a space before what begins a text.
            found = self._encode("\n" + piece, False)
            inside = found[: len(line_end)] == line_end
            ids += found[len(line_end) :] if inside else self._encode(piece, False)
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            if self._fast is not None:
                return self._fast(text, add_special_tokens)
            if len(text) < LONG_TEXT:
                return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
            # Unlike `encode`, the call for several texts lets other threads run meanwhile.
            [encoding] = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            return encoding.ids
        except (UnicodeError, TypeError) as error:
            raise ValidationError("prompt", f"is not valid Unicode text: {error!s:.200}") from error
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # of tokenizers' Rust code; it has no class to import
                raise
            raise ValidationError("prompt", f"the tokenizer ({self.origin}) fails at it: {error!s:.200}") from error
