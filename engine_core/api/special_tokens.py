"""The special and added tokens of a folder in Hugging Face form: what all of its files say, taken together.

Up to four files say it, and none needs to repeat the others. Which goes first where they differ is as in transformers
(`_from_pretrained` in tokenization_utils_base.py).
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from wavecore.engine_core.api.model_files import read_json
from wavecore.transport.errors import ModelError

FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")

T = TypeVar("T")
Token = dict[str, Any]
"""What `tokenizers.AddedToken` takes: the token's text as "content", and flags."""


class SpecialTokens(NamedTuple):
    """What files say of special tokens, beside the list in tokenizer.json.

    Attributes:
        named: "eos_token", "pad_token", ... to the token.
        extra: special tokens without a name.
        added: tokens by their ids.
    """

    named: dict[str, Token]
    extra: list[Token]
    added: dict[int, Token]


def read_special_tokens(folder: Path) -> SpecialTokens:
    """Read tokenizer_config.json, special_tokens_map.json and added_tokens.json, as far as they are there.

    Raises:
        ModelError: naming the file that is broken.
    """
    config = _parsed(folder / "tokenizer_config.json", _special)
    of_map = _parsed(folder / "special_tokens_map.json", _special)
    # The map goes first only beside the older form of tokenizer_config.json, which lists no added tokens.
    first, second = (config, of_map) if config.added else (of_map, config)
    named, extra = {**second.named, **first.named}, config.extra + of_map.extra
    special = {token["content"] for token in (*named.values(), *extra)}

    def with_ids(values: dict[str, Any]) -> dict[int, Token]:
        return {int(index): _token(text, special=text in special) for text, index in values.items()}

    return SpecialTokens(named, extra, _parsed(folder / "added_tokens.json", with_ids) | config.added)


def eos_token_id(folder: Path) -> int | None:
    """The id of the token that the files of a tokenizer name as its end of sequence, where they do.

    Raises:
        ModelError: naming the file that is broken.
    """
    known = read_special_tokens(folder)
    text = known.named.get("eos_token", {}).get("content")

    def find(values: dict[str, Any]) -> int | None:
        vocab = values.get("model", {}).get("vocab")
        pieces = [piece[0] for piece in vocab] if isinstance(vocab, list) else []  # of a Unigram: [text, score]
        ids = dict(vocab) if isinstance(vocab, dict) else {text: i for i, text in enumerate(pieces)}
        added = {token["content"]: token["id"] for token in values.get("added_tokens", ())}
        added |= {token["content"]: index for index, token in known.added.items()}
        free = max([len(ids), *(index + 1 for index in added.values())])
        ids |= added
        # What no file gives an id gets the next free ones when a tokenizer is made of them.
        named = dict.fromkeys(token["content"] for token in (*known.named.values(), *known.extra) if values)
        ids |= {content: free + i for i, content in enumerate([c for c in named if c not in ids])}
        return int(ids[text]) if text in ids else None

    return _parsed(folder / "tokenizer.json", find)


def _parsed(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """What a file holds that may be missing.

    Raises:
        ModelError: naming the file whose tokens `parse` stumbles over.
    """
    values = read_json(path)
    try:
        return parse(values)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{path}: its tokens are not in the form that they should have: {error!r:.200}") from error


def _special(values: dict[str, Any]) -> SpecialTokens:
    named = {name: value for name, value in values.items() if name.endswith("_token") and isinstance(value, str | dict)}
    extra, more = [*(values.get("additional_special_tokens") or [])], values.get("extra_special_tokens") or []
    if isinstance(more, dict):
        named |= more
    else:
        extra += more
    added = {int(index): _token(token) for index, token in (values.get("added_tokens_decoder") or {}).items()}
    tokens = {name: _token(token, special=True) for name, token in named.items() if token}
    return SpecialTokens(tokens, [_token(token, special=True) for token in extra], added)


def _token(value: Any, **flags: bool) -> Token:
    token = {"content": value} if isinstance(value, str) else value
    if not isinstance(token["content"], str):
        raise TypeError(f"{value!r:.80} is no token")
    token["content"].encode()  # a lone surrogate is no text
    return {"content": token["content"], **{flag: bool(token[flag]) for flag in FLAGS if flag in token}, **flags}
