"""Writes the list of rooms and files in docs/files.md from the docstrings of packages and modules."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from documents import ALIASES, ROOT, from_top_to_bottom, is_current, only_checks, package_files, replace_part, room_of

DOCUMENT, PART = "docs/files.md", "files"
WITHOUT_PACKAGE = {  # a regular package `kernels` would hide another one of that name from transformers
    "kernels": "Operations that models call. Knows tensors, their shapes and strides; leaves requests to the engine.",
    "kernels/attention": "Paged attention in Triton. Knows block tables and tiles; leaves the choice of path to ops.",
    "kernels/reference": "Every kernel again in plain torch: the oracle of tests, and the path where there is no GPU.",
    "kernels/moe": "Mixtures of experts in Triton. Knows tiles and experts; leaves who has which weights to others.",
    "kernels/sampling": "From logits to a token in Triton. Knows columns; leaves to the engine who asked for what.",
}


def first_paragraph(path: Path) -> str:
    """What a module or package says of itself first, in one line."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise SystemExit(f"{path.relative_to(ROOT)} has no docstring")
    return " ".join(docstring.split("\n\n")[0].split()).removesuffix(":")


def what_it_knows(room: str) -> str:
    """A room's own words, all of them."""
    if room in WITHOUT_PACKAGE:
        return WITHOUT_PACKAGE[room]
    if room == ALIASES:
        return "The import package: links to the five folders, and the public names."
    docstring = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text()))
    return " ".join((docstring or "").split())


def table() -> str:
    """Every room and its files, the folders from top to bottom."""
    rooms: dict[str, list[Path]] = {}
    for path in package_files():
        rooms.setdefault(room_of(path), []).append(path)
    lines: list[str] = []
    for room in sorted(rooms, key=from_top_to_bottom):
        lines.append(f"\n### {room}/\n\n{what_it_knows(room)}".rstrip() + "\n\n")
        shown = (path for path in rooms[room] if path.name != "__init__.py" or room == ALIASES)
        lines += [f"- `{path.name}` {first_paragraph(path)}\n" for path in shown]
    return "".join(lines)


def main() -> int:
    text = table()
    if only_checks(__doc__):
        return int(not is_current(DOCUMENT, PART, text))
    replace_part(DOCUMENT, PART, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
