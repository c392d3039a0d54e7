"""Command lines: every field of EngineConfig as a flag in vLLM's spelling, YAML, environment, and --print_config."""

import json
import os
import re
import sys
from argparse import ArgumentParser, Namespace
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from wavecore.engine_core.api.config import OF_SETTING, EngineConfig
from wavecore.frontend import compat
from wavecore.frontend.compat import ENVIRONMENT, SETTINGS, SHORT_FLAGS, did_you_mean, our_name
from wavecore.transport.errors import ConfigError
from wavecore.transport.small_files import read_small
from wavecore.transport.wire.checks import MAX_TEXT

SHORT = {"-h": "--help"} | {short: f"--{name}" for name, shorts in SHORT_FLAGS.items() for short in shorts}
SEVERAL = ("served_model_name",)  # a flag of vLLM's that takes all the words behind it
REPEATED = ("attach",)  # may be given again and again
OPPOSITE = {"true": "false", "false": "true"}
# Kind of a command's own option -> how its text is read, and what an error calls it
KINDS: Mapping[type, tuple[Any, str]] = {
    str: (str, "text"),
    int: (int, "a whole number"),
    float: (float, "a number"),
    bool: (lambda text: OPPOSITE[text.lower()] == "false", "true or false"),
    tuple: (tuple, "texts"),
    list: (lambda text: list(OF_SETTING.texts("", json.loads(text), 1 << 10, MAX_TEXT)), "a JSON list of texts"),
}
_NAMED = {kind.__name__: kind for kind in KINDS}
OPTIONS: Mapping[str, Mapping[str, tuple[str, Any, str]]] = json.loads(
    Path(__file__).with_name("options.json").read_text("utf-8")
)
"""Options by what shares them, a command or several: name -> kind, default, about."""


class CommandParser:
    """A parser with every setting of the engine, to which a command adds its own options.

    Settings come from, the later the stronger: defaults, `--config FILE`, `WAVECORE_<SETTING>`, flags. A command's own
    options are flags only, so that one file and one environment fit all commands.

    Args:
        name: of the command, as it is called.
        usage: its own arguments in one line.
        about: one sentence.
        words: options and settings that may be given without their flag, in this order.
        options: which of OPTIONS it has.
    """

    def __init__(
        self, name: str, usage: str, about: str, words: Sequence[str] = (), options: Sequence[str] = ()
    ) -> None:
        self._usage = f"{name} {usage} [--SETTING VALUE ...]"
        self._about = about
        self._words = words
        self._options: dict[str, tuple[type, Any, str]] = {}  # the command's own: kind, default, about
        for shared in ("all", *options):
            for option, (kind, default, text) in OPTIONS[shared].items():
                self.option(option, _NAMED[kind], default, text)

    def option(self, name: str, kind: type, default: Any, about: str) -> None:
        """An option of the command's own, of a kind in KINDS."""
        self._options[name] = kind, default, about

    def parse(self, args: Sequence[str], settings: Mapping[str, Any] = SETTINGS) -> Namespace:
        """Values of all options; ends the program after --help and --print_config.

        Args:
            settings: all, with what they are where nothing is given.

        Raises:
            ConfigError: an unknown or malformed argument; says where it came from.
            NotSupportedError: a setting of vLLM that this engine lacks.
        """
        _warn_of_typos()
        flags, words = self._split(args)
        if len(words) > len(self._words):
            raise ConfigError(f"{words[len(self._words)]!r:.80} is one argument too many; see --help")
        for name, word in zip(self._words, words, strict=False):
            if name in flags:
                raise ConfigError(f"{word!r:.80} is one argument too many: {_flag(name)} is given, too")
            flags[name] = [word] if name in REPEATED else word
        own = {name: default for name, (_, default, _) in self._options.items()}
        own |= {name: self._read(name, text) for name, text in flags.items() if name in own}
        typed = {n: compat.typed(n, t) if isinstance(t, str) else t for n, t in flags.items() if n not in own}
        flagged = {name: compat.checked(name, value, _flag(name)) for name, value in typed.items()}
        if own["help"]:
            print(self._help())
            sys.exit(0)
        if own.get("attach") and own.get("url"):
            raise ConfigError("--attach and --url name two engines; give one")
        remote = next((option for option in ("attach", "url") if own.get(option)), None)
        mine = {"attach": "tokenizer", "url": "model"}  # settings that make sense for a client alone
        theirs = [name for name in (*flagged, *(["config"] if own["config"] else [])) if name != mine.get(remote or "")]
        if remote and theirs:
            reason = f"the one of {_flag(remote)} has its settings already"
            raise ConfigError(f"{_flag(theirs[0])} is for an engine that is started; {reason}")
        merged = {**settings, **_read_file(own["config"]), **compat.from_environment(), **flagged}
        if own["print_config"]:
            print(yaml.safe_dump(merged, sort_keys=False), end="")
            sys.exit(0)
        return Namespace(**merged, **own)

    def _split(self, args: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """The text of each option and setting, or its texts, by its name, and the words between them.

        Raises:
            ConfigError: an unknown flag, or one without its value.
            NotSupportedError: a flag of vLLM that asks for what this engine lacks.
        """
        flags: dict[str, Any] = {}
        words: list[str] = []
        rest = deque(args)
        while rest:
            name, equals, text = rest.popleft().partition("=")
            word = SHORT.get(name, name) + equals + text
            if word == "--":
                words += rest
                break
            if not word.startswith("--"):
                if word.startswith("-") and not _is_value(word):
                    raise ConfigError(f"{word!r:.80}: no such option; see --help")
                words.append(word)
                continue
            name, value = self._spell(word, rest)
            known = name in self._options or name in SETTINGS
            if not known and name not in compat.FOREIGN:
                hint = did_you_mean(name, [*self._options, *SETTINGS], "; see --help", _flag)
                raise ConfigError(f"{_flag(name)}: no such option{hint}")
            if value is None:
                raise ConfigError(f"{_flag(name)} needs a value")
            if not known and compat.asks_for_nothing(name, compat.yaml_value(value)):
                continue
            if name in REPEATED:
                flags[name] = [*flags.get(name, ()), value]
                continue
            more = []
            while name in SEVERAL and rest and _is_value(rest[0]):
                more.append(rest.popleft())
            flags[name] = [value, *more] if more else value
        return flags, words

    def _spell(self, word: str, rest: deque[str]) -> tuple[str, str | None]:
        """Name and value of a flag in any spelling: `--max-model-len 5`, `--disable_tqdm`, `--no-disable-tqdm=true`.

        Args:
            rest: the words behind it; a value is taken from there.
        """
        flag, equals, text = word[2:].partition("=")
        name = our_name(flag)
        negated = name.startswith("no_") and name[3:] in self._switches
        name = name[3:] if negated else name
        value: str | None = text if equals else None
        if value is None and name in self._switches:
            value = rest.popleft() if rest and rest[0].lower() in OPPOSITE else "true"
        elif value is None and rest and _is_value(rest[0]):
            value = rest.popleft() or None  # empty where a shell's variable is not set
        return name, OPPOSITE.get(str(value).lower(), value) if negated else value

    @cached_property
    def _switches(self) -> frozenset[str]:
        return compat.SWITCHES | {name for name, (kind, _, _) in self._options.items() if kind is bool}

    def _read(self, name: str, text: str) -> Any:
        read, what = KINDS[self._options[name][0]]
        try:
            return read(text)
        except (KeyError, ValueError, RecursionError):
            raise ConfigError(f"{_flag(name)} must be {what}, not {text!r:.80}") from None

    def _help(self) -> str:
        parser = ArgumentParser(usage=self._usage, description=self._about, add_help=False)
        for name, (kind, _, about) in self._options.items():
            _explain(parser, name, kind, about)
        group = parser.add_argument_group("settings of the engine, each with its variable in the environment")
        abouts = field_help(EngineConfig)
        for name, kind in get_type_hints(EngineConfig).items():
            about = f"{abouts[name]} ({ENVIRONMENT}{name.upper()}, default: {SETTINGS[name]})"
            _explain(group, name, kind, about)
        return parser.format_help()


def _explain(group: Any, name: str, kind: Any, about: str) -> None:
    metavar = "[true|false]" if kind is bool else None
    if get_origin(kind) is Literal:
        metavar = "|".join(get_args(kind))
    group.add_argument(_flag(name), metavar=metavar, help=about.replace("%", "%%"))


def _read_file(path: str) -> dict[str, Any]:
    """Settings of a YAML file, in any spelling that flags may have; none without a path."""
    try:
        content = compat.read_yaml(read_small(Path(path)).decode()) if path else None
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path}: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping | None):
        raise ConfigError(f"--config {path}: must hold lines of the form `setting: value`")
    return compat.read_settings(content or {}, f" in {path}", "; see --help")


def _warn_of_typos() -> None:
    known = {ENVIRONMENT + name.upper() for name in SETTINGS} | {"WAVECORE_CACHE", "WAVECORE_API_KEY"}
    for name, value in os.environ.items():  # no error: Kubernetes makes up such names too
        if name.startswith(ENVIRONMENT) and value and name not in known:
            hint = did_you_mean(name, known, "; see --help")
            print(f"wavecore: {name} in the environment is no setting{hint}", file=sys.stderr)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _is_value(word: str) -> bool:
    """No flag: a text, "-" for the standard input, a negative number."""
    return not word.startswith("-") or bool(re.fullmatch(r"-|-\.?\d.*", word))


def field_help(cls: type) -> dict[str, str]:
    """Field of a dataclass -> its lines in the docstring."""
    found: dict[str, str] = {}
    for names, text in re.findall(r"^ {8}(\w[\w, ]*): (.+(?:\n {12}.+)*)", cls.__doc__ or "", re.MULTILINE):
        found |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return found


def settings(values: Namespace) -> EngineConfig:
    """The engine's part of parsed values.

    Raises:
        ConfigError, NotSupportedError: a setting that cannot work.
    """
    return compat.engine_config({name: getattr(values, name) for name in SETTINGS})
