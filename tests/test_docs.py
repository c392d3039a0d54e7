"""The documents that are made from the code are current, and what they name exists."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from documents import ROOT

from wavecore.frontend.cli.main import main
from wavecore.frontend.cli.parser import CommandParser

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("script", ["file_table", "settings_page", "vllm_page"])
def test_made_from_the_code(script: str) -> None:
    run = subprocess.run([sys.executable, f"scripts/{script}.py", "--check"], cwd=ROOT, check=False)
    assert run.returncode == 0, f"run scripts/{script}.py"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path: Path) -> None:
    """Paths in backquotes, and targets of links, from the root or from the document's folder."""
    text = path.read_text()
    names = re.findall(r"`((?:[\w.]+/)+[\w.]+\.(?:py|md|sh|toml|txt|json))(?:::\w+)?`", text)
    names += [name for name in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in name]
    missing = [name for name in names if not (ROOT / name).exists() and not (path.parent / name).exists()]
    assert not missing


class Parsed(Exception):
    """A command line has been read: all of its options exist."""


def command_lines(path: Path) -> list[list[str]]:
    """The words of each `wavecore ...` of a document's blocks, those behind torchrun too, without "wavecore"."""
    text = path.read_text().replace("\\\n", " ")
    found = re.findall(r"^ {4}(?:\w+\$ |\w+=\S+ |torchrun .* -m )?wavecore (.*)", text, re.MULTILINE)
    return [shlex.split(line.partition(" > ")[0], comments=True) for line in found]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_options_of_commands_exist(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parse_args = ArgumentParser.parse_args

    def read(parser: CommandParser, args: Sequence[str]) -> None:
        parser._split(args)
        raise Parsed

    def read_places(parser: ArgumentParser, args: Sequence[str]) -> None:
        parse_args(parser, args)
        raise Parsed

    monkeypatch.setattr(CommandParser, "parse", read)
    monkeypatch.setattr(ArgumentParser, "parse_args", read_places)
    for command, *args in command_lines(path):
        if command != "run-vllm":  # whose options are those of the program that it runs
            with pytest.raises(Parsed):
                main([command, *args])


def test_the_rule_for_commands_sees_them() -> None:
    found = command_lines(ROOT / "docs" / "several-hosts.md")
    assert ["access", "DIR"] in found and ["chat", "--attach", "DIR"] in found
    assert sum(words[:2] == ["engine", "./my-llama"] and words[-1] == "./keys" for words in found) == 2  # torchrun's


def recipe_steps() -> list[str]:
    """The steps of CONTRIBUTING's recipes, each as one line."""
    recipes = (ROOT / "CONTRIBUTING.md").read_text().split("\n## Add ")[1:]
    return [" ".join(step.split()) for recipe in recipes for step in re.split(r"\n(?=\d\. )|\n\n", recipe)]


def names_by_file(step: str) -> list[tuple[Path, str]]:
    """(file, name): each name of code in backquotes with the file that it is named with: the one that the same phrase
    gives by "`name` in (or of, ...) `path`", else the last one before it."""
    found: list[tuple[Path, str]] = []
    path: Path | None = None
    waiting: list[str] = []
    for quoted in re.findall(r"`([^`]+)`", step):
        if (ROOT / quoted).is_file():
            path = ROOT / quoted
            found += [(path, name) for name in waiting]
            waiting = []
        elif re.fullmatch(r"[A-Za-z_]\w*", quoted):
            if re.search(rf"`{quoted}` (?:\([^)]*\) )?(?:in|of) (?:the )?`[\w/]+\.py`", step) or path is None:
                waiting.append(quoted)
            else:
                found.append((path, quoted))
    return found


def test_names_in_recipes_are_in_the_files_they_are_named_with() -> None:
    found = [pair for step in recipe_steps() for pair in names_by_file(step)]
    assert len(found) > 15
    assert not [
        f"{path.relative_to(ROOT)}: {name}" for path, name in found if not re.search(rf"\b{name}\b", path.read_text())
    ]


def test_the_rule_for_names_in_recipes_sees_a_wrong_one() -> None:
    step = "`engine_core/plan.py`: a field of `StepPlan`, and `nothing` in `engine_core/request.py`"
    assert names_by_file(step) == [
        (ROOT / "engine_core/plan.py", "StepPlan"),
        (ROOT / "engine_core/request.py", "nothing"),
    ]


def test_the_rule_for_names_sees_the_documents() -> None:
    assert {"ARCHITECTURE.md", "README.md", "faults.md", "files.md", "walk.md"} <= {path.name for path in DOCUMENTS}


def test_hooks_run_what_ci_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert len(hooks) > 5
    assert not [hook["entry"] for hook in hooks if hook["entry"] not in ci]
