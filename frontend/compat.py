"""What users of vLLM type on the first day, mapped to our settings or refused with the way out: `compat.json`, applied.

Settings come from keywords, files, flags and the environment; here they get our names and are checked.
"""

import contextlib
import difflib
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from wavecore.engine_core.api import custom_ops
from wavecore.engine_core.api.config import CHECKS, EngineConfig
from wavecore.engine_core.api.fields import defaults
from wavecore.transport.errors import ConfigError, NotSupportedError, NotSupportedName
from wavecore.transport.wire.checks import shown

logger = logging.getLogger(__name__)

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
RENAMED: Mapping[str, str] = _TABLES["renamed"]
"""vLLM's or SGLang's spelling of a setting -> ours."""
NEGATED: Mapping[str, str] = _TABLES["negated"]
"""A switch that is on in vLLM -> ours that turns the same off."""
FOREIGN: Mapping[str, Mapping[str, Any]] = _TABLES["settings"]
"""A setting of vLLM -> "default" there, "allowed": other values that ask for nothing, "otherwise": the way out.

Of a setting that is ours, too, only the default."""
FOREIGN_SAMPLING: Mapping[str, Mapping[str, Any]] = _TABLES["sampling"]
"""A sampling parameter that is vLLM's alone -> the same."""
FOREIGN_ARGUMENTS: Mapping[str, Mapping[str, Any]] = _TABLES["arguments"]
"""An argument of vLLM's calls -> the same."""
FOREIGN_POOLING: Mapping[str, Mapping[str, Any]] = _TABLES["pooling"]
"""A pooling parameter of vLLM -> the same."""
STRUCTURED_OUTPUTS: Mapping[str, Any] = _TABLES["structured_outputs"]
"""A field of vLLM's StructuredOutputsParams -> its default."""
SIGNATURES: Mapping[str, Sequence[str]] = _TABLES["signatures"]
"""A method -> the parameters that vLLM's has, as `frontend/vllm/arguments.py` reads them."""
SHORT_FLAGS: Mapping[str, Sequence[str]] = _TABLES["short_flags"]
"""A setting -> the flags that vLLM has for it beside its name."""
METRICS: Mapping[str, Mapping[str, str]] = _TABLES["metrics"]
"""vLLM's name of what is counted -> its name in `step_stats`, by kind."""
ANY = "any"
FOREIGN_SWITCHES = frozenset(
    name
    for name, rule in FOREIGN.items()
    if any(isinstance(value, bool) for value in (rule.get("default"), *rule.get("allowed", ())))
)
GROUPS = frozenset(_TABLES["groups"])
"""Headings under which other systems' files keep their settings; ours need none."""
ENVIRONMENT = "WAVECORE_"
SETTINGS = defaults(EngineConfig)
SWITCHES = FOREIGN_SWITCHES | {name for name, default in SETTINGS.items() if isinstance(default, bool)}


def engine_config(values: Mapping[str, Any]) -> EngineConfig:
    """EngineConfig from keywords, vLLM's names included; `WAVECORE_<SETTING>` where there is none.

    Raises:
        NotSupportedError: a setting of vLLM that this engine lacks; with the way out.
        ConfigError: an unknown or impossible setting.
    """
    given = {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}
    settings = {**from_environment(), **read_settings(given, "", "; see EngineConfig for all settings")}
    if custom_ops.registered:
        settings["custom_ops"] = {**custom_ops.registered, **(settings.get("custom_ops") or {})}
    return EngineConfig(**settings)


def read_settings(values: Mapping[str, Any], where: str, otherwise: str) -> dict[str, Any]:
    """Settings under our names, checked one by one; what asks for nothing is left out.

    Args:
        where: they come from, for errors: " in FILE".
        otherwise: what an error says where no setting is called nearly so.

    Raises:
        ConfigError, NotSupportedError: as `engine_config`.
    """
    settings: dict[str, Any] = {}
    for given, value in values.items():
        name = our_name(str(given))
        if value is False and name in NEGATED:
            name, value = NEGATED[name], True
        if name in GROUPS and isinstance(value, Mapping):
            settings |= read_settings(value, f" of {given}{where}", otherwise)
        elif name in settings:
            raise ConfigError(f"{given}{where} is given twice")
        elif asks_for_nothing(name, value):
            continue
        elif name in SETTINGS:
            settings[name] = checked(name, value, f"{given}{where}")
        else:
            raise ConfigError(f"unknown setting {given}{where}{did_you_mean(name, SETTINGS, otherwise)}")
    return settings


def our_name(name: str) -> str:
    """Our name of a setting in any spelling."""
    name = name.replace("-", "_")
    return RENAMED.get(name, name)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, spelled: Callable[[str], str] = str) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {spelled(close[0])}?" if close else otherwise


def from_environment(settings: Iterable[str] = SETTINGS) -> dict[str, Any]:
    """Those of `settings` that variables named WAVECORE_<SETTING> give; an empty one means "not set".

    Raises:
        ConfigError: naming the variable.
    """
    return {
        name: checked(name, typed(name, text), f"{ENVIRONMENT}{name.upper()} in the environment")
        for name in settings
        if (text := os.environ.get(ENVIRONMENT + name.upper()))
    }


def typed(name: str, text: str) -> Any:
    """The value that a setting's text stands for; the text itself where it stands for none."""
    if text.lower() in ("null", "none") and _fits(name, None):
        return None
    if _fits(name, text):
        return text
    value = yaml_value(text)
    with contextlib.suppress(ValueError):  # 1e9, a text by YAML's rules
        value = float(text) if isinstance(value, str) and _fits(name, 0.5) else value
    return value


class _Loader(yaml.SafeLoader):
    """Plain YAML, in which a name given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given = len(node.value)
        found = super().construct_mapping(node, deep)
        if len(found) < given:
            raise yaml.YAMLError(f"a name is given twice{node.start_mark}")
        return found


def read_yaml(text: str) -> Any:
    """Raises:
    ValueError, yaml.YAMLError: with the reason.
    """
    try:
        return _Loader(text).get_single_data()
    except RecursionError:
        raise ValueError("nested too deeply") from None


def yaml_value(text: str) -> Any:
    """What a text says as YAML; itself where it is none."""
    try:
        return read_yaml(text)
    except (ValueError, yaml.YAMLError):
        return text


def checked(name: str, value: Any, where: str) -> Any:
    """A setting's value, with vLLM's names of dtypes and logging's of levels.

    Raises:
        ConfigError: of the wrong kind; says `where` it came from.
    """
    value = _TABLES["values"].get(name, {}).get(value, value) if isinstance(value, str) else value
    return CHECKS[name](where, value)


def _fits(name: str, value: Any) -> bool:
    try:
        CHECKS[name](name, value)
    except ConfigError:
        return False
    return True


def asks_for_nothing(name: str, value: Any) -> bool:
    """Whether a setting of vLLM may be dropped, because what it asks for is so anyway; False for a name nobody knows.

    Raises:
        NotSupportedError: it asks for more.
    """
    if name in SETTINGS:
        return value is None and not _fits(name, None)  # vLLM's "choose for me", which is our default
    if name not in FOREIGN:
        return False
    if note := FOREIGN[name].get("note") if value else None:
        logger.warning("%s=%.60r: %s", name, value, note)
    check_foreign(FOREIGN, name, value)
    return True


def check_foreign(table: Mapping[str, Mapping[str, Any]], name: str, value: Any) -> None:
    """Raises:
    NotSupportedError: a setting or sampling parameter of vLLM asks for what is not here; with the way out.
    """
    rule = table[name]
    allowed = rule.get("allowed", ())
    if allowed != ANY and not any(value is one or value == one for one in (None, rule.get("default"), *allowed)):
        raise NotSupportedError(f"{name}={shown(value)}: {rule.get('otherwise', 'not supported in this version')}")


def missing(owner: object, name: str) -> AttributeError:
    """The error for an attribute that an object lacks; with the way out if it is a method of vLLM's."""
    ways_out = _TABLES["methods"]
    if name in ways_out:
        return NotSupportedName(f"{name}: {ways_out[name]}")
    return AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}")


def refused(kind: Literal["classes", "commands"], name: str) -> NotSupportedError | None:
    """The error for one of vLLM's names that is not here, with the way out; None for a name nobody knows."""
    ways_out = _TABLES[kind]
    return NotSupportedError(f"{name}: {ways_out[name]}") if name in ways_out else None
