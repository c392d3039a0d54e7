"""What programs call of a tokenizer under transformers' names: batches, tensors, tokens and their ids."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import tokenizers

from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import OF_REQUEST


class Encoded(dict[str, Any]):
    """What calling a tokenizer gives: "input_ids" and "attention_mask", also as attributes."""

    input_ids = property(lambda self: self["input_ids"])
    attention_mask = property(lambda self: self["attention_mask"])


def _token(name: str) -> Any:
    return property(lambda self: self.named_tokens.get(name))


def _token_id(name: str) -> Any:
    return property(lambda self: self.backend.token_to_id(self.named_tokens.get(name, "")))


class TokenizerCalls:
    """Of a tokenizer that has `backend` and `named_tokens`, encodes and decodes."""

    backend: tokenizers.Tokenizer
    named_tokens: Mapping[str, str]
    encode: Any
    decode: Any

    bos_token, bos_token_id = _token("bos_token"), _token_id("bos_token")
    eos_token, eos_token_id = _token("eos_token"), _token_id("eos_token")
    pad_token, pad_token_id = _token("pad_token"), _token_id("pad_token")
    unk_token, unk_token_id = _token("unk_token"), _token_id("unk_token")
    name_or_path = property(lambda self: self.origin)

    def __call__(
        self, text: str | Sequence[str], add_special_tokens: bool = True, return_tensors: str | None = None
    ) -> Encoded:
        """`tokenizer(text)["input_ids"]` and `.input_ids`.

        Args:
            return_tensors: "pt" or "np" gives int64 [texts, tokens] of torch or numpy; None gives lists.

        Raises:
            ValidationError: texts of several lengths in one tensor.
        """
        rows = [self.encode(one, add_special_tokens) for one in ([text] if isinstance(text, str) else text)]
        found = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
        if return_tensors is None:
            return Encoded({name: values[0] if isinstance(text, str) else values for name, values in found.items()})
        OF_REQUEST.one_of("return_tensors", return_tensors, ("pt", "np"))
        if len({len(row) for row in rows}) > 1:
            raise ValidationError("return_tensors", "needs texts of one length; give them one by one")
        kind = import_module("torch").from_numpy if return_tensors == "pt" else np.asarray
        return Encoded({name: kind(np.array(values, np.int64)) for name, values in found.items()})

    def batch_decode(self, sequences: Any, skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """One id or a list of ids; the unk_token's, or None, for what is no token."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self.backend.token_to_id(tokens)
        return self.unk_token_id if found is None else found

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """One token or a list of tokens as they stand in the vocabulary; None for an id without one."""
        return self.backend.id_to_token(ids) if isinstance(ids, int) else [self.backend.id_to_token(i) for i in ids]

    def get_vocab(self) -> dict[str, int]:
        return self.backend.get_vocab(with_added_tokens=True)

    @property
    def vocab_size(self) -> int:
        """Added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self.vocab_size
