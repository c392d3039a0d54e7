"""Command lines from EngineConfig: flags in vLLM's spelling, YAML, environment, --print_config. Knows no command."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import yaml
from jsonargparse import ArgumentParser, Namespace

from wavecore.engine_core.config import EngineConfig
from wavecore.frontend.vllm_names import RENAMED, asks_for_nothing, engine_config, is_switch

SHORT = {"-tp": "--tensor_parallel_size", "-dp": "--data_parallel_size"}
_SWITCHES = frozenset(f.name for f in fields(EngineConfig) if f.type in ("bool", bool))


class CommandParser:
    """A parser with every setting of the engine, to which a command adds its own options.

    Settings come from, the later the stronger: defaults, `--config FILE`, `WAVECORE_<SETTING>`, flags.

    Args:
        name: of the command.
        usage: its own arguments in one line.
        about: one sentence.
    """

    def __init__(self, name: str, usage: str, about: str) -> None:
        self._switches = set(_SWITCHES)
        self._name = name
        self.options = ArgumentParser(
            prog=f"wavecore {name}",
            usage=f"wavecore {name} {usage} [--SETTING VALUE ...]",
            description=about,
            default_env=True,
            env_prefix="WAVECORE",
        )
        self.options.add_argument(
            "--config", action="config", help="YAML file of settings, as --print_config writes it"
        )
        self.options.add_class_arguments(EngineConfig, None)
        helps = _setting_help()
        for action in self.options._actions:
            action.help = helps.get(action.dest, action.help)

    def switch(self, name: str, text: str) -> None:
        """An option without a value."""
        self._switches.add(name)
        self.options.add_argument(f"--{name}", type=bool, default=False, help=text)

    def parse(self, args: Sequence[str]) -> Namespace:
        """Values of all options; ends the program with usage on a bad command line."""
        known = {f"WAVECORE_{action.dest.upper()}" for action in self.options._actions} | {"WAVECORE_CACHE"}
        for name, value in list(os.environ.items()):
            if name.startswith("WAVECORE_") and not value:  # an empty variable means "not set"
                del os.environ[name]
            elif name.startswith("WAVECORE_") and name not in known:  # no error: Kubernetes makes up such names too
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {close[0]}?" if close else ""
                print(f"wavecore: {name} in the environment is no setting{hint}", file=sys.stderr)
        return self.options.parse_args(spell(args, self._switches))


def model_as_flag(args: Sequence[str]) -> list[str]:
    """`MODEL --SETTING ...` with the model as a setting, too."""
    if args and not args[0].startswith("-"):
        return [f"--model={args[0]}", *args[1:]]
    return list(args)


def settings(values: Namespace) -> EngineConfig:
    """The engine's part of parsed values.

    Raises:
        ConfigError, NotSupportedError: a setting that cannot work.
    """
    return engine_config({f.name: values[f.name] for f in fields(EngineConfig)})


def spell(args: Sequence[str], switches: set[str]) -> list[str]:
    """`--max-model-len 5`, `--disable-tqdm`, `--no-enable-prefix-caching`, `-tp 2` as jsonargparse wants them.

    Raises:
        NotSupportedError: a flag of vLLM that asks for what this engine lacks.
    """
    spelled: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return [*spelled, word, *rest]
        flag, equals, value = SHORT.get(word, word).partition("=")
        if not flag.startswith("--"):
            spelled.append(word)
            continue
        name = flag[2:].replace("-", "_")
        name = RENAMED.get(name, name)
        negated = name.startswith("no_") and (name[3:] in switches or is_switch(name[3:]))
        name = name[3:] if negated else name
        if not equals and (name in switches or is_switch(name)):
            given = rest.pop(0) if rest and rest[0].lower() in ("true", "false") else "true"
            value = str((given.lower() == "true") is not negated).lower()
        elif not equals and rest and not rest[0].startswith("-"):
            value = rest.pop(0)
        if not asks_for_nothing(name, yaml.safe_load(value)):
            spelled += [f"--{name}={value}"] if value or equals else [f"--{name}"]
    return spelled


def _setting_help() -> dict[str, str]:
    """Setting -> its line in EngineConfig's docstring."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (EngineConfig.__doc__ or "").partition("Attributes:")[2].splitlines():
        start = re.fullmatch(r" {8}(\w+(?:, \w+)*): (.*)", line)
        if start:
            names = start[1].split(", ")
            found |= dict.fromkeys(names, start[2])
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return {name: text.replace("%", "%%") for name, text in found.items()}


def add_sampling(parser: CommandParser, max_tokens: int) -> None:
    """Options that become SamplingParams."""
    add: Any = parser.options.add_argument
    add("--max_tokens", type=int, default=max_tokens, help="longest answer")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_p", type=float, default=1.0, help="nucleus sampling")
    add("--top_k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all")
    add("--sampling_seed", type=int | None, default=None, help="seed of this program's requests")
    add("--stop", type=list[str] | None, default=None, help="strings that end the answer, as a JSON list")
