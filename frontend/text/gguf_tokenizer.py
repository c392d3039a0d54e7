"""A `tokenizers.Tokenizer` from the metadata of a GGUF file, which `api/gguf_file` reads.

Two kinds: "gpt2" (byte-level BPE with its merges) and "llama" (SentencePiece BPE, merges rebuilt from the scores).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from wavecore.transport.errors import ModelError, NotSupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama3": _LLAMA3, "llama-v3": _LLAMA3, "llama-bpe": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}


def tokenizer_from_gguf(path: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer.

    Raises:
        ModelError: metadata that is missing or does not fit together.
        NotSupportedError: another kind of tokenizer; the way out is `tokenizer=` with a folder.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelError(
            f"{path} has no tokenizer; give tokenizer=FOLDER (--tokenizer FOLDER) or skip_tokenizer_init=True"
        )
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens; download it again")
    if kind == "gpt2":
        tokenizer = _byte_level(path, tokens, metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(path, tokens, types, metadata)
    else:
        raise NotSupportedError(
            f"{path}: tokenizer kind {kind!r}; give the original one with tokenizer=FOLDER (--tokenizer FOLDER)"
        )
    for token, number in zip(tokens, types, strict=True):
        if number == CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif number == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    _add_bos(tokenizer, tokens, metadata, default=kind == "llama")
    return tokenizer


def _byte_level(path: str, tokens: list[str], metadata: Mapping[str, Any]) -> Tokenizer:
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        tokenizer = Tokenizer(models.BPE(vocab, merges))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(
            f"{path}: the tokenizer's merges do not fit its tokens ({error}); download it again"
        ) from error
    tokenizer.pre_tokenizer = _split(path, str(metadata.get("tokenizer.ggml.pre", "default")))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _split(path: str, name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before BPE; llama.cpp's names (https://github.com/ggml-org/llama.cpp, llama-vocab.cpp)."""
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("default", "gpt-2"):
        return plain
    if name in ("smollm", "starcoder", "refact", "command-r"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    if name not in _PATTERNS:
        raise NotSupportedError(
            f"{path}: pre-tokenizer {name!r}; give the original tokenizer with tokenizer=FOLDER (--tokenizer FOLDER)"
        )
    split = pre_tokenizers.Split(Regex(_PATTERNS[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentencepiece(path: str, tokens: list[str], types: list[int], metadata: Mapping[str, Any]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.scores does not fit tokenizer.ggml.tokens; download it again")
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = []
    for token, number in zip(tokens, types, strict=True):
        if number in (CONTROL, BYTE, UNKNOWN):
            continue
        # The piece with the best score merges first; the same piece can come from several pairs.
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [(vocab[token], pair) for pair in pairs if pair[0] in vocab and pair[1] in vocab]
    merges.sort(key=lambda m: (-scores[m[0]], vocab[m[1][0]], vocab[m[1][1]]))
    unknown = next((t for t, number in zip(tokens, types, strict=True) if number == UNKNOWN), None)
    model = models.BPE(vocab, [pair for _, pair in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    space = [normalizers.Prepend("▁")] if metadata.get("tokenizer.ggml.add_space_prefix", True) else []
    tokenizer.normalizer = normalizers.Sequence([*space, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if space else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _add_bos(tokenizer: Tokenizer, tokens: list[str], metadata: Mapping[str, Any], default: bool) -> None:
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if not metadata.get("tokenizer.ggml.add_bos_token", default) or type(bos) is not int or not 0 <= bos < len(tokens):
        return
    single = [f"{tokens[bos]}:0", "$A:0"]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[(tokens[bos], bos)])
