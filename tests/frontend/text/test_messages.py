"""Conversations: what reaches a template, what is refused, and where a continued message is cut."""

from __future__ import annotations

import copy
import enum
import json
import pickle
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tests.support.tokenizers_for_tests import TEMPLATE, byte_level

from wavecore.frontend.text.chat_template import ChatTemplate
from wavecore.frontend.text.messages import MAX_CHARACTERS, ChatOptions, as_json, conversation_json
from wavecore.frontend.text.tokenizer import LONG_TEXT, Tokenizer
from wavecore.transport.errors import ModelError, NotSupportedError, ValidationError

ASK = {"role": "user", "content": "a"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), "test", ChatTemplate(TEMPLATE, "test"), {"eos_token": "<|im_end|>"})


def shown(template: str, messages: list[Any], **options: Any) -> str:
    tokenizer = Tokenizer(byte_level(), "test", ChatTemplate(template, "test"), {"eos_token": "</s>"})
    return tokenizer.render_chat(messages, ChatOptions(**options))[0]


def weather(city: str, days: int = 1) -> str:
    """Look at the sky.

    Args:
        city: Where.
        days: How many.
    """
    return city * days


def test_plain_content_gives_the_tokens_of_the_rendered_text(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße 你好"}]
    text, ids = tokenizer.render_chat(messages, ChatOptions())
    assert text.endswith("<|im_start|>assistant\n")
    assert ids == byte_level().encode(text).ids


@pytest.mark.parametrize("template", ["{{ '<' + messages[0].content }}", "{{ messages[0].content.split('a') }}"])
def test_a_template_that_takes_no_lists_says_so_and_the_way_out(template: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    with pytest.raises(ValidationError, match=r"a list as content, which this template does not take .*: give text"):
        shown(template, parts)
    with pytest.raises(ValidationError, match="TypeError: can only concatenate"):
        shown("{{ '<' + messages }}", [ASK])


def test_messages_reach_the_template_as_they_are() -> None:
    template = (
        "{% for m in messages %}{{ m.keys() | list }}{{ m.content is none }}{{ m.content is defined }};{% endfor %}"
    )
    messages = [{"role": "user"}, {"role": "assistant", "content": None}, {"role": "x", "content": "", "name": None}]
    assert shown(template, messages) == (
        "['role']FalseFalse;['role', 'content']TrueTrue;['role', 'content', 'name']FalseTrue;"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "thinking", "thinking": "b"}]
    assert shown("{{ messages[0].content | tojson }}", [{"role": "user", "content": parts}]).startswith(
        '[{"type": "text"'
    )


@pytest.mark.parametrize("role", ["ipython", "function", "model", "developer", "critic"])
def test_any_role(role: str) -> None:
    assert shown("{{ messages[0].role }}", [{"role": role, "content": "x"}]) == role


@pytest.mark.parametrize("name", ["reasoning", "thinking", "reasoning_content"])
def test_reasoning_has_all_its_names(name: str) -> None:
    message = {"role": "assistant", "content": "b", name: "why"}
    assert shown("{{ messages[0].reasoning_content }} {{ messages[0].thinking }}", [message]) == "why why"


def test_variables_of_any_plain_kind() -> None:
    template = "{{ documents is none }}{{ tools is none }}{{ eos_token }}"
    assert shown(template, [ASK]) == "TrueTrue</s>"
    given = {"documents": [{"title": "t"}], "builtin_tools": ["a", "b"], "deep": {"x": [1, None]}, "eos_token": "!"}
    template = "{{ documents[0].title }}{{ builtin_tools | join }}{{ deep.x }}{{ eos_token }}"
    assert shown(template, [ASK], chat_template_kwargs=given) == "tab[1, None]!"
    assert shown("{{ tools is none }}{{ tools }}", [ASK], tools=[]) == "False[]"


def test_objects_that_stand_for_dictionaries() -> None:
    @dataclass
    class Message:
        role: str
        content: str

    class Model:
        def model_dump(self) -> dict[str, str]:
            return {"role": "user", "content": "c"}

    class Role(enum.StrEnum):
        USER = "user"

    messages = [Message("user", "a"), UserDict(role=Role.USER, content="b"), Model()]
    variables = {"n": np.int64(3), "values": np.arange(2), "t": (1, 2)}
    found = json.loads(conversation_json(messages, None, variables))
    assert [m["content"] for m in found["messages"]] == ["a", "b", "c"]
    assert (found["n"], found["values"], found["t"], found["tools"]) == (3, [0, 1], [1, 2], None)


def test_python_functions_are_tools() -> None:
    from transformers.utils import get_json_schema

    schema = get_json_schema(weather)
    assert json.loads(conversation_json([ASK], [weather, schema], {}))["tools"] == [schema, schema]
    with pytest.raises(ValidationError, match=r"tools: no schema can be made of .*lambda.* docstring"):
        conversation_json([ASK], [lambda: 1], {})


MALFORMED = [
    *(None, [], "hi", [1], [{"content": "x"}], [{"role": 1, "content": "x"}], [{"role": "user", "content": 5}]),
    *([ASK] * 5000, [{"role": "user", "content": "x", "y": object()}], [{"role": "user", "content": "x", (1, 2): 3}]),
]


@pytest.mark.parametrize("messages", MALFORMED)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(ValidationError, match="messages"):
        conversation_json(messages, None, {})


def test_values_without_end_are_refused(tokenizer: Tokenizer) -> None:
    endless: list[Any] = []
    endless.append(endless)
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in (endless, deep, 10**5000):
        with pytest.raises(ValidationError, match="x: must be plain values"):
            as_json("x", value)
        with pytest.raises(ValidationError):
            tokenizer.apply_chat_template([{**ASK, "n": value}])


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_only_text_is_supported(kind: str) -> None:
    with pytest.raises(NotSupportedError, match=f"message 0 holds a part of type '{kind}'"):
        conversation_json([{"role": "user", "content": [{"type": kind, kind: {"url": "http://x"}}]}], None, {})


@pytest.mark.parametrize(
    "kwargs", [5, {1: 2}, {"tools": 1}, {"tokenize": True}, {"messages": "x"}, {"a b": 1}, {"return_tensors": "pt"}]
)
def test_names_that_are_taken_are_refused(kwargs: Any) -> None:
    with pytest.raises(ValidationError, match="chat_template_kwargs"):
        conversation_json([ASK], None, kwargs)


def test_calling_a_tokenizer(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The capital")
    assert tokenizer("The capital")["input_ids"] == tokenizer("The capital").input_ids == ids
    assert tokenizer(["The capital", "a"]).input_ids[0] == ids
    assert tokenizer.decode(ids) == "The capital"
    for wrong in ([-1], [1 << 40], "ab", [1.5], -7):
        with pytest.raises(ValidationError):
            tokenizer.decode(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("tool", [1, "weather", None, [weather], {}.keys()])
def test_a_tool_is_a_schema_or_a_function(tool: Any) -> None:
    with pytest.raises(ValidationError, match="tools: must"):
        shown("{{ tools }}", [ASK], tools=[tool])


@pytest.mark.parametrize("text", ["é", "é" * LONG_TEXT])
def test_a_tokenizer_that_crashes_is_a_typed_error(text: str) -> None:
    """One with a token that its own normalizer makes empty: tokenizers panics, and that is no Exception."""
    backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
    backend.add_tokens([tokenizers.AddedToken("   ", normalized=True)])
    backend.normalizer = tokenizers.normalizers.Strip()
    with pytest.raises(ValidationError, match=r"prompt: the tokenizer \(test\) fails at it: AddedVocabulary bad split"):
        Tokenizer(backend, "test").encode(text)


def test_a_long_text_has_the_tokens_of_a_short_one(tokenizer: Tokenizer) -> None:
    """Long ones take a call that lets other threads run."""
    text = "The capital of Grüße 你好 <|im_end|>\n" * 400
    assert tokenizer.encode(text) == byte_level().encode(text).ids
    for text in ("\ud800", "a" * 5000 + "\ud800"):
        with pytest.raises(ValidationError, match="Unicode"):
            tokenizer.encode(text)


@pytest.mark.parametrize("content", ["The answer ", "|", "<", ">", "e", "im", "<|im_end|", "<|im_end|>", "\n\n", "a\n"])
def test_a_continued_message_is_cut_where_it_ends(tokenizer: Tokenizer, content: str) -> None:
    options = ChatOptions(continue_final_message=True)
    text, ids = tokenizer.render_chat([ASK, {"role": "assistant", "content": content}], options)
    assert text == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{content}"
    assert byte_level().decode(ids, skip_special_tokens=False) == text


def test_a_continued_message_is_stripped_as_the_template_does() -> None:
    messages = [ASK, {"role": "assistant", "content": " It is \n"}]
    assert shown("{{ messages[1].content | trim }}</s>", messages, continue_final_message=True) == "It is"
    twice = "{{ messages[1].content }}|{{ messages[1].content }}</s>"
    assert shown(twice, messages, continue_final_message=True) == " It is \n| It is \n"
    parts = [{"role": "assistant", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y "}]}]
    each = "{% for p in messages[0].content %}{{ p.text }};{% endfor %}"
    assert shown(each, parts, continue_final_message=True) == "x;y "


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": None}, {"role": "assistant"}, {**ASK, "content": []}]
)
def test_nothing_to_continue(tokenizer: Tokenizer, message: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="continue_final_message"):
        tokenizer.render_chat([ASK, message], ChatOptions(continue_final_message=True))
    with pytest.raises(ValidationError, match="shows whole"):
        shown("{{ messages[0].content[:2] }}", [{**ASK, "content": "abc"}], continue_final_message=True)


def test_every_private_character_in_use_is_a_typed_error(tokenizer: Tokenizer) -> None:
    everything = "".join(map(chr, range(0xF0000, 0x110000)))
    with pytest.raises(ValidationError, match="private use"):
        tokenizer.apply_chat_template([{**ASK, "content": everything}])
    assert tokenizer.decode(tokenizer.encode(everything, parse_special=False)) == everything
    most = everything[:-2]
    assert most in tokenizer.apply_chat_template([{**ASK, "content": most}], tokenize=False)


def test_no_template_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(NotSupportedError, match="chat_template="):
        Tokenizer(byte_level(), "test").apply_chat_template([ASK])


def test_templates_by_name(tokenizer: Tokenizer) -> None:
    named = Tokenizer(byte_level(), "test", ChatTemplate("d", "test", {"tool_use": "t", "rag": "r"}))
    assert named.apply_chat_template([ASK], tokenize=False) == "d"
    assert named.apply_chat_template([ASK], tools=[], tokenize=False) == "t"
    assert named.apply_chat_template([ASK], tools=[weather], chat_template="rag", tokenize=False) == "r"
    assert named.apply_chat_template([ASK], chat_template="{{ 1 }}", tokenize=False) == "1"
    with pytest.raises(ValidationError, match="'tool_use' is neither"):
        tokenizer.apply_chat_template([ASK], chat_template="tool_use")
    with pytest.raises(ModelError, match="test"):
        Tokenizer(byte_level(), "test", ChatTemplate("{{", "test")).apply_chat_template([ASK])


def test_a_conversation_too_long_for_any_model_is_refused_at_once(tokenizer: Tokenizer) -> None:
    long = "a" * MAX_CHARACTERS
    content: Any
    for content in (long + "a", [{"type": "text", "text": long}]):
        with pytest.raises(ValidationError, match=rf"messages: hold \d+ characters; the limit is {MAX_CHARACTERS}"):
            tokenizer.apply_chat_template([{**ASK, "content": content}])
    with pytest.raises(ValidationError, match=r"chat_template_kwargs|messages: hold"):
        tokenizer.apply_chat_template([ASK], note=long)


def test_parts_may_be_objects(tokenizer: Tokenizer) -> None:
    @dataclass
    class Part:
        type: str
        text: str

    message = {"role": "user", "content": (Part("text", "a"), UserDict(type="text", text="b"))}
    assert shown("{% for p in messages[0].content %}{{ p.text }}{% endfor %}", [message]) == "ab"
    with pytest.raises(NotSupportedError, match="'image'"):
        shown("x", [{"role": "user", "content": [Part("image", "a")]}])


def test_a_copy_of_a_tokenizer_chats_on_its_own(tokenizer: Tokenizer) -> None:
    text = tokenizer.apply_chat_template([ASK], tokenize=False)
    for copied in (copy.deepcopy(tokenizer), pickle.loads(pickle.dumps(tokenizer))):
        assert copied.apply_chat_template([ASK], tokenize=False) == text
        assert copied._processes is not tokenizer._processes
