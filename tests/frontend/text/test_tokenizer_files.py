"""Loading tokenizers: folders, single files, GGUF metadata; nothing of them is run as code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.tokenizers_for_tests import SPECIAL, byte_level, sentencepiece, write_folder

from wavecore.frontend.text import tokenizer_files
from wavecore.frontend.text.gguf_tokenizer import named_tokens, tokenizer_from_gguf
from wavecore.frontend.text.tokenizer_files import generation_defaults, load_tokenizer
from wavecore.transport.errors import ModelError, NotSupportedError

TEXTS = [
    "The capital of France is Paris.",
    "한국어 123 你好",
    "<|im_start|>user\nhi<|im_end|>",
    "  x\n\n\ty's 👩‍👩‍👧 1234",
]


@pytest.mark.parametrize("name", ["x" * 400, "~nobody of this name/model"])
def test_a_name_that_no_path_can_have(name: str) -> None:
    with pytest.raises(ModelError, match="cannot be a path"):
        load_tokenizer(name)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "model.gguf"])
def test_what_is_no_regular_file_is_refused_and_never_waited_for(tmp_path: Path, name: str) -> None:
    folder = write_folder(tmp_path / "tokenizer")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for path in (folder / name if name == "model.gguf" else folder, Path("/dev/zero")):
        with pytest.raises(ModelError, match=r"cannot be read: .*not a regular file"):
            load_tokenizer(path)


def test_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path))
    assert tokenizer.encode("The capital") == byte_level().encode("The capital").ids
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id) == (2, 0)
    assert tokenizer.chat_template is not None
    assert load_tokenizer(tmp_path / "tokenizer.json").encode("a") == tokenizer.encode("a")


def templates(folder: Path) -> dict[str, str]:
    template = load_tokenizer(folder).chat_template
    return {} if template is None else {"default": template.source, **template.named}


def test_template_file_and_named_templates(tmp_path: Path) -> None:
    write_folder(tmp_path, template=None)
    assert templates(tmp_path) == {}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert templates(tmp_path) == {"default": "json"}
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert templates(tmp_path) == {"default": "d", "tool_use": "t"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("r")
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("file t")
    assert templates(tmp_path) == {"default": "d", "tool_use": "file t", "rag": "r"}
    (tmp_path / "chat_template.jinja").write_text("file")
    assert templates(tmp_path) == {"default": "file", "tool_use": "file t", "rag": "r"}
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "rag"}, {}, 5]}))
    assert templates(tmp_path) == {"default": "", "tool_use": "file t", "rag": "r"}


def test_templates_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>")
    theirs.chat_template = {"default": "{{ 1 }}{{ eos_token }}", "tool_use": "{{ tools | length }}"}
    theirs.save_pretrained(tmp_path)
    ours = load_tokenizer(tmp_path)
    ask = [{"role": "user", "content": "a"}]
    for options in ({}, {"tools": [{"a": 1}]}, {"chat_template": "tool_use", "tools": [{}, {}]}):
        expected = theirs.apply_chat_template(ask, tokenize=False, **options)
        assert ours.apply_chat_template(ask, tokenize=False, **options) == expected


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/rag.jinja"])
def test_a_template_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    file = write_folder(tmp_path) / name
    file.parent.mkdir(exist_ok=True)
    file.write_bytes("{{ 'Gr\u00fc\u00dfe' }}".encode("latin-1"))
    with pytest.raises(ModelError, match=f"{name} cannot be read: 'utf-8' codec"):
        load_tokenizer(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ModelError, match=f"{name} cannot be read: .*directory"):
        load_tokenizer(tmp_path)


def test_templates_of_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = byte_level_metadata(
        **{
            "tokenizer.chat_template": "d",
            "tokenizer.chat_template.tool_use": "t",
            "tokenizer.chat_templates": ["tool_use"],
        }
    )
    monkeypatch.setattr(tokenizer_files, "read_gguf", lambda path: SimpleNamespace(metadata=metadata))
    (tmp_path / "x.gguf").touch()
    assert templates(tmp_path / "x.gguf") == {"default": "d", "tool_use": "t"}


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


def test_a_tokenizer_model_alone_names_the_packages_that_read_it(tmp_path: Path) -> None:
    """In a child, because transformers loads torch."""
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    code = (
        "import sys; sys.modules['sentencepiece'] = None\n"
        "from wavecore.frontend.text.tokenizer_files import load_tokenizer\n"
        "load_tokenizer(sys.argv[1])"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "ModelError" in run.stderr
    assert "no tokenizer.json" in run.stderr
    assert "pip install sentencepiece protobuf" in run.stderr


def test_a_pointer_of_git_lfs_is_named(tmp_path: Path) -> None:
    for name in ("tokenizer_config.json", "tokenizer.json"):
        write_folder(tmp_path)
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 17\n")
        with pytest.raises(ModelError, match=rf"{name} cannot be read: it is a Git LFS pointer.*git lfs pull"):
            load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 100_000])
def test_broken_json_names_the_file(tmp_path: Path, content: str) -> None:
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        (write_folder(tmp_path / name) / name).write_text(content)
        with pytest.raises(ModelError, match=name):
            load_tokenizer(tmp_path / name)


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


def pieces(pre: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts a text."""
    tokenizer = tokenizer_from_gguf("x.gguf", byte_level_metadata(**{"tokenizer.ggml.pre": pre}))
    assert tokenizer.pre_tokenizer is not None
    return [text[a:b] for _, (a, b) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


CUTS = {
    "default": ["It", "'", "s", " ", "123", "4", " 你好", "  ", "$", "5", "\n"],
    "gpt-2": ["It", "'s", " 1234", " 你好", " ", " $", "5", "\n"],
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", " 你好", " ", " $", "5", "\n"],
    "llama-bpe": ["It", "'s", " ", "123", "4", " 你好", " ", " $", "5", "\n"],
    "smaug-bpe": ["It", "'s", " ", "123", "4", " 你好", " ", " $", "5", "\n"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", " 你好", " ", " $", "5", "\n"],
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", " 你好", " ", " $", "5", "\n"],
    "deepseek-coder": ["It", "'", "s", " ", "1", "2", "3", "4", " ", "你好", "  $", "5", "\n"],
}


@pytest.mark.parametrize("pre", CUTS)
def test_gguf_pre_tokenizers_cut_as_in_llama_cpp(pre: str) -> None:
    assert pieces(pre, "It's 1234 你好  $5\n") == CUTS[pre]


def test_gguf_tekken_cuts_where_the_case_changes() -> None:
    assert pieces("tekken", "camelCase HTTPServer") == ["camel", "Case", " HTTPServer"]
    assert pieces("llama-bpe", "camelCase HTTPServer") == ["camelCase", " HTTPServer"]


def whole_word_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary with a token that no merges lead to, as Llama 3's has 588."""
    metadata = byte_level_metadata()
    word = "".join(byte_level().encode(" Việt").tokens)
    tokens = [*metadata["tokenizer.ggml.tokens"], word]
    types = [*metadata["tokenizer.ggml.token_type"], 1]
    return {**metadata, "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, **changes}


@pytest.mark.parametrize("pre", ["llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken"])
def test_gguf_whole_words_need_no_merges_where_llama_cpp_ignores_them(pre: str) -> None:
    metadata = whole_word_metadata(**{"tokenizer.ggml.pre": pre})
    whole = len(metadata["tokenizer.ggml.tokens"]) - 1
    tokenizer = tokenizer_from_gguf("x.gguf", metadata)
    ids = tokenizer.encode("Cửa Việt").ids
    assert ids[-1] == whole
    assert tokenizer.decode(ids) == "Cửa Việt"
    for other in ("smaug-bpe", "qwen2", "smollm", "gpt-2", "default"):
        ids = tokenizer_from_gguf("x.gguf", whole_word_metadata(**{"tokenizer.ggml.pre": other})).encode("Cửa Việt").ids
        assert whole not in ids


@pytest.mark.parametrize("pre", CUTS)
def test_gguf_pre_tokenizers_keep_the_text(pre: str) -> None:
    tokenizer = tokenizer_from_gguf("x.gguf", byte_level_metadata(**{"tokenizer.ggml.pre": pre}))
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("keys", "before", "behind"),
    [
        ({"pre": "qwen2", "bos_token_id": 1}, [], []),
        ({"pre": "qwen2", "bos_token_id": 1, "add_bos_token": True}, [1], []),
        ({"pre": "qwen2", "eos_token_id": 2, "add_eos_token": True}, [], [2]),
        ({"pre": "llama-bpe", "bos_token_id": 1, "eos_token_id": 2, "add_eos_token": True}, [1], [2]),
        ({"pre": "tekken", "bos_token_id": 1}, [1], []),
        ({"pre": "llama-bpe", "bos_token_id": 1, "add_bos_token": False}, [], []),
        ({"pre": "llama-bpe"}, [], []),
        ({"pre": "llama-bpe", "bos_token_id": 100_000}, [], []),
    ],
)
def test_gguf_puts_bos_and_eos_around_a_text_as_llama_cpp(
    keys: dict[str, Any], before: list[int], behind: list[int]
) -> None:
    metadata = byte_level_metadata(**{f"tokenizer.ggml.{name}": value for name, value in keys.items()})
    tokenizer = tokenizer_from_gguf("x.gguf", metadata)
    plain = tokenizer.encode("a b", add_special_tokens=False).ids
    assert tokenizer.encode("a b").ids == [*before, *plain, *behind]


def test_templates_get_every_named_token_of_a_gguf_file() -> None:
    keys = {"bos": 1, "eos": 2, "unknown": 3, "seperator": 4, "padding": 5, "mask": 6}
    metadata = byte_level_metadata(**{f"tokenizer.ggml.{name}_token_id": index for name, index in keys.items()})
    tokens = metadata["tokenizer.ggml.tokens"]
    names = ("bos", "eos", "unk", "sep", "pad", "mask")
    assert named_tokens(metadata) == {f"{name}_token": tokens[i] for i, name in enumerate(names, 1)}


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
    del metadata["tokenizer.ggml.add_bos_token"]
    metadata["tokenizer.ggml.bos_token_id"] = 1
    tokenizer = tokenizer_from_gguf("x.gguf", metadata)
    assert tokenizer.encode("the").ids[0] == 1
    assert tokenizer.decode([0, *tokenizer.encode("the").ids]) == "the", "the unknown token is special as well"
    bare = tokenizer_from_gguf("x.gguf", {**metadata, "tokenizer.ggml.add_space_prefix": False})
    assert tokenizer.encode("the").tokens[1:] == ["▁the"]
    assert bare.encode("the").tokens[1:] == ["t", "he"]
    assert bare.decode(bare.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tokenizer.ggml.tokens": None}, ModelError),
        ({"tokenizer.ggml.token_type": [1]}, ModelError),
        ({"tokenizer.ggml.merges": ["nothing here"]}, ModelError),
        ({"tokenizer.ggml.merges": [1, 2]}, ModelError),
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
