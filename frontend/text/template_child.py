"""The program that renders a chat template, as a process of its own; `template_process` runs it. It imports jinja2 and
the standard library alone, so it starts in a moment and stays small.

A template is a stranger's code. What it can reach is jinja2's immutable sandbox with what transformers gives to
templates, nothing more and nothing less. What it can use up is bounded by the limits of this process, because no check
inside Python bounds what one call of C code takes.
"""

import codecs
import html  # noqa: F401 - jinja2 imports such modules when it first uses them; then no file can be opened any more
import json
import os
import pprint  # noqa: F401
import resource
import sys
import textwrap  # noqa: F401
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn

import jinja2.constants
import jinja2.debug  # noqa: F401
from jinja2 import TemplateError, UndefinedError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wavecore.frontend.text.special_text import SpecialText, unused_characters, used_characters, written

MAX_ERROR = 1000  # characters


class Invalid(Exception):
    """What is wrong with a conversation."""


class Refused(TemplateError):
    """`raise_exception` of a template."""


def environment() -> ImmutableSandboxedEnvironment:
    """Where a template runs: as in transformers (`utils/chat_template_utils.py`), by names and by what they do."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return made


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's type

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body, lineno=line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _Conversations:
    """A template, compiled.

    Args:
        special: texts of special tokens.
    """

    def __init__(self, source: str, special: list[str]) -> None:
        self._template, self._special_text = environment().from_string(source), SpecialText(special)
        self._used = used_characters(json.dumps(source, ensure_ascii=False))

    def render(self, own: dict[str, Any], given: dict[str, Any], continues: bool) -> list[str]:
        """The text of a conversation, in pieces (see `special_text`).

        Args:
            own: variables for the template that may hold special tokens.
            given: variables whose strings are text, "messages" among them.
            continues: end where the content of the last message does.
        """
        unused = unused_characters(self._used | used_characters(json.dumps([own, given], ensure_ascii=False)), 2)
        if len(unused) < 2:
            raise Invalid("hold every character for private use; leave some of U+F0000 to U+10FFFF out")
        mark, end = unused
        marked = _changed(given, lambda text: self._special_text.mark(text, mark))
        content = _mark_end(marked["messages"][-1], end) if continues else ""
        try:
            text = self._template.render({**own, **marked})
        except (TypeError, UndefinedError) as error:
            if not any(isinstance(message.get("content"), list) for message in given["messages"]):
                raise
            what = f"hold a list as content, which this template does not take ({error}): give text"
            raise Invalid(what) from error
        return self._special_text.pieces(_cut_at_end(text, end, content) if continues else text, mark)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A value of JSON with every string changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): _changed(item, change) for key, item in value.items()}
    return [_changed(item, change) for item in value] if isinstance(value, list) else value


def _mark_end(message: dict[str, Any], end: str) -> str:
    """Put `end` and a space behind the content of a message (its last text part); the content before.

    The space shows afterwards whether the template stripped the content, as in transformers.
    """
    content = message.get("content")
    texts = [p for p in content if isinstance(p, dict) and "text" in p] if isinstance(content, list) else []
    part, key = (texts[-1], "text") if texts else (message, "content")
    if not isinstance(content := part.get(key), str):
        raise Invalid("continue_final_message needs a last message with text")
    part[key] = f"{content}{end} "
    return content


def _cut_at_end(text: str, end: str, content: str) -> str:
    """A rendered text up to where the marked content ends."""
    ends = [*written(end).finditer(text)]
    if not ends or content.strip() not in text:
        raise Invalid("continue_final_message needs a last message that the template shows whole")
    before = text[: ends[-1].start()]
    for shown in (f"{end} ", end):  # a template may show the content more than once
        before = written(shown).sub("", before)
    return before if text.startswith(" ", ends[-1].end()) else before.rstrip()


def main(seconds: int, memory: int) -> None:
    """Say that it started; then answer lines of JSON with [kind, answer] (see `template_process`): first [source,
    special tokens], then one [own, given, continues] a conversation.

    Args:
        seconds: of CPU time for one answer.
        memory: bytes of address space.
    """
    time.localtime()  # reads the time zone's file
    codecs.lookup("unicode-escape")  # of jinja2's lexer
    for limit in ("NOFILE", "NPROC", "FSIZE", "CORE", "AS"):
        with suppress(ValueError):  # the limit is lower already
            resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (memory if limit == "AS" else 0,) * 2)
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    conversations: _Conversations | None = None
    _answer("text", [])
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, most))
        try:
            if conversations is None:
                conversations = _Conversations(*json.loads(line))
                _answer("text", [])
            else:
                _answer("text", conversations.render(*json.loads(line)))
        except MemoryError:
            os._exit(1)
        except Refused as error:
            _answer("invalid", f"the chat template refused them: {error}"[:MAX_ERROR])
        except Invalid as error:
            _answer("invalid", str(error))
        except Exception as error:  # whatever code in a template may raise
            _answer("failed" if conversations else "broken", f"{type(error).__name__}: {error}"[:MAX_ERROR])


def _answer(kind: str, answer: str | list[str]) -> None:
    if isinstance(answer, str):  # an error is to be printed, so it holds no lone surrogates
        answer = answer.encode("utf-8", "replace").decode()
    sys.stdout.write(json.dumps([kind, answer]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
