"""Messages to a prompt: checked, rendered through the chat template, and cut so that user text stays text.

A role, a template or the model may write control tokens; the *content* of a message may not. Where content contains the
text of a special token, an invisible marker is put inside it before rendering; after rendering the text is cut at the
markers and the pieces are encoded apart, so the special token never forms. Content without such text (nearly all) takes
the plain path and gives exactly the tokens that transformers gives.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wavecore.transport.errors import NotSupportedError, ValidationError

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 4096
# What a request may hand to a template, beside messages and tools; never names that our own call uses.
RESERVED = frozenset({"messages", "tools", "documents", "tokenize", "chat_template", "return_dict", "padding"})


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How a conversation becomes a prompt.

    Attributes:
        chat_template: jinja2 source in place of the model's.
        add_generation_prompt: open the assistant's turn.
        continue_final_message: end inside the last message instead, so that the answer continues it.
        tools: descriptions of functions, for templates that show them.
        chat_template_kwargs: variables for the template: texts, numbers, true or false.
    """

    chat_template: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None


class ContentMarker:
    """Breaks the text of special tokens inside user content."""

    def __init__(self, special: Sequence[str]) -> None:
        self._special = [s for s in special if len(s) > 1]
        self._single = [s for s in special if len(s) == 1]
        longest_first = sorted(self._special, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def mark(self, text: str, marker: str) -> str:
        for character in self._single:
            text = text.replace(character, "\ufffd")
        if self._pattern is None:
            return text
        while self._pattern.search(text):  # again, because the halves of one may hold another
            text = self._pattern.sub(lambda m: m[0][: len(m[0]) // 2] + marker + m[0][len(m[0]) // 2 :], text)
        if self._begins_special(text.rstrip()):  # the next text could complete it
            text += marker
        return text

    def _begins_special(self, text: str) -> bool:
        return any(text.endswith(s[:cut]) for s in self._special for cut in range(2, len(s)))


def pick_marker(texts: Sequence[str]) -> str:
    """A private-use character that none of the texts contains."""
    used = {c for text in texts for c in text if c >= "\U000f0000"}
    return next(c for c in map(chr, range(0xF0000, 0x110000)) if c not in used)


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages with every `content` as one string.

    Raises:
        ValidationError: empty, an unknown role, a malformed message.
        NotSupportedError: content other than text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValidationError("messages", 'must be a list of at least one {"role": ..., "content": ...}')
    if len(messages) > MAX_MESSAGES:
        raise ValidationError("messages", f"{len(messages)} messages; the limit is {MAX_MESSAGES}")
    return [_message(i, message) for i, message in enumerate(messages)]


def check_template_kwargs(kwargs: Any) -> dict[str, Any]:
    """Variables for the template: plain values under names that are not ours."""
    if not isinstance(kwargs, Mapping):
        raise ValidationError("chat_template_kwargs", f"must be a dictionary, not {type(kwargs).__name__}")
    for name, value in kwargs.items():
        if not isinstance(name, str) or name in RESERVED or not name.isidentifier() or name.startswith("_"):
            raise ValidationError("chat_template_kwargs", f"{name!r:.40} cannot be set")
        if not isinstance(value, str | bool | int | float | None) or (isinstance(value, str) and len(value) > 1024):
            raise ValidationError("chat_template_kwargs", f"{name!r:.40} must be a short text, a number or true/false")
    return dict(kwargs)


def map_strings(value: Any, change: Any) -> Any:
    """`value` with `change` applied to every string in it, keys left alone."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def cut_behind(text: str, content: str) -> str:
    """The text up to the end of the last message's content, for an answer that continues it."""
    content = content.strip()
    at = text.rfind(content)
    if not content or at < 0:
        raise ValidationError("messages", "continue_final_message needs a last message that the template shows")
    return text[: at + len(content)]


def _message(index: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValidationError("messages", f"message {index} must be a dictionary, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValidationError("messages", f"message {index}: role must be one of {', '.join(ROLES)}, not {role!r:.40}")
    content = message.get("content")
    if content is None and role == "assistant":  # a turn that only called tools
        content = ""
    return {**message, "content": _content(index, content)}


def _content(index: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or not content:
        raise ValidationError("messages", f"message {index}: content must be text or a list of text parts")
    parts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind != "text":
            raise NotSupportedError(
                f"messages: message {index} holds a part of type {kind!r:.40}; only text is supported"
            )
        text = part.get("text") if isinstance(part, Mapping) else part
        if not isinstance(text, str):
            raise ValidationError("messages", f"message {index}: a text part must hold text")
        parts.append(text)
    return "\n".join(parts)
