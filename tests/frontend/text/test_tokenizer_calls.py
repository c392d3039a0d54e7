"""What programs call of a tokenizer under transformers' names gives what transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tokenizers_for_tests import byte_level, sentencepiece, write_folder
from transformers import PreTrainedTokenizerFast

from wavecore import ValidationError
from wavecore.frontend.text.tokenizer import Tokenizer
from wavecore.frontend.text.tokenizer_files import load_tokenizer

NAMED = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "pad_token": "<|im_start|>"}
TEXTS = ["The capital", "of France is Paris, and", "é"]


@pytest.fixture(scope="module")
def own() -> Tokenizer:
    return Tokenizer(byte_level(), "test", named_tokens=NAMED)


@pytest.fixture(scope="module")
def theirs() -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=byte_level(), **NAMED)


def test_vocabulary(own: Tokenizer, theirs: Any) -> None:
    assert own.get_vocab() == theirs.get_vocab()
    assert len(own) == len(theirs) == own.vocab_size
    for name in ("eos_token", "bos_token", "pad_token", "unk_token"):
        assert getattr(own, name) == getattr(theirs, name)
        assert getattr(own, f"{name}_id") == getattr(theirs, f"{name}_id")
    tokens = list(own.get_vocab())[:50]
    assert own.convert_tokens_to_ids(tokens) == theirs.convert_tokens_to_ids(tokens)
    assert own.convert_tokens_to_ids(tokens[3]) == theirs.convert_tokens_to_ids(tokens[3])
    assert own.convert_ids_to_tokens([5, 9]) == theirs.convert_ids_to_tokens([5, 9])
    assert own.convert_ids_to_tokens(5) == theirs.convert_ids_to_tokens(5)
    assert own.convert_tokens_to_ids("no such token") is None


def test_an_unknown_token_has_the_id_of_unk() -> None:
    llama = Tokenizer(sentencepiece(), "test", named_tokens={"unk_token": "<unk>"})
    assert llama.convert_tokens_to_ids(["<s>", "no such token"]) == [1, 0]


def test_decode_of_every_form(own: Tokenizer) -> None:
    ids = own.encode(TEXTS[1])
    forms: list[Any] = [ids, tuple(ids), np.array(ids), torch.tensor(ids)]
    assert {own.decode(form) for form in forms} == {TEXTS[1]}
    assert own.decode(ids[0]) == own.decode(np.int64(ids[0])) == own.decode([ids[0]])
    assert own.batch_decode([own.encode(text) for text in TEXTS]) == TEXTS
    assert own.batch_decode(own(TEXTS[0], return_tensors="np").input_ids) == TEXTS[:1]
    with pytest.raises(ValidationError, match="ids"):
        own.decode("text")


def test_calls_are_those_of_transformers(own: Tokenizer, theirs: Any) -> None:
    for text in (TEXTS[0], TEXTS):
        assert own(text).input_ids == theirs(text).input_ids
        assert own(text)["attention_mask"] == theirs(text)["attention_mask"] == own(text).attention_mask
    for kind in ("pt", "np"):
        for text in (TEXTS[0], [TEXTS[0], TEXTS[0]]):
            found, expected = own(text, return_tensors=kind), theirs(text, return_tensors=kind)
            assert found.input_ids.dtype == expected.input_ids.dtype
            assert found.input_ids.tolist() == expected.input_ids.tolist()
            assert found.attention_mask.tolist() == expected.attention_mask.tolist()


def test_texts_of_several_lengths_are_no_tensor(own: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="one length"):
        own(TEXTS, return_tensors="np")
    with pytest.raises(ValidationError, match="return_tensors"):
        own(TEXTS[0], return_tensors="tf")


def test_a_token_of_a_llama_2_type_keeps_its_leading_space() -> None:
    llama = Tokenizer(sentencepiece(), "test")
    vocabulary = llama.get_vocab()
    assert llama.decode_token(vocabulary["▁the"]) == " the"
    assert llama.decode_token(vocabulary["he"]) == "he"
    assert llama.decode_token(vocabulary["▁"]) == " "
    assert llama.decode_token(vocabulary["<0x41>"]) == "A"
    assert llama.decode_token(vocabulary["<0xE4>"]) == "\ufffd"
    assert llama.decode_token(vocabulary["</s>"]) == "</s>"
    assert llama.decode_token(100_000) == ""
    words = [token for token in vocabulary if not token.startswith("<0x")]
    assert len({llama.decode_token(vocabulary[token]) for token in words}) == len(words)


def test_a_folder_of_a_tokenizer_names_itself(tmp_path: Path) -> None:
    assert load_tokenizer(write_folder(tmp_path / "model")).name_or_path == str(tmp_path / "model" / "tokenizer.json")
