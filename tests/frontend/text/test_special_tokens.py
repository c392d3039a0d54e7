"""Special and added tokens of a folder: what transformers' AutoTokenizer takes of all files together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.tokenizers_for_tests import byte_level, sentencepiece
from transformers import AutoTokenizer

from wavecore.engine_core.api.special_tokens import eos_token_id
from wavecore.frontend.text.tokenizer_files import load_tokenizer
from wavecore.transport.errors import ModelError

NEXT = byte_level().get_vocab_size()
TEXTS = [
    "<|a|> b <|b|>",
    "x<|im_start|>user\nhi<|im_end|><|a|> y  <|c|>  z<think>[PAD]",
    "[PAD]<|d|> <think> </s>",
    "no special token at all",
]


def token(text: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {"content": text, **plain, **flags}


def named(text: str, **flags: bool) -> dict[str, Any]:
    return {key: value for key, value in token(text, **flags).items() if key != "special"}


A, B = token("<|a|>"), token("<|b|>", special=False, rstrip=True)
BOTH = {"added_tokens_decoder": {str(NEXT + 1): B, str(NEXT): A}}
IDS = {"<|b|>": NEXT + 1, "<|a|>": NEXT}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tokenizer.json alone": {},
    "eos that no other file knows": {"tokenizer_config": {"eos_token": "<|a|>"}},
    "added_tokens_decoder": {"tokenizer_config": {"eos_token": "<|im_end|>", **BOTH}},
    "named tokens are special": {"tokenizer_config": {"eos_token": "<|b|>", **BOTH}},
    "extra tokens": {"tokenizer_config": {**BOTH, "additional_special_tokens": ["<|c|>", "<|a|>"]}},
    "extra tokens by name": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<|c|>"}}},
    "tokens of other names": {"tokenizer_config": {"boi_token": "<|d|>", "eos_token": "<|im_end|>"}},
    "added_tokens.json": {"tokenizer_config": {"eos_token": "<|b|>"}, "added_tokens": IDS},
    "added_tokens.json, one of them special without a name": {
        "tokenizer_config": {"additional_special_tokens": ["<|a|>"]},
        "added_tokens": IDS,
    },
    "special_tokens_map.json": {"special_tokens_map": {"eos_token": "<|im_end|>", "pad_token": named("[PAD]")}},
    "the map before an older config": {
        "tokenizer_config": {"eos_token": "<|b|>"},
        "special_tokens_map": {"eos_token": "<|a|>", "additional_special_tokens": ["<think>", "<|c|>"]},
        "added_tokens": IDS,
    },
    "a config with added tokens before the map": {
        "tokenizer_config": {"eos_token": "<|b|>", **BOTH},
        "special_tokens_map": {"eos_token": "<|a|>"},
    },
    "flags of a token that tokenizer.json has": {
        "tokenizer_config": {"added_tokens_decoder": {"1": token("<|im_start|>", special=False, lstrip=True)}}
    },
    "a token of the vocabulary becomes special": {"tokenizer_config": {"pad_token": "the"}},
}


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    byte_level().save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **files.get("tokenizer_config", {})}
    for name, values in {**files, "tokenizer_config": config}.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_files_together_give_what_transformers_takes(tmp_path: Path, layout: str) -> None:
    folder = write(tmp_path / "model", LAYOUTS[layout])
    reference, ours = AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(folder)
    for text in TEXTS:
        ids = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, add_special_tokens=False) == ids
        for skip in (True, False):
            shown = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skip_special_tokens=skip) == shown
    assert ours.eos_token_id == reference.eos_token_id == eos_token_id(folder)  # at which the engine ends
    assert dict(ours.named_tokens) == reference.special_tokens_map


def test_added_tokens_json_fills_gaps_of_the_config(tmp_path: Path) -> None:
    """transformers reads the one or the other; what only the other has would be cut into pieces."""
    config = {"added_tokens_decoder": {str(NEXT): A}}
    tokenizer = load_tokenizer(write(tmp_path / "model", {"tokenizer_config": config, "added_tokens": IDS}))
    assert tokenizer.encode("<|a|><|b|>") == [NEXT, NEXT + 1]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {str(NEXT + 1): A}}},  # a gap before it
        {"tokenizer_config": {"added_tokens_decoder": {"7": A}}},  # taken
        {"added_tokens": {"the": NEXT}},  # the vocabulary has it elsewhere
    ],
)
def test_ids_that_do_not_fit_the_vocabulary_are_an_error(tmp_path: Path, files: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"model: '.*' has the id \d+ in .* by tokenizer\.json it is \d+"):
        load_tokenizer(write(tmp_path / "model", files))


@pytest.mark.parametrize(
    ("file", "values"),
    [
        ("tokenizer_config", {"eos_token": "\ud800"}),
        ("tokenizer_config", {"added_tokens_decoder": {"1": {"content": "\ud800"}}}),
        ("special_tokens_map", {"additional_special_tokens": ["<|a|>", "\ud800"]}),
        ("added_tokens", {"\ud800": NEXT}),
        ("added_tokens", {"<|a|>": float("inf")}),
        ("added_tokens", {"<|a|>": float("nan")}),
    ],
)
def test_tokens_that_cannot_be_name_the_file(tmp_path: Path, file: str, values: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=rf"{file}\.json: its tokens are not in the form"):
        load_tokenizer(write(tmp_path / "model", {file: values}))


def test_many_tokens_cost_nothing(tmp_path: Path) -> None:
    """DeepSeek has some 800 of them; each added on its own would take seconds."""
    names = [f"<|reserved_{i}|>" for i in range(2000)]
    tokens = {str(NEXT + i): token(name) for i, name in enumerate(names)}
    tokenizer = load_tokenizer(write(tmp_path / "model", {"tokenizer_config": {"added_tokens_decoder": tokens}}))
    assert tokenizer.encode("".join(names)) == [NEXT + i for i in range(2000)]


def test_a_sentencepiece_like_tokenizer(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", {"tokenizer_config": {"eos_token": "</s>", "pad_token": "[PAD]"}})
    sentencepiece().save(str(folder / "tokenizer.json"))
    reference, ours = AutoTokenizer.from_pretrained(str(folder)), load_tokenizer(folder)
    for text in (*TEXTS, "the capital</s> is [PAD] Paris"):
        assert ours.encode(text, add_special_tokens=False) == reference(text, add_special_tokens=False)["input_ids"]
