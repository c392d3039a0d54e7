"""Incremental text, for both kinds of tokenizers: nothing taken back, no broken characters, spaces as in `decode`."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.tokenizers_for_tests import byte_level, sentencepiece
from tokenizers import Tokenizer, decoders, models

from wavecore.frontend.text.detokenizer import (
    ByteDetokenizer,
    ByteTable,
    Detokenizer,
    StreamDetokenizer,
    is_byte_level,
    token_bytes,
)

HARD = [
    "한국어 텍스트",
    "你好，世界！",
    "👩‍👩‍👧‍👦 and 🏳️‍🌈!",
    "e\u0301 \u0301x",
    "a" * 50,
    "   spaces   and\n\nlines\t",
    "naïve café – “quotes” …",
]


def byte_detokenizer(skip: frozenset[int] = frozenset()) -> Detokenizer:
    return ByteDetokenizer(ByteTable(byte_level(), skip))


def pieces(detokenizer: Detokenizer, ids: list[int], size: int = 1) -> list[str]:
    given_out = [detokenizer.feed(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*given_out, detokenizer.flush()]


def test_which_tokenizers_are_byte_level() -> None:
    assert is_byte_level(byte_level())
    assert not is_byte_level(sentencepiece())
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    for decoder, alone in (
        (decoders.Sequence([decoders.ByteLevel()]), True),
        (decoders.Sequence([decoders.Sequence([decoders.ByteLevel()])]), True),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]), False),
    ):
        tokenizer.decoder = decoder
        assert is_byte_level(tokenizer) == alone
    assert not is_byte_level(Tokenizer(models.BPE()))


@given(text=st.one_of(st.sampled_from(HARD), st.text(st.characters(exclude_categories=["Cs"]))), size=st.integers(1, 4))
def test_byte_level_text_is_whole_and_never_damaged(text: str, size: int) -> None:
    ids = byte_level().encode(text).ids
    parts = pieces(byte_detokenizer(), ids, size)
    assert "".join(parts) == text == byte_level().decode(ids, skip_special_tokens=False)
    if "\ufffd" not in text:
        assert all("\ufffd" not in part for part in parts)


@given(ids=st.lists(st.integers(0, 600), max_size=40), size=st.integers(1, 4))
def test_any_ids_give_what_decode_gives(ids: list[int], size: int) -> None:
    """Bytes that are no UTF-8 at all included, and ids that no token has."""
    assert "".join(pieces(byte_detokenizer(), ids, size)) == byte_level().decode(ids, skip_special_tokens=False)
    special = frozenset({0, 1, 2})
    assert "".join(pieces(byte_detokenizer(special), ids, size)) == byte_level().decode(ids, skip_special_tokens=True)


def test_incomplete_character_is_held_until_the_end() -> None:
    ids = [byte_level().token_to_id(t) for t in ("ð", "Ł", "ĳ")]  # three of the four bytes of a smiley
    detokenizer = byte_detokenizer()
    assert [detokenizer.feed([i]) for i in ids] == ["", "", ""]
    assert [detokenizer.flush(), detokenizer.flush()] == ["\ufffd", ""]


@pytest.mark.parametrize("text", ["the capital is Paris", "café and the 你好 end", "👩‍👩‍👧‍👦", "  two  spaces"])
def test_sentencepiece_text_continues_the_prompt(text: str) -> None:
    tokenizer = sentencepiece()
    prompt = tokenizer.encode("the France").ids
    ids = tokenizer.encode(text).ids
    parts = pieces(StreamDetokenizer(tokenizer, True, prompt), ids)
    assert tokenizer.decode(prompt) + "".join(parts) == tokenizer.decode(prompt + ids)
    assert all("\ufffd" not in part for part in parts)


@given(ids=st.lists(st.integers(0, 270), min_size=1, max_size=30))
def test_sentencepiece_ids_without_a_prompt(ids: list[int]) -> None:
    tokenizer = sentencepiece()
    whole = tokenizer.decode(ids, skip_special_tokens=False)
    parts = "".join(pieces(StreamDetokenizer(tokenizer, False, []), ids))
    # A run of byte tokens that is no UTF-8 decodes to U+FFFD in full, also its beginning, which was sent long ago.
    assert parts == whole or "\ufffd" in whole


def test_prompt_that_ends_inside_a_character_is_no_context() -> None:
    tokenizer = sentencepiece()
    half = [tokenizer.token_to_id("<0xE4>")]
    detokenizer: Detokenizer = StreamDetokenizer(tokenizer, True, half)
    ids = tokenizer.encode("the").ids
    assert "".join(pieces(detokenizer, ids)) == tokenizer.decode(ids)


def test_token_outside_the_byte_alphabet_is_text() -> None:
    assert token_bytes("Ġthe") == b" the"
    assert token_bytes("a b") == b"a b"
    assert token_bytes("日本") == "日本".encode()


def test_spaces_between_special_tokens() -> None:
    """Between words the decoder puts them, and before the first special token behind a word; between two none."""
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "one": 2, "two": 3}, unk_token="one"))
    ids = [2, 0, 1, 3, 0, 2]
    assert "".join(pieces(StreamDetokenizer(tokenizer, False, []), ids)) == "one <s> </s> two <s> one"
    bare = {0: "<s>", 1: "</s>"}
    assert "".join(pieces(StreamDetokenizer(tokenizer, False, [], bare), ids)) == "one <s></s> two <s> one"


BYTES_OF_NI = ["<0xE4>", "<0xBD>", "<0xA0>"]


def tokens(*names: str) -> list[int]:
    return [sentencepiece().token_to_id(name) for name in names]


def test_a_prompt_that_ends_with_a_character_of_several_tokens_is_context() -> None:
    """Of its last token alone nothing could be said, and the first word would lose its space."""
    for prompt in (BYTES_OF_NI, ["▁the", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]):
        detokenizer = StreamDetokenizer(sentencepiece(), True, tokens(*prompt))
        assert pieces(detokenizer, tokens("▁the", "▁i")) == [" the", " i", ""]


def test_bytes_that_rewrite_what_was_sent_take_nothing_back() -> None:
    """A run of bytes that is no UTF-8 decodes to U+FFFD in full; its first character was sent long ago."""
    detokenizer = StreamDetokenizer(sentencepiece(), True, [])
    ids = tokens("<0xC3>", "<0xA9>", "<0xE4>", "▁the", "▁i", *BYTES_OF_NI, "▁the")
    assert pieces(detokenizer, ids) == ["", "é", "", "\ufffd the", " i", "", "", "你", " the", ""]


@pytest.mark.parametrize("sent", [0, 1, 3])
def test_an_incomplete_end_is_one_replacement_whatever_was_sent_before(sent: int) -> None:
    detokenizer = StreamDetokenizer(sentencepiece(), True, [])
    ids = tokens(*["<0xC3>", "<0xA9>"] * sent, "<0xE4>")
    assert "".join(pieces(detokenizer, ids)) == "é" * sent + "\ufffd"
    assert detokenizer.flush() == ""


@pytest.mark.parametrize("skip", [True, False])
def test_a_special_token_at_the_end_is_text_on_demand_only(skip: bool) -> None:
    ids = [*tokens("▁the"), sentencepiece().token_to_id("</s>")]
    shown = "".join(pieces(StreamDetokenizer(sentencepiece(), skip, []), ids))
    assert shown == sentencepiece().decode(ids, skip_special_tokens=skip) == ("the" if skip else "the</s>")


def test_what_is_flushed_keeps_the_space_behind_what_was_sent() -> None:
    """A token that is a replacement character itself looks like the beginning of one."""
    content = json.loads(sentencepiece().to_str())
    content["model"]["vocab"]["▁\ufffd"] = new = len(content["model"]["vocab"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    ids = [*tokens("▁the"), new]
    assert pieces(StreamDetokenizer(tokenizer, True, []), ids) == ["the", "", " \ufffd"]
    assert pieces(StreamDetokenizer(tokenizer, True, tokens("▁the")), ids) == [" the", "", " \ufffd"]
