"""Loading tokenizers: folders, single files, GGUF metadata; nothing of them is run as code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizers_for_tests import SPECIAL, byte_level, sentencepiece, write_folder

from wavecore.frontend.text.gguf_tokenizer import tokenizer_from_gguf
from wavecore.frontend.text.tokenizer_files import generation_defaults, load_tokenizer
from wavecore.transport.errors import ModelError, NotSupportedError

TEXTS = [
    "The capital of France is Paris.",
    "한국어 123 你好",
    "<|im_start|>user\nhi<|im_end|>",
    "  x\n\n\ty's 👩‍👩‍👧 1234",
]


def test_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert tokenizer.encode("The capital") == byte_level().encode("The capital").ids
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 0)
    assert tokenizer.chat_template is not None
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("a") == tokenizer.encode("a")


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    write_folder(tmp_path, template=None)
    assert load_tokenizer(tmp_path).chat_template is None
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.source == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    template = load_tokenizer(tmp_path).chat_template
    assert template is not None
    assert template.source == "file"


def test_truncation_of_a_tokenizer_json_is_off(tmp_path: Path) -> None:
    tokenizer = type(byte_level()).from_str(byte_level().to_str())
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=8)
    assert len(load_tokenizer(write_folder(tmp_path, tokenizer)).encode("The capital of France")) > 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": "1.0"}'])
def test_broken_tokenizer_json_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer; give tokenizer=FOLDER .--tokenizer FOLDER"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": "evil.Evil"}}')
    (tmp_path / "evil.py").write_text("raise SystemExit('run')")
    with pytest.raises(ModelError, match="auto_map"):
        load_tokenizer(tmp_path)


def test_generation_defaults(tmp_path: Path) -> None:
    assert generation_defaults(tmp_path) == {}
    values = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1, 2], "max_new_tokens": 7, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert generation_defaults(tmp_path) == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 7}


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    parts = json.loads(byte_level().to_str())["model"]
    vocab = byte_level().get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda t: vocab[t])
    types = [3 if t in SPECIAL else 4 if t == "<think>" else 1 for t in tokens]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [" ".join(m) for m in parts["merges"]],
        **changes,
    }


@pytest.mark.parametrize("text", TEXTS)
def test_gguf_byte_level(text: str) -> None:
    tokenizer = tokenizer_from_gguf("x.gguf", byte_level_metadata())
    ids = tokenizer.encode(text).ids
    assert ids == byte_level().encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "default"])
def test_gguf_pre_tokenizers_keep_the_text(pre: str) -> None:
    tokenizer = tokenizer_from_gguf("x.gguf", byte_level_metadata(**{"tokenizer.ggml.pre": pre}))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_gguf_bos() -> None:
    metadata = byte_level_metadata(**{"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 1})
    assert tokenizer_from_gguf("x.gguf", metadata).encode("a").ids[0] == 1


def test_gguf_sentencepiece() -> None:
    original = sentencepiece()
    vocab = original.get_vocab()
    tokens = sorted(vocab, key=lambda t: vocab[t])
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            2 if t == "<unk>" else 3 if t in ("<s>", "</s>") else 6 if t.startswith("<0x") else 1 for t in tokens
        ],
        "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = tokenizer_from_gguf("x.gguf", metadata)
    for text in ("the capital is Paris", "an 你好 and é"):
        assert tokenizer.encode(text).ids == original.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tokenizer.ggml.tokens": None}, ModelError),
        ({"tokenizer.ggml.token_type": [1]}, ModelError),
        ({"tokenizer.ggml.merges": ["nothing here"]}, ModelError),
        ({"tokenizer.ggml.model": "bert"}, NotSupportedError),
        ({"tokenizer.ggml.pre": "strange"}, NotSupportedError),
        ({"tokenizer.ggml.model": "llama"}, ModelError),
    ],
)
def test_gguf_that_does_not_fit_together(changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"x\.gguf"):
        tokenizer_from_gguf("x.gguf", byte_level_metadata(**changes))


def test_older_forms_go_through_transformers(tmp_path: Path) -> None:
    """vocab.json + merges.txt; in a child, because transformers loads torch."""
    parts = json.loads(byte_level().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(parts["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in parts["merges"]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    code = (
        "import sys; from wavecore.frontend.text.tokenizer_files import load_tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        "print(load_tokenizer(sys.argv[1]).encode('The capital of France'))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == str(byte_level().encode("The capital of France").ids), run.stderr
