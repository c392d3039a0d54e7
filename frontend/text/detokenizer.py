"""Token ids to text, a few at a time: what is emitted is never taken back, and all of it together is `decode(all ids)`.

Byte-level BPE (Llama 3, Qwen, SmolLM, GPT-2) goes through a table of bytes; every other tokenizer through
`tokenizers.DecodeStream`. Bytes of a character that is not complete yet are held back, so U+FFFD appears only for text
that never completes. What ends a text is left to `stop_strings`.
"""

import codecs
import json
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

CONTEXT = 6  # tokens of context that decide how the next one is rendered (spaces, byte fallback)


class ByteTable(dict[int, str | bytes]):
    """Token id -> its text where the token is whole UTF-8, else its bytes. Filled on first use of each id.

    An id without a token (padding rows of an LM head) is empty text, as in `tokenizers`.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip = skip

    def __missing__(self, token: int) -> str | bytes:
        name = None if token in self._skip else self._tokenizer.id_to_token(token)
        data = b"" if name is None else token_bytes(name)
        try:
            entry: str | bytes = data.decode("utf-8")
        except UnicodeDecodeError:
            entry = data
        self[token] = entry
        return entry


class ByteDetokenizer:
    """Incremental UTF-8 over a `ByteTable`."""

    __slots__ = ("_pending", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._pending = b""

    def feed(self, ids: Sequence[int]) -> str:
        table = self._table
        if len(ids) == 1 and not self._pending:  # nearly every call of a stream
            entry = table[ids[0]]
            if type(entry) is str:
                return entry
        entries = [table[i] for i in ids]
        data = self._pending + b"".join([e.encode() if isinstance(e, str) else e for e in entries])
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class StreamDetokenizer:
    """`tokenizers.DecodeStream`, started on the end of the prompt so that the first token keeps its leading space.

    Args:
        added: id -> text of added tokens that are written without the spaces a decoder puts between them, or empty
            (`spaces_between_special_tokens=False`).
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special: bool, prompt: Sequence[int], added: dict[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special
        self._added = added or {}
        self._last_added = False
        self._context = list(prompt[-CONTEXT:])
        if self._decode(self._context).endswith("\ufffd"):  # a prompt that ends inside a character is no context
            self._context = []
        self._pending: list[int] = []
        self._stream = DecodeStream(ids=self._context, skip_special_tokens=skip_special)

    def feed(self, ids: Sequence[int]) -> str:
        return "".join([self._step(token) for token in ids])

    def flush(self) -> str:
        base, whole = self._decode(self._context), self._decode(self._context + self._pending)
        # Bytes that are no character turn those before them in a run into U+FFFD, too: these were sent as they were.
        text = whole[len(base) :] if whole.startswith(base) else self._decode(self._pending)
        self._context, self._pending = [], []
        return text

    def _step(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:  # tokenizers raises bare Exception when a decoder rewrites text that it gave before
            text = self._decode(self._pending)
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=self._skip)
        if text is None:
            return ""
        self._context, self._pending = self._pending[-CONTEXT:], []
        if self._added:
            bare = self._added.get(token)
            if bare is not None and self._last_added:
                text = bare
            self._last_added = bare is not None
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip) if ids else ""


Detokenizer = ByteDetokenizer | StreamDetokenizer
"""The text of one sequence: `feed` gives what some ids complete, perhaps nothing, and `flush` the held-back rest."""


def token_bytes(name: str) -> bytes:
    """The bytes that a byte-level token stands for; a token with a character outside the alphabet is plain text."""
    try:
        return bytes([_BYTE_OF[c] for c in name])
    except KeyError:
        return name.encode("utf-8", "replace")


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether decoding is joining the bytes of tokens and nothing else."""
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder is not None else None
    while decoder is not None and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes (https://github.com/openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
