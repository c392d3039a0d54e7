"""What the scripts that write parts of the documents share: the package's files, and the parts between two comments."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FOLDERS = ("frontend", "engine_core", "parallel", "kernels", "transport")
ALIASES = "src/wavecore"  # the import package: modules of its own, and links to the five folders


def only_checks(script: str | None) -> bool:
    """Whether a script, with this docstring, is called with `--check`: it says with its exit status what is stale."""
    parser = argparse.ArgumentParser(description=script, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where it is not current")
    return bool(parser.parse_args().check)


def package_files() -> list[Path]:
    """Every Python file that the wheel holds, once each: those behind the links of src/wavecore lie in the folders."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found += _behind_no_link(ROOT / ALIASES)
    return sorted(found)


def _behind_no_link(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            yield from _behind_no_link(path)
        elif path.suffix == ".py":
            yield path


def room_of(path: Path) -> str:
    """The folder that a file lies in, from the root: "engine_core/loop"."""
    return path.parent.relative_to(ROOT).as_posix()


def from_top_to_bottom(room: str) -> tuple[int, str]:
    """Key for sorting rooms: by folder, in the order of layers, then by name."""
    return [*FOLDERS, ALIASES.split("/")[0]].index(room.split("/")[0]), room


def part(document: str, name: str) -> str:
    """What stands in a document between its comments `name: ...` and `end of name`."""
    return _split(document, name)[1]


def replace_part(document: str, name: str, body: str) -> None:
    """Put `body` between these comments, with an empty line on both sides."""
    before, _, after = _split(document, name)
    (ROOT / document).write_text(f"{before}\n{body.strip()}\n\n{after}")


def is_current(document: str, name: str, body: str) -> bool:
    return part(document, name).strip() == body.strip()


def _split(document: str, name: str) -> tuple[str, str, str]:
    text = (ROOT / document).read_text()
    head, start, rest = text.partition(f"<!-- {name}: ")
    comment, close, rest = rest.partition("-->\n")
    body, end, tail = rest.partition(f"<!-- end of {name} -->")
    if not (start and close and end):
        raise SystemExit(f"{document} has no part {name!r} between its two comments")
    return head + start + comment + close, body, end + tail
