"""Writes docs/faults.md, "what happens when ...", and its headlines in README.md from the fault tests' docstrings.

    python scripts/fault_table.py

A fault test's docstring says in its first paragraph what goes wrong and in the second what a user gets; a row of the
table therefore stands only while a test that shows it passes.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "faults.md"
TESTS = ROOT / "tests" / "faults"
README = ROOT / "README.md"
START, END = "<!-- faults: written by scripts/fault_table.py -->\n", "<!-- end of faults -->\n"
HEADLINES = (
    "test_engine_death::test_engine_killed_mid_stream",
    "test_engine_death::test_waiting_requests_survive_a_killed_engine",
    "test_engine_death::test_resumed_request_goes_on",
    "test_engine_death::test_batch_keeps_what_it_can",
    "test_engine_death::test_request_that_kills_its_engine",
    "test_engine_death::test_engine_that_cannot_be_started_again",
    "test_groups::test_killed_rank",
    "test_several_hosts::test_stopped_host",
    "test_hosts::test_stopped_host",
    "test_ray::test_killed_actor",
    "test_pipelines::test_a_stage_killed_mid_stream",
    "test_stuck::test_hanging_step",
    "test_process_life::test_killed_program",
    "test_process_life::test_drain",
    "test_environment::test_files_that_a_cleaner_takes",
    "test_isolation::test_nan_in_one_row",
    "test_isolation::test_out_of_memory_once",
    "test_overload::test_more_requests_than_the_queue_takes",
    "test_overload::test_consumer_leaves",
    "test_backpressure::test_client_that_stands_still_for_long",
    "test_backpressure::test_hostile_frames",
)
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
    """docs/faults.md: every row, by file of tests."""
    parts = [HEAD]
    for path in sorted(TESTS.glob("test_*.py")):
        lines = [f"| {what} | {then} | `{name}` |" for what, then, name in rows(path)]
        if lines:
            title = _one_line(ast.get_docstring(ast.parse(path.read_text())) or path.stem)
            parts.append("\n".join([f"## {title}", "", "| When | Then | Test |", "|---|---|---|", *lines, ""]))
    return "\n".join(parts)


def readme() -> str:
    """README.md with the rows of HEADLINES between its markers."""
    found = {name: (what, then) for path in TESTS.glob("test_*.py") for what, then, name in rows(path)}
    lines = "".join(f"| {found[name][0]} | {found[name][1]} |\n" for name in HEADLINES)
    before, _, rest = README.read_text().partition(START)
    return f"{before}{START}\n| When | Then |\n|---|---|\n{lines}\n{END}{rest.partition(END)[2]}"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    TARGET.write_text(table())
    README.write_text(readme())
