"""Which tokens end a text: the union of what all files of a model say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from tests.engine_core.models.gguf_files import VOCAB, write_gguf
from tests.support.model_driver import load

from wavecore.engine_core.models.files import end_token_ids, open_model
from wavecore.transport.errors import ModelError

CONTROL, USER_DEFINED, NORMAL = 3, 4, 1


def write(folder: Path, **files: Any) -> Path:
    """Files of a folder by their names without .json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def decoder(text: str, index: int) -> dict[str, Any]:
    return {"added_tokens_decoder": {str(index): {"content": text, "special": True}}}


LAYOUTS: list[tuple[dict[str, Any], set[int]]] = [
    ({}, set()),
    ({"config": {"eos_token_id": 7}}, {7}),
    ({"config": {"eos_token_id": 7}, "generation_config": {"eos_token_id": [5, 6, 5]}}, {5, 6, 7}),
    ({"config": {"eos_token_id": 0}, "generation_config": {"eos_token_id": None}}, {0}),
    # <|endoftext|> by the configs, <|im_end|> by the tokenizer, which says its id in one of several places
    ({"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "<e>", **decoder("<e>", 9)}}, {1, 9}),
    ({"config": {"eos_token_id": 1}, "tokenizer_config": {"eos_token": "<e>"}, "added_tokens": {"<e>": 9}}, {1, 9}),
    ({"config": {"eos_token_id": 1}, "special_tokens_map": {"eos_token": "<e>"}, "added_tokens": {"<e>": 9}}, {1, 9}),
    (
        {
            "tokenizer_config": {"eos_token": {"content": "<e>", "__type": "AddedToken"}},
            "tokenizer": {"added_tokens": [{"id": 9, "content": "<e>"}], "model": {"vocab": {"<e>": 3}}},
        },
        {9},
    ),
    ({"tokenizer_config": {"eos_token": "<e>"}, "tokenizer": {"model": {"vocab": {"a": 0, "<e>": 3}}}}, {3}),
    ({"tokenizer_config": {"eos_token": "<e>"}, "tokenizer": {"model": {"vocab": [["<e>", 0.0]]}}}, {0}),
    ({"tokenizer_config": {"eos_token": None, "add_eos_token": True}}, set()),
    ({"tokenizer_config": {"eos_token": "<e>"}}, set()),
    # The map goes first beside a config without added tokens, else it fills gaps.
    (
        {
            "tokenizer_config": {"eos_token": "<e>"},
            "special_tokens_map": {"eos_token": "<f>"},
            "added_tokens": {"<e>": 2, "<f>": 3},
        },
        {3},
    ),
    ({"tokenizer_config": {"eos_token": "<e>", **decoder("<e>", 2)}, "special_tokens_map": {"eos_token": "<f>"}}, {2}),
    ({"tokenizer_config": decoder("<e>", 2), "special_tokens_map": {"eos_token": "<e>"}}, {2}),
    (
        {
            "tokenizer_config": {"eos_token": "</s>"},
            "tokenizer": {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.5]]}},
        },
        {1},
    ),
]


@pytest.mark.parametrize(("files", "ids"), LAYOUTS)
def test_a_folder_ends_at_what_any_of_its_files_says(tmp_path: Path, files: dict[str, Any], ids: set[int]) -> None:
    assert set(end_token_ids(write(tmp_path, **files))) == ids


def test_the_engine_ends_at_all_of_them_once_and_within_the_vocabulary(tiny_llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "model"))
    write(
        folder,
        generation_config={"eos_token_id": [5, 6, 5, 100_000]},
        tokenizer_config={"eos_token": "<e>", **decoder("<e>", 9)},
    )
    assert load(folder).info.eos_token_ids == (5, 6, 9)
    other = write(tmp_path / "tokenizer", tokenizer_config={"eos_token": "<f>", **decoder("<f>", 11)})
    assert load(folder, tokenizer=str(other)).info.eos_token_ids == (5, 6, 9, 11)


@pytest.mark.parametrize("name", ["config", "generation_config"])
@pytest.mark.parametrize("value", [-1, [3, -1], "stop", 1.5, True, {}, [[2]]])
def test_an_id_that_is_none_names_its_file(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path}/{name}\.json: eos_token_id must be"):
        end_token_ids(write(tmp_path, **{name: {"eos_token_id": value}}))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<e>"}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"1": 5}}),
        ("tokenizer_config", {"added_tokens_decoder": [1]}),
        ("tokenizer_config", {"eos_token": {"text": "<e>"}}),
        ("tokenizer_config", {"additional_special_tokens": 5}),
        ("special_tokens_map", {"eos_token": {"content": 5}}),
        ("added_tokens", {"<e>": "first"}),
        ("added_tokens", [1]),
        ("tokenizer", {"added_tokens": [{"content": "<e>"}]}),
        ("tokenizer", {"model": 5}),
    ],
)
def test_broken_tokens_name_their_file(tmp_path: Path, name: str, values: Any) -> None:
    with pytest.raises(ModelError, match=rf"{tmp_path}/{name}\.json"):
        end_token_ids(write(tmp_path, **{name: values}))


def gguf_with(path: Path, texts: dict[int, tuple[str, int]], **keys: int) -> Path:
    """A tiny model whose vocabulary has some tokens of a text and a type, and whose metadata names some by key."""
    tokens, types = [f"t{i}" for i in range(VOCAB)], [NORMAL] * VOCAB
    for index, (text, kind) in texts.items():
        tokens[index], types[index] = text, kind
    return write_gguf(path, "llama", GGMLQuantizationType.F32, vocabulary=(tokens, types), token_ids=keys)


def test_a_gguf_file_ends_at_keys_and_at_texts_of_added_tokens(tmp_path: Path) -> None:
    """Llama 3's files name 128001 <|end_of_text|> alone, and chats end with <|eot_id|>."""
    texts = {
        20: ("<|end_of_text|>", CONTROL),
        21: ("<|eot_id|>", CONTROL),
        22: ("<|eom_id|>", CONTROL),
        23: ("<|im_end|>", USER_DEFINED),
        24: ("<|start_header_id|>", CONTROL),
        25: ("</s>", NORMAL),
    }
    path = gguf_with(tmp_path / "a.gguf", texts, eos=20)
    assert set(load(path).info.eos_token_ids) == {20, 21, 22, 23}
    path = gguf_with(tmp_path / "b.gguf", {}, eos=20, eot=30, eom=31, fim_pad=32, fim_rep=33, fim_sep=34, bos=35)
    assert set(load(path).info.eos_token_ids) == {20, 30, 31, 32, 33, 34}
    path = gguf_with(tmp_path / "c.gguf", {}, eos=20, eot=100_000)
    assert load(path).info.eos_token_ids == (20,)


def test_a_tokenizer_of_its_own_as_gguf_names_its_ends(tiny_llama: Path, tmp_path: Path) -> None:
    path = gguf_with(tmp_path / "a.gguf", {21: ("<|eot_id|>", CONTROL)}, eos=20)
    source = open_model(str(tiny_llama), lambda _phase, _fraction: None, str(path))
    assert set(source.eos_token_ids) == {20, 21}
