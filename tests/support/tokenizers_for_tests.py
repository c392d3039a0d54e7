"""Small tokenizers, made in memory: byte-level BPE as Qwen's and Llama 3's, SentencePiece-like as Llama 2's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS = 0
CORPUS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "한국어 텍스트도 있습니다. 你好，世界！ Grüße aus Köln. Ein schöner Tag.",
    "def function(argument): return argument + 1  # comment",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, é combining",
    "aaa bbb ccc abc abcabc DEFGHIJ ZZZ stop STOP",
] * 3
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    return tokenizer


@cache
def sentencepiece() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    merges: list[tuple[str, str]] = []
    for character in sorted({c for text in CORPUS[2:3] + CORPUS[:1] for c in text.replace(" ", "▁")} | {"▁", "é"}):
        vocab.setdefault(character, len(vocab))
    for pair in (("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "s"), ("a", "n"), ("an", "d"), ("▁", "i"), ("▁", "P")):
        merges.append(pair)
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer | None = None, template: str | None = TEMPLATE) -> Path:
    """A tokenizer folder in Hugging Face form."""
    folder.mkdir(parents=True, exist_ok=True)
    (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<|im_end|>",
        "bos_token": {"__type": "AddedToken", "content": "<|endoftext|>"},
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
