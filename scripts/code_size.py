"""Code lines of the package, by folder and room, against its budget.

    python scripts/code_size.py            print the table
    python scripts/code_size.py --write    ... and put it into ARCHITECTURE.md
    python scripts/code_size.py --check    say whether that table is current and the budget kept (exit status 1 if not)

A code line is one that holds more than a comment or a docstring. Tables of names that are data files do not count. The
budget is part of the design: raise it in the change that needs it, and say there what for.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

from documents import FOLDERS, ROOT, from_top_to_bottom, is_current, package_files, replace_part, room_of

SPINE = (
    "engine_core/loop",
    "engine_core/scheduling",
    "engine_core/kv_cache",
    "engine_core/execution",
    "engine_core/request.py",
    "engine_core/plan.py",
)
BUDGET = {"spine": 3_800, "package": 21_950}
DOCUMENT, PART = "ARCHITECTURE.md", "sizes"
_NO_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def code_lines(source: str) -> int:
    """Lines that hold code: no blank lines, no comments, no docstrings (any text that stands alone as a statement)."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def is_spine(path: Path) -> bool:
    name = path.relative_to(ROOT).as_posix()
    return any(name == part or name.startswith(f"{part}/") for part in SPINE)


def table() -> tuple[str, dict[str, int]]:
    """The table as Markdown, and the sums that have a budget."""
    rooms: dict[str, Counter[str]] = {}  # by folder; "" for the files at its top
    sums = dict.fromkeys(BUDGET, 0)
    for path in sorted(package_files(), key=lambda path: from_top_to_bottom(room_of(path))):
        count = code_lines(path.read_text())
        folder, _, room = room_of(path).partition("/")
        rooms.setdefault(folder, Counter())[room if folder in FOLDERS else ""] += count
        sums["package"] += count
        sums["spine"] += count if is_spine(path) else 0
    rows = ["| folder | of that in its rooms | code lines |", "|---|---|---:|"]
    for folder, lines in rooms.items():
        parts = ", ".join(f"{room} {count:,}" for room, count in lines.items() if room)
        rows.append(f"| {folder} | {parts} | {lines.total():,} |")
    rows += [f"| **{name}** | budget {BUDGET[name]:,} | {count:,} |" for name, count in sums.items()]
    return "\n".join(rows) + "\n", sums


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the table into {DOCUMENT}")
    parser.add_argument("--check", action="store_true", help="exit status 1 where it is stale or above the budget")
    arguments = parser.parse_args()
    text, sums = table()
    print(text, end="")
    if arguments.write:
        replace_part(DOCUMENT, PART, text)
    if not arguments.check:
        return 0
    faults = [f"the {name} has {count:,} code lines, its budget is {BUDGET[name]:,}" for name, count in sums.items()
              if count > BUDGET[name]]  # fmt: skip
    if not is_current(DOCUMENT, PART, text):
        faults.append(f"the table in {DOCUMENT} is stale: run scripts/code_size.py --write")
    print("\n".join(faults), file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
