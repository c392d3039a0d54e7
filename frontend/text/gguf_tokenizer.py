"""A `tokenizers.Tokenizer` from the metadata of a GGUF file, which `api/gguf_file` reads.

Two kinds: "gpt2" (byte-level BPE with its merges) and "llama" (SentencePiece BPE, merges rebuilt from the scores).
"""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from wavecore.engine_core.api.gguf_file import LLAMA_CPP
from wavecore.transport.errors import ModelError, NotSupportedError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = (UNKNOWN, CONTROL)
WAY_OUT = "give tokenizer=FOLDER (--tokenizer FOLDER)"
# Tokens by their names in templates, and in the metadata, which misspells one
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "sep": "seperator", "pad": "padding", "mask": "mask"}

_PATTERNS = {name: cuts for names, cuts in LLAMA_CPP["pre_tokenizers"].items() for name in names.split()}
_WHOLE_WORDS = LLAMA_CPP["whole_words"]


def tokenizer_from_gguf(path: str, metadata: Mapping[str, Any]) -> Tokenizer:
    """Build the tokenizer.

    Raises:
        ModelError: metadata that is missing or does not fit together.
        NotSupportedError: another kind of tokenizer; the way out is `tokenizer=` with a folder.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(t, str) for t in tokens):
        raise ModelError(f"{path} has no tokenizer; {WAY_OUT} or skip_tokenizer_init=True")
    types = metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError(f"{path}: tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens; download it again")
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    if kind == "gpt2":
        tokenizer = _byte_level(path, tokens, pre, metadata)
    elif kind == "llama":
        tokenizer = _sentencepiece(path, tokens, types, metadata)
    else:
        raise NotSupportedError(f"{path}: tokenizer kind {kind!r}; {WAY_OUT}")
    kinds = list(zip(tokens, types, strict=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, n in kinds if n in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, n in kinds if n == USER_DEFINED])
    _put_around(tokenizer, metadata, bos=kind == "llama" or pre in _WHOLE_WORDS)
    return tokenizer


def _byte_level(path: str, tokens: list[str], pre: str, metadata: Mapping[str, Any]) -> Tokenizer:
    if pre not in _PATTERNS:
        raise NotSupportedError(f"{path}: pre-tokenizer {pre!r}; {WAY_OUT}")
    vocab = {token: i for i, token in enumerate(tokens)}
    try:
        merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges", ())]
        tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre in _WHOLE_WORDS))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path}: the merges do not fit the tokens ({error}); download it again") from error
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in _PATTERNS[pre]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


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
    to_text = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*to_text, *strip])
    return tokenizer


def named_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Such as "bos_token", "eos_token", ... to their texts; an id that is none names nothing."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in NAMES.items()}
    return {f"{name}_token": tokens[i] for name, i in ids.items() if type(i) is int and 0 <= i < len(tokens)}


def _put_around(tokenizer: Tokenizer, metadata: Mapping[str, Any], bos: bool) -> None:
    """BOS before and EOS behind a text, where the metadata asks for them or, for BOS, is silent and `bos` is set."""
    named = named_tokens(metadata)

    def asked(name: str, default: bool) -> list[str]:
        token = named.get(f"{name}_token") if metadata.get(f"tokenizer.ggml.add_{name}_token", default) else None
        return [] if token is None else [token]

    before, behind = asked("bos", bos), asked("eos", False)
    special = [(token, tokenizer.token_to_id(token)) for token in (*before, *behind)]
    tokenizer.post_processor = processors.TemplateProcessing([*before, "$A", *behind], special_tokens=special)
