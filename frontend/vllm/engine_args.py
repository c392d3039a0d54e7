"""EngineArgs: vLLM's settings as an object and as flags. Their names, defaults and treatment stand in `compat.json`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from wavecore.frontend.compat import FOREIGN, SETTINGS, our_name, yaml_value

DEFAULTS = {name: rule["default"] for name, rule in FOREIGN.items() if "default" in rule}
"""Every setting of vLLM with its default; None where that is an object of vLLM's own."""
OWN_DEFAULTS = {"seed": DEFAULTS["seed"], "gpu_memory_utilization": DEFAULTS["gpu_memory_utilization"]}
"""Defaults of vLLM that are not ours and that a program may rely on."""


class EngineArgs:
    """Settings of an engine to come: attributes under vLLM's names, ours as well.

    Raises:
        TypeError: an unknown name.
    """

    def __init__(self, model: str | Path = "default", **values: Any) -> None:
        for name in values:
            if our_name(name) not in {**FOREIGN, **SETTINGS}:
                raise TypeError(f"{type(self).__name__} has no setting {name!r}")
        self.given = {"model": str(model), **values}
        self.__dict__.update({**DEFAULTS, **self.given})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """A flag for each setting, spelled as vLLM's."""
        group = parser.add_argument_group("engine")
        for name, default in DEFAULTS.items():
            flag = "--" + name.lstrip("_").replace("_", "-")
            if isinstance(default, bool):
                group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=default)
            else:
                group.add_argument(flag, dest=name, type=yaml_value, default="default" if name == "model" else default)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{name: getattr(args, name) for name in DEFAULTS if hasattr(args, name)})

    def settings(self) -> dict[str, Any]:
        """As keywords of `LLM`: what was given, or set on this object since."""
        return {n: v for n, v in vars(self).items() if n in self.given or (n in DEFAULTS and v != DEFAULTS[n])}

    def create_engine_config(self, *_: Any, **__: Any) -> Self:
        """What `AsyncLLM.from_vllm_config` takes."""
        return self


class AsyncEngineArgs(EngineArgs):
    """As `EngineArgs`."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        given = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_dashed(word) for word in given], namespace)


def _dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word
