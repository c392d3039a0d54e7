"""Command lines from EngineConfig: flags in vLLM's spelling, YAML, environment, --print_config. Knows no command."""

from __future__ import annotations

import argparse
import difflib
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser, Namespace

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.compat import (
    ENVIRONMENT,
    RENAMED,
    asks_for_nothing,
    checked,
    engine_config,
    from_environment,
    is_switch,
    plain,
    typed,
)
from wavecore.transport.errors import ConfigError

SHORT = {"-tp": "--tensor_parallel_size", "-dp": "--data_parallel_size"}
_FIELDS = tuple(f.name for f in fields(EngineConfig))
_SWITCHES = frozenset(f.name for f in fields(EngineConfig) if f.type in ("bool", bool))
_TYPES = {"int": "a whole number", "float": "a number", "_switch": "true or false", "_texts": "a JSON list of texts"}


class _Options(argparse.ArgumentParser):
    """argparse whose errors are ours."""

    def error(self, message: str) -> NoReturn:
        bad = re.fullmatch(r"argument --(\w+): invalid (\w+) value: (.*)", message, re.DOTALL)
        raise ConfigError(f"{_flag(bad[1])} must be {_TYPES[bad[2]]}, not {bad[3]:.80}" if bad else message)


class CommandParser:
    """A parser with every setting of the engine, to which a command adds its own options.

    Settings come from, the later the stronger: defaults, `--config FILE`, `WAVECORE_<SETTING>`, flags. A command's own
    options are flags only, so that one file and one environment fit all commands.

    Args:
        name: of the command.
        usage: its own arguments in one line.
        about: one sentence.
        words: destinations of arguments that are no flags, in order.
    """

    def __init__(self, name: str, usage: str, about: str, words: Sequence[str] = ()) -> None:
        self._switches = set(_SWITCHES)
        self._words = words
        usage = f"wavecore {name} {usage} [--SETTING VALUE ...]"
        self.options = _Options(usage=usage, description=about, add_help=False, allow_abbrev=False)
        self.options.add_argument("--config", default="", help="YAML file of settings, as --print_config writes it")
        self.switch("print_config", "print all settings as YAML, and end")
        self.switch("help", "print this, and end")
        self._settings = ArgumentParser(  # its environment is for the help only; from_environment reads it
            usage=argparse.SUPPRESS, add_help=False, exit_on_error=False, default_env=True, env_prefix="WAVECORE"
        )
        self._settings.add_class_arguments(EngineConfig, None)
        self._settings._action_groups[-1].title = "settings of the engine"
        helps = _setting_help()
        for action in self._settings._actions:
            action.help = helps.get(action.dest, action.help)

    def switch(self, name: str, text: str) -> None:
        """An option without a value."""
        self._switches.add(name)
        self.options.add_argument(f"--{name}", type=_switch, default=False, metavar="", help=text)

    def parse(self, args: Sequence[str]) -> Namespace:
        """Values of all options; ends the program after --help and --print_config.

        Raises:
            ConfigError: an unknown or malformed argument; says where it came from.
            NotSupportedError: a setting of vLLM that this engine lacks.
        """
        _tell_typos()
        options = {action.dest for action in self.options._actions}
        own: list[str] = []
        flags: dict[str, Any] = {}
        words: list[str] = []
        spelled = spell(args, self._switches)
        while spelled:
            word = spelled.pop(0)
            if word == "--":
                words += spelled
                break
            name, equals, value = word[2:].partition("=")
            if word == "-h":
                own.append("--help=true")
            elif not word.startswith("--"):
                words.append(word)
            elif name not in options and name not in _FIELDS:
                raise ConfigError(f"{_flag(name)}: no such option{_close(name, options | set(_FIELDS), _flag)}")
            elif not equals:
                raise ConfigError(f"{_flag(name)} needs a value")
            elif name in options:
                own.append(word)
            else:
                flags[name] = checked(name, typed(name, value), _flag(name))
        if len(words) > len(self._words):
            raise ConfigError(f"{words[len(self._words)]!r:.80} is one argument too many; see --help")
        given = vars(self.options.parse_args(own))
        if given["help"]:
            print(self.options.format_help() + "\n" + self._settings.format_help())
            sys.exit(0)
        if given.get("attach") and (flags or given["config"]):
            name = _flag(next(iter(flags), "config"))
            raise ConfigError(f"{name} is for an engine that is started; the one of --attach has its settings already")
        merged = {**(_read_file(given["config"]) if given["config"] else {}), **from_environment(), **flags}
        values = self._settings.parse_object(merged, env=False)
        if given["print_config"]:
            print(yaml.safe_dump(values.as_dict(), sort_keys=False), end="")
            sys.exit(0)
        values.update(Namespace({**given, **dict(zip(self._words, [*words, *[""] * len(self._words)], strict=False))}))
        return values


def _tell_typos() -> None:
    known = {ENVIRONMENT + name.upper() for name in _FIELDS} | {"WAVECORE_CACHE"}
    for name, value in os.environ.items():  # no error: Kubernetes makes up such names too
        if name.startswith(ENVIRONMENT) and value and name not in known:
            print(f"wavecore: {name} in the environment is no setting{_close(name, known)}", file=sys.stderr)


def _read_file(path: str) -> dict[str, Any]:
    """Settings of a YAML file, in any spelling that flags may have."""
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping | None):
        raise ConfigError(f"--config {path}: must hold lines of the form `setting: value`")
    settings: dict[str, Any] = {}
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        name = RENAMED.get(name, name)
        if name in _FIELDS:
            settings[name] = checked(name, value, f"{key} in {path}")
        elif not asks_for_nothing(name, value):
            raise ConfigError(f"--config {path}: unknown setting {key}{_close(name, _FIELDS)}")
    return settings


def _close(name: str, known: Iterable[str], spelling: Callable[[str], str] = str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {spelling(close[0])}?" if close else "; see --help"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _switch(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


def _texts(text: str) -> list[str]:
    texts = json.loads(text)
    if not isinstance(texts, list) or not all(isinstance(part, str) for part in texts):
        raise ValueError
    return texts


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
    return engine_config({name: values[name] for name in _FIELDS})


def spell(args: Sequence[str], switches: set[str]) -> list[str]:
    """`--max-model-len 5`, `--disable-tqdm`, `--no-enable-prefix-caching`, `-tp 2` as `--name=value`.

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
        elif not equals and rest and (not rest[0].startswith("-") or re.fullmatch(r"-|-\.?\d.*", rest[0])):
            value = rest.pop(0)
        if not asks_for_nothing(name, plain(value)):
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
    add("--sampling_seed", type=int, default=None, help="seed of this program's requests")
    add("--stop", type=_texts, default=None, help="strings that end the answer, as a JSON list")
