"""Where chat templates run: jinja2's immutable sandbox, with bounds on time and memory. A template comes with a model's
files, so it is a stranger's code.

The sandbox alone keeps a template from Python, not from eating the machine. So rounds of loops are counted against a
clock, operations that can make much out of little check the size of their result before they make it, and what needs
no bound in a chat template (padding to a width, `format`) is not there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_TEXT = 8 << 20  # characters of output, of any text on the way, entries of any container with all that is in it
MAX_SECONDS = 5.0
MAX_LOOPS = 1_000_000
MAX_BITS = 4096
MAX_ENTRIES = 100_000

# fmt: off
FILTERS = frozenset({
    "abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby",
    "int", "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse",
    "round", "safe", "select", "selectattr", "sort", "string", "title", "trim", "truncate", "unique", "upper",
    "wordcount",
})
# Filters that walk over all entries of what they get, with no word to the clock
WALKING = frozenset({
    "dictsort", "groupby", "list", "map", "max", "min", "reject", "rejectattr", "reverse", "select", "selectattr",
    "sort", "unique",
})
METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit", "islower",
    "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "upper",
})
# fmt: on


class Refused(Exception):
    """`raise_exception` of a template."""


class LimitReached(Exception):
    """The template asked for more than a chat template may."""


class Meter:
    """What one rendering has used.

    Attributes:
        hooks: the functions that guarded templates call.
    """

    def __init__(self) -> None:
        self._until = time.monotonic() + MAX_SECONDS
        self._loops = 0
        self._size = 0
        self.hooks = {"_wavecore_tick": self._tick, "_wavecore_made": self._made}

    def output(self, text: str) -> None:
        self._size += len(text)
        check_size(self._size)
        self._tick()

    def _tick(self) -> None:
        self._loops += 1
        if self._loops > MAX_LOOPS or time.monotonic() > self._until:
            raise LimitReached(f"more than {MAX_LOOPS} rounds of loops or {MAX_SECONDS} s")

    def _made(self, container: Any) -> Any:
        """A list, tuple or dictionary was written out: bounded with everything inside, or printing it would not be."""
        size, rest = 0, [container]
        while rest:
            value = rest.pop()
            size += len(value) if isinstance(value, str) else 1
            check_size(size)
            if isinstance(value, list | tuple):
                rest += value
            elif isinstance(value, Mapping):
                rest += [*value.keys(), *value.values()]
        self._loops += size // 100
        self._tick()
        return container


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of all templates; `guarded` compiles one."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        ours = {"tojson": _tojson, "replace": _replace, "indent": _indent, "join": _join}
        kept = {name: f for name, f in self.filters.items() if name in FILTERS}
        self.filters = kept | {name: _bounded(kept[name]) for name in WALKING} | ours
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, at most 100,000
            "dict": _dict,
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def guarded(self, source: str) -> Template:
        """Compile a template so that it reports to a `Meter`.

        Raises:
            TemplateError, RecursionError: it does not compile.
        """
        return self.from_string(_Guards().visit(self.parse(source)))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in METHODS
        return super().is_safe_attribute(obj, attr, value) and not isinstance(obj, bytes | int | float)

    def wrap_str_format(self, value: Any) -> None:
        """No `format` of any kind: a width in it makes text out of nothing."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise LimitReached(f"a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            raise LimitReached("% on text is not available in chat templates")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(times, int):
                    check_size(len(sized) * max(times, 0))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            return _replace(owner, *args[:3])
        if isinstance(owner, str) and name == "join" and len(args) == 1:
            return _join(args[0], owner)
        return super().call(context, obj, *args, **kwargs)


def check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise LimitReached(f"more than {MAX_TEXT} characters or entries")


class _Guards(NodeTransformer):
    """Counts each round of a loop and each macro call, measures containers, makes `~` an operation the sandbox sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_hook("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_hook("tick", [], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        text = [nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
        whole: nodes.Expr = text[0]
        for part in text[1:]:
            whole = nodes.Add(whole, part, lineno=node.lineno)
        return whole

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._measured(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._measured(node)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._measured(node) if node.ctx == "load" else node

    def _measured(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        plain = all(isinstance(part, nodes.Const) for part in node.iter_child_nodes())
        return node if plain else _hook("made", [node], node.lineno)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is just text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's type

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    def __repr__(self) -> str:  # namespaces can hold each other; their full text would have no end
        return "<namespace>"


def _hook(name: str, args: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(f"_wavecore_{name}", "load", lineno=line), args, [], None, None, lineno=line)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)  # jinja2's marks on it included
    def checked(*args: Any, **kwargs: Any) -> Any:
        for value in args[:2]:  # the first may be the environment
            if isinstance(value, str | list | tuple | Mapping) and len(value) > MAX_ENTRIES:
                raise LimitReached(f"more than {MAX_ENTRIES} entries for a filter")
        return function(*args, **kwargs)

    return checked


def _dict(*pairs: Any, **entries: Any) -> dict[Any, Any]:
    made = dict(*pairs, **entries)
    Meter()._made(made)
    return made


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    whole, part, other = str(text), str(old), str(new)
    check_size(len(whole) + (whole.count(part) if part else len(whole) + 1) * len(other))
    return whole.replace(part, other, -1 if count is None else count)


def _join(items: Iterable[Any], between: str = "") -> str:
    texts = [str(item) for item in items]
    check_size(len(str(between)) * len(texts) + sum(map(len, texts)))
    return str(between).join(texts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = width if isinstance(width, int) else len(width)
    check_size(len(text) + size * (text.count("\n") + 1))
    return do_indent(text, width, first, blank)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise LimitReached("an indent of more than 16")
    allowed = {k: options[k] for k in ("separators", "sort_keys") if k in options}
    text: str = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)
    return text


def _raise_exception(message: str) -> NoReturn:
    raise Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])
