"""A conversation as a template gets it: the values of JSON, as transformers passes them, or a typed error."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from inspect import isroutine
from typing import Any

from wavecore.engine_core.api.fields import field_checks, make_plain
from wavecore.transport.errors import NotSupportedError, ValidationError
from wavecore.transport.wire.checks import OF_REQUEST, shown

MAX_MESSAGES = 4096
MAX_TOOLS = 4096
MAX_CHARACTERS = 12 << 20  # in JSON
# Variables that the call itself makes, and what transformers' call takes that ours does not
# fmt: off
RESERVED = frozenset({
    "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize", "return_dict",
    "padding", "truncation", "max_length", "return_tensors", "return_assistant_tokens_mask", "sanitize_control_tokens",
})
# fmt: on
# Parts of a content that are no text; a template would write a placeholder
MEDIA = frozenset({"image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url"})
REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one thing; a template knows one or two
Tools = Sequence[Mapping[str, Any] | Callable[..., Any]] | None


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    Attributes:
        chat_template: jinja2 source in place of the model's, or the name of one of the model's.
        add_generation_prompt: open the assistant's turn.
        continue_final_message: end inside the last message instead, so that the answer continues it.
        tools: for templates that show them: schemas, or Python functions with type hints and a docstring.
        chat_template_kwargs: variables for the template, of values that JSON has ("documents", say).
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Tools = None
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        make_plain(self, _CHECKS)


_CHECKS = field_checks(ChatOptions, OF_REQUEST)


def conversation_json(messages: Any, tools: Any, variables: Any) -> str:
    """What a template gets of a call, in JSON: what is absent in a message stays so, and None stays None.

    It is made in one call, for while other threads run, an event loop waits.

    Raises:
        ValidationError: malformed; no value of the kinds that JSON has; too long for any model.
        NotSupportedError: content other than text.
    """
    if not isinstance(variables, Mapping):
        raise ValidationError("chat_template_kwargs", f"must be a dictionary, not {shown(variables)}")
    for name in variables:
        if not isinstance(name, str) or name in RESERVED or not name.isidentifier():
            raise ValidationError("chat_template_kwargs", f"{shown(name)} cannot be set")
    listed = OF_REQUEST.entries("messages", messages, MAX_MESSAGES)
    if not listed:
        raise ValidationError("messages", 'must be a list of at least one {"role": ..., "content": ...}')
    if tools is not None:
        tools = [_schema(t) if isroutine(t) else t for t in OF_REQUEST.entries("tools", tools, MAX_TOOLS)]
        for tool in tools:
            if isinstance(tool, str | int | float | list | tuple | None):
                raise ValidationError("tools", f"must hold schemas or functions, not {shown(tool)}")
    found = [_message(i, message) for i, message in enumerate(listed)]
    length = sum(len(message["content"]) for message in found if isinstance(message.get("content"), str))
    if length <= MAX_CHARACTERS:
        given = {**variables, "messages": found, "tools": tools}
        text = "{" + ", ".join([f"{json.dumps(name)}: {as_json(name, value)}" for name, value in given.items()]) + "}"
        length = len(text)
    if length > MAX_CHARACTERS:
        raise ValidationError("messages", f"hold {length} characters; the limit is {MAX_CHARACTERS}")
    return text


def as_json(name: str, value: Any) -> str:
    """A value in JSON; an object that stands for a dictionary (a dataclass, a pydantic model) becomes one.

    Raises:
        ValidationError: other objects, or nested without end; `name` is the field at fault.
    """
    try:
        return json.dumps(value, default=_plain)
    except Exception as error:  # whatever objects raise that stand for others
        raise ValidationError(name, f"must be plain values: {error!r:.300}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    for method in ("model_dump", "tolist"):  # pydantic's models, numpy's values
        if callable(dump := getattr(value, method, None)):
            return dump()
    raise TypeError(f"{shown(value)} is none")


def _message(index: int, message: Any) -> dict[str, Any]:
    try:
        message = message if isinstance(message, dict) else _plain(message)
        role, content = message.get("role"), message.get("content")
    except Exception as error:
        what = f"message {index} must be a dictionary, not {shown(message)} ({error!r:.200})"
        raise ValidationError("messages", what) from error
    if not isinstance(role, str) or not role:
        raise ValidationError("messages", f"message {index}: role must be text, not {shown(role)}")
    if not isinstance(content, str | list | tuple | None):
        raise ValidationError("messages", f"message {index}: content must be text or a list of text parts")
    for part in content if isinstance(content, list | tuple) else ():
        kind = part.get("type") if isinstance(part, Mapping) else getattr(part, "type", None)
        if kind in MEDIA:
            raise NotSupportedError(f"messages: message {index} holds a part of type {kind!r}; only text is supported")
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _schema(function: Callable[..., Any]) -> Any:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:  # its own kinds, and whatever a look at hints and docstrings raises
        raise ValidationError("tools", f"no schema can be made of {shown(function)}: {error!s:.300}") from error
