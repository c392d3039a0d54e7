"""Writes docs/faults.md, "what happens when ...", from the docstrings of the fault tests.

    python scripts/fault_table.py

A fault test's docstring says in its first paragraph what goes wrong and in the second what a user gets; a row of the
table therefore stands only while a test that shows it passes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "faults.md"
HEAD = """# What happens when ...

Made by `python scripts/fault_table.py` from the tests in `tests/faults`; each row is shown by the test that it names.
For all of them: every request ends exactly once, in bounded time, with its cause named; no process, descriptor, thread,
shared memory, socket file or cache block is left behind.
"""


def rows(path: Path) -> Iterator[tuple[str, str, str]]:
    """(what goes wrong, what a user gets, name of the test) of one file of tests."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            what, _, then = (ast.get_docstring(node) or "").partition("\n\n")
            if then:
                yield _one_line(what), _one_line(then), f"{path.stem}::{node.name}"


def table() -> str:
    parts = [HEAD]
    for path in sorted((ROOT / "tests" / "faults").glob("test_*.py")):
        lines = [f"| {what} | {then} | `{name}` |" for what, then, name in rows(path)]
        if lines:
            title = _one_line(ast.get_docstring(ast.parse(path.read_text())) or path.stem)
            parts.append("\n".join([f"## {title}", "", "| When | Then | Test |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    TARGET.write_text(table())
