"""The program that renders a chat template, as a process of its own; `template_process` runs it. It imports jinja2 and
the standard library alone, so it starts in a moment and stays small.

A template is a stranger's code. What it can reach is jinja2's immutable sandbox with what transformers gives to
templates, nothing more and nothing less. What it can use up is bounded by the limits of this process, because no check
inside Python bounds what one call of C code takes.
"""

from __future__ import annotations

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
from functools import lru_cache
from typing import Any, NoReturn

import jinja2.constants
import jinja2.debug  # noqa: F401
from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_ERROR = 1000  # characters


class Refused(TemplateError):
    """`raise_exception` of a template."""


def environment() -> ImmutableSandboxedEnvironment:
    """Where a template runs: as in transformers (`utils/chat_template_utils.py`), by names and by what they do."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    made.filters["tojson"] = _tojson
    made.globals |= {"namespace": _Namespace, "raise_exception": _raise_exception, "strftime_now": _strftime_now}
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


class _Namespace(Namespace):
    """Without names that begin with an underscore, which could stand in for Python's own."""

    def __init__(self, /, *pairs: Any, **entries: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **entries).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"{name!r:.80} cannot be an attribute of a namespace")
        super().__setitem__(name, value)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: Any = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


@lru_cache(1)
def _compiled(source: str) -> Template:
    return environment().from_string(source)


def main(seconds: int, memory: int) -> None:
    """Say that it started; then answer lines of JSON, [source, variables], with [kind, text] (see `template_process`).

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
    _answer("text", "")
    for line in sys.stdin:
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, most))
        kind = "broken"
        try:
            source, variables = json.loads(line)
            template = _compiled(source)
            kind = "failed"
            _answer("text", template.render(variables))
        except MemoryError:
            os._exit(1)
        except Refused as error:
            _answer("refused", str(error)[:MAX_ERROR])
        except Exception as error:  # whatever code in a template may raise
            _answer(kind, f"{type(error).__name__}: {error}"[:MAX_ERROR])


def _answer(kind: str, text: str) -> None:
    sys.stdout.write(json.dumps([kind, text]) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
