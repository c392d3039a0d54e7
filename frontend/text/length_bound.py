"""The least number of tokens that a text can have, without encoding it: refuses a prompt of megabytes at once."""

import re
import unicodedata

import numpy as np
import numpy.typing as npt
import tokenizers

from wavecore.frontend.text.detokenizer import token_bytes

_CHUNK = 1 << 16  # characters
_WHITE = b"\t\n\x0b\x0c\r\x1c\x1d\x1e\x1f "
# Steps before the model that keep the bytes of a text, or add some. Any other may take some away.
_KEEP = {"ByteLevel", "Split", "Digits", "Metaspace", "Prepend", "NFC", "Replace", "Sequence", "Regex", "String"}
_SPACES = '"type":"Replace","pattern":{"String":" "},"content":"\u2581"'


class LengthBound:
    """A token of n bytes counts each of them as 1/n. So a byte of a text counts at least 1 over the longest token that
    holds such a byte, and the sum of that over all bytes is never more than the number of tokens.

    Args:
        backend: each byte of a text must be part of some token (byte-level BPE, or BPE with byte fallback); with any
            other nothing is too long.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        model, before = backend.model, [backend.normalizer, backend.pre_tokenizer]
        steps = b"".join(step.__getstate__() for step in before if step is not None).decode()
        kinds = set(re.findall(r'"type":"(\w+)"', steps))
        self._composes, self._byte_level = "NFC" in kinds, "ByteLevel" in kinds
        certain = (
            isinstance(model, tokenizers.models.BPE)
            and (self._byte_level or bool(model.byte_fallback))
            and not (model.continuing_subword_prefix or model.end_of_word_suffix)
            and kinds <= _KEEP
            and '"behavior":"Removed"' not in steps
            and steps.count('"type":"Replace"') == steps.count(_SPACES)
        )
        self._weights = self._weigh(backend) if certain else np.zeros(256)

    def exceeds(self, text: str, tokens: int) -> bool:
        """Whether a text certainly has more tokens than that. False says nothing."""
        if not self._weights.any() or (self._composes and not unicodedata.is_normalized("NFC", text)):
            return False
        least = 0.0
        for at in range(0, len(text), _CHUNK):
            data = np.frombuffer(text[at : at + _CHUNK].encode("utf-8", "surrogatepass"), np.uint8)
            least += float(np.bincount(data, minlength=256) @ self._weights)
            if least > tokens + 1:  # rounding is far below one token
                return True
        return False

    def _weigh(self, backend: tokenizers.Tokenizer) -> npt.NDArray[np.float64]:
        """Of each byte, 1 over the length in bytes of the longest token that holds it."""
        added, longest = backend.get_added_tokens_decoder(), [1] * 256
        for token in range(backend.get_vocab_size()):
            name = added[token].content if token in added else backend.id_to_token(token) or ""
            if token in added and added[token].normalized and backend.normalizer is not None:
                name = max(name, backend.normalizer.normalize_str(name), key=len)  # what it is found by in a text
            data = token_bytes(name) if self._byte_level and token not in added else name.encode()
            for byte in {*data, *(b" " if "\u2581" in name else b"")}:  # which may stand for a space
                longest[byte] = max(longest[byte], len(data))
        weights = 1.0 / np.array(longest)
        if any(token.lstrip or token.rstrip for token in added.values()):  # these take any white space around them
            weights[list(_WHITE)] = weights[128:] = 0.0
        return weights
