"""A text that is certainly too long is refused without being encoded, and no other one is."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.tokenizers_for_tests import CORPUS, byte_level, sentencepiece
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from wavecore.frontend.text.length_bound import LengthBound
from wavecore.frontend.text.tokenizer import Tokenizer as TextSide
from wavecore.transport.errors import ValidationError


def copied(tokenizer: Tokenizer) -> Tokenizer:
    return Tokenizer.from_str(tokenizer.to_str())


@cache
def tokenizers() -> dict[str, Tokenizer]:
    found = {"byte level": byte_level(), "byte fallback": sentencepiece()}
    found["composing"] = copied(byte_level())
    found["composing"].normalizer = normalizers.NFC()
    found["takes white space"] = copied(byte_level())
    found["takes white space"].add_special_tokens([AddedToken("<end>", rstrip=True, special=True)])
    found["metaspace"] = copied(sentencepiece())
    found["metaspace"].normalizer = None
    found["metaspace"].pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    found["normalized tokens"] = copied(
        sentencepiece()
    )  # they are found as the normalizer writes them, which is longer
    found["normalized tokens"].add_tokens([AddedToken(" " * 8, normalized=True), AddedToken("▁" * 6, normalized=True)])
    found["strips"] = copied(byte_level())
    found["strips"].normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    found["collapses"] = copied(byte_level())
    found["collapses"].normalizer = normalizers.Replace("aaa", "a")
    found["drops spaces"] = copied(byte_level())
    found["drops spaces"].pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    found["unknown words"] = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    found["one unknown"] = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    return found


CERTAIN = ("byte level", "byte fallback", "composing", "takes white space", "metaspace", "normalized tokens")
TEXTS = st.lists(
    st.sampled_from(
        [*CORPUS, " " * 40, "a" * 40, "<end>", "<|im_end|>", "e\u0301", "\u1112\u1161\u11ab", "▁", "\n", "é"]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", tokenizers())
@example(text="▁" * 140)
@given(text=TEXTS | st.text())
def test_it_is_never_wrong(name: str, text: str) -> None:
    tokenizer = tokenizers()[name]
    assert not LengthBound(tokenizer).exceeds(text, len(tokenizer.encode(text, add_special_tokens=False).ids))


@pytest.mark.parametrize("name", tokenizers())
def test_it_refuses_where_it_can_be_certain(name: str) -> None:
    text = "The capital of France is Paris. " * 2000
    assert LengthBound(tokenizers()[name]).exceeds(text, 1000) == (name in CERTAIN)


def test_a_text_that_is_not_composed_is_not_judged() -> None:
    assert not LengthBound(tokenizers()["composing"]).exceeds("e\u0301" * 100_000, 10)
    assert LengthBound(tokenizers()["composing"]).exceeds("\u00e9" * 100_000, 10)


def test_a_huge_text_is_read_only_until_it_is_certain() -> None:
    tokenizer = TextSide(byte_level(), "test")
    text = "long prose " * 2_000_000
    with pytest.raises(ValidationError, match="prompt: 22000000 characters are more than max_model_len 1000"):
        tokenizer.check_length(text, 1000)
    tokenizer.check_length("a" * 4000, 1000)
