"""What programs call of a tokenizer under transformers' names: batches, tensors, tokens and their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import numpy as np
import tokenizers

from wavecore.transport.errors import ValidationError
from wavecore.transport.wire.checks import OF_REQUEST


class Encoded(dict[str, Any]):
    """What calling a tokenizer gives: "input_ids" and "attention_mask", also as attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class TokenizerCalls:
    """Of a tokenizer that has `backend`, `origin` and `named_tokens`, encodes and decodes."""

    backend: tokenizers.Tokenizer
    origin: str
    named_tokens: Mapping[str, str]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        raise NotImplementedError

    def __call__(
        self,
        text: str | Sequence[str],
        add_special_tokens: bool = True,
        padding: bool = False,
        return_tensors: Literal["pt", "np"] | None = None,
        return_attention_mask: bool = True,
    ) -> Encoded:
        """`tokenizer(text)["input_ids"]` and `.input_ids`.

        Args:
            padding: with pad_token_id, or without one eos_token_id, behind all but the longest text.
            return_tensors: int64 [texts, tokens] of torch or numpy; None gives lists.
        """
        rows = [self.encode(one, add_special_tokens) for one in ([text] if isinstance(text, str) else text)]
        masks = [[1] * len(row) for row in rows]
        if padding:
            fill = self.eos_token_id if self.pad_token_id is None else self.pad_token_id
            if fill is None:
                raise ValidationError("padding", f"{self.origin} has neither a pad_token nor an eos_token")
            missing = [max(map(len, rows), default=0) - len(row) for row in rows]
            rows = [row + [fill] * count for row, count in zip(rows, missing, strict=True)]
            masks = [mask + [0] * count for mask, count in zip(masks, missing, strict=True)]
        found: dict[str, Any] = {"input_ids": rows}
        if return_attention_mask:
            found["attention_mask"] = masks
        if return_tensors is not None:
            OF_REQUEST.one_of("return_tensors", return_tensors, ("pt", "np"))
            return Encoded({name: _tensor(values, return_tensors) for name, values in found.items()})
        return Encoded({name: values[0] if isinstance(text, str) else values for name, values in found.items()})

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

    def __len__(self) -> int:
        return self.vocab_size

    @property
    def vocab_size(self) -> int:
        """Added tokens included."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    @property
    def name_or_path(self) -> str:
        return self.origin

    @property
    def eos_token(self) -> str | None:
        return self.named_tokens.get("eos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def bos_token(self) -> str | None:
        return self.named_tokens.get("bos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def pad_token(self) -> str | None:
        return self.named_tokens.get("pad_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def unk_token(self) -> str | None:
        return self.named_tokens.get("unk_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._named_id("unk_token")

    def _named_id(self, name: str) -> int | None:
        token = self.named_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


def _tensor(rows: Sequence[Sequence[int]], kind: str) -> Any:
    """Raises:
    ValidationError: rows of several lengths.
    """
    if len({len(row) for row in rows}) > 1:
        raise ValidationError("return_tensors", "texts of several lengths need padding=True")
    array = np.array(rows, np.int64)
    return array if kind == "np" else import_module("torch").from_numpy(array)
