"""Chat templates: code from a model's files, so it runs in jinja2's immutable sandbox with limits. Knows no tokenizer.

The sandbox alone does not bound time or memory. Loops are counted, growing operations check their result's size
before it is made, filters and methods that can grow text out of nothing are not there, and output is counted.
Follows transformers' dialect (`trim_blocks`, `lstrip_blocks`, `break`/`continue`, `raise_exception`, `strftime_now`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from wavecore.transport.errors import ModelError, ValidationError

MAX_TEMPLATE = 1 << 20  # characters of source
MAX_TEXT = 8 << 20  # characters of output, or of any string on the way
MAX_SECONDS = 5.0
MAX_LOOPS = 1_000_000
MAX_BITS = 4096

FILTERS = frozenset(
    "abs attr batch capitalize count d default dictsort e escape first float groupby int items join last length list "
    "lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string sum title trim "
    "truncate unique upper wordcount".split()
)
# str methods whose result is as long as a number in the template says
GROWING = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "format", "format_map", "translate"})


class ChatTemplate:
    """A compiled template.

    Args:
        source: jinja2 text.
        origin: the file it came from, for errors.

    Raises:
        ModelError: the template does not compile.
    """

    def __init__(self, source: str, origin: str) -> None:
        self.origin = origin
        self.source = source
        if len(source) > MAX_TEMPLATE:
            raise ModelError(f"{origin}: the chat template has {len(source)} characters; the limit is {MAX_TEMPLATE}")
        self._environment = _Sandbox()
        try:
            tree = _Guards().visit(self._environment.parse(source))
            self._template = self._environment.from_string(tree)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"{origin}: the chat template does not compile: {error}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """The prompt's text.

        Raises:
            ValidationError: the template refused the messages, broke a limit of the sandbox or failed.
        """
        meter = _Meter()
        parts: list[str] = []
        try:
            for part in self._template.generate({**variables, "_wavecore_tick": meter.tick}):
                meter.size(len(part))
                parts.append(part)
        except _Refused as error:
            raise ValidationError("messages", f"the chat template refused them: {error}") from error
        except Exception as error:  # whatever code in a template may raise
            raise ValidationError("messages", f"the chat template of {self.origin} failed: {error!r:.300}") from error
        return "".join(parts)


class _Refused(Exception):
    """`raise_exception` of a template."""


class _LimitReached(Exception):
    pass


class _Meter:
    def __init__(self) -> None:
        self._until = time.monotonic() + MAX_SECONDS
        self._loops = 0
        self._size = 0

    def tick(self) -> str:
        self._loops += 1
        if self._loops > MAX_LOOPS or time.monotonic() > self._until:
            raise _LimitReached(f"more than {MAX_LOOPS} rounds of loops or {MAX_SECONDS} s")
        return ""

    def size(self, more: int) -> None:
        self._size += more
        _check_size(self._size)
        self.tick()


class _Guards(NodeTransformer):
    """Counts each round of a loop and each macro call, and makes `~` an operation that the sandbox sees."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - jinja2's name
        self.generic_visit(node)
        node.body.insert(0, _tick(node.lineno))
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, _tick(node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        text = [nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes]
        whole: nodes.Expr = text[0]
        for part in text[1:]:
            whole = nodes.Add(whole, part, lineno=node.lineno)
        return whole


def _tick(line: int) -> nodes.Node:
    call = nodes.Call(nodes.Name("_wavecore_tick", "load", lineno=line), [], [], None, None, lineno=line)
    return nodes.ExprStmt(call, lineno=line)


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters = {name: f for name, f in self.filters.items() if name in FILTERS}
        self.filters["tojson"] = _tojson
        self.filters["replace"] = _replace
        self.globals = {
            "range": self.globals["range"],  # the sandbox's, at most 100,000
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (isinstance(obj, str) and attr in GROWING)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS:
                raise _LimitReached(f"a number of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            raise _LimitReached("% on text is not available in chat templates")
        elif operator == "*":
            for sized, times in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(times, int):
                    _check_size(len(sized) * max(times, 0))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, str) and name == "replace" and len(args) >= 2:
            return _replace(owner, *args[:3])
        if isinstance(owner, str) and name == "join" and len(args) == 1:
            items = list(args[0])
            _check_size(len(owner) * len(items) + sum(len(i) for i in items if isinstance(i, str)))
            return owner.join(items)
        return super().call(context, obj, *args, **kwargs)


def _check_size(size: int) -> None:
    if size > MAX_TEXT:
        raise _LimitReached(f"more than {MAX_TEXT} characters")


def _replace(text: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = str(text), str(old), str(new)
    _check_size(len(text) + (text.count(old) if old else len(text) + 1) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise _LimitReached("an indent of more than 16")
    allowed = {k: options[k] for k in ("separators", "sort_keys") if k in options}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **allowed)


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form[:100])
