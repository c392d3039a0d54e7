#!/usr/bin/env python3
"""Writes the list of files in ARCHITECTURE.md from the first line of each module's docstring.

usage: file_table.py [--check]     --check only says whether the list is current (exit status 1 if not)
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("frontend", "engine_core", "parallel", "kernels", "transport")
START, END = "<!-- files: written by scripts/file_table.py -->\n", "<!-- end of files -->\n"


def first_sentence(path: Path) -> str:
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return paragraph.removesuffix(":")


def table() -> str:
    lines = []
    for folder in FOLDERS:
        rooms = sorted({path.parent for path in (ROOT / folder).rglob("*.py")})
        for room in rooms:
            lines.append(f"\n### {room.relative_to(ROOT)}/\n\n")
            paths = sorted(path for path in room.glob("*.py") if path.name != "__init__.py")
            lines += [f"- `{path.name}` {first_sentence(path)}\n" for path in paths]
    return "".join(lines) + "\n"


def main() -> int:
    path = ROOT / "ARCHITECTURE.md"
    before, _, rest = path.read_text().partition(START)
    _, _, after = rest.partition(END)
    text = before + START + table() + END + after
    if "--check" in sys.argv[1:]:
        return int(text != path.read_text())
    path.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
