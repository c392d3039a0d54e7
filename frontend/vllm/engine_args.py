"""EngineArgs: vLLM's settings as an object and as flags. Their names, defaults and treatment stand in `compat.json`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

from wavecore.frontend.compat import FOREIGN, SETTINGS, from_environment, yaml_value
from wavecore.frontend.vllm.params import Fields

DEFAULTS = {name: rule["default"] for name, rule in FOREIGN.items() if "default" in rule} | {"model": "default"}
"""Every setting of vLLM with its default there; None where that is an object of vLLM's own."""
RELIED_ON = ("seed", "gpu_memory_utilization")


def own_defaults() -> dict[str, Any]:
    """Defaults that are not ours and that a program may rely on, unless the environment says otherwise."""
    return {name: DEFAULTS[name] for name in RELIED_ON} | from_environment(RELIED_ON)


class EngineArgs(Fields):
    """Settings of an engine to come: vLLM's, and ours as well."""

    defaults: ClassVar[Mapping[str, Any]] = {**SETTINGS, **DEFAULTS}

    def __init__(self, model: str = "default", **values: Any) -> None:
        super().__init__(model=model, **values)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """A flag for each setting of vLLM, spelled as there."""
        group = parser.add_argument_group("engine")
        for name, default in DEFAULTS.items():
            switch = {"action": argparse.BooleanOptionalAction} if isinstance(default, bool) else {"type": yaml_value}
            flag = "--" + name.lstrip("_").replace("_", "-")
            group.add_argument(flag, dest=name, default=default, **switch)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        return cls(**{name: getattr(args, name) for name in DEFAULTS if hasattr(args, name)})

    def settings(self) -> dict[str, Any]:
        """As keywords of `LLM`: what is not vLLM's default."""
        differing = {name: value for name, value in vars(self).items() if value != self.defaults[name]}
        return {"model": str(self.model), **own_defaults(), **differing}

    def create_engine_config(self, *_: Any, **__: Any) -> Self:
        """What `AsyncLLM.from_vllm_config` takes."""
        return self


class AsyncEngineArgs(EngineArgs):
    """As `EngineArgs`."""


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([re.sub("^--[^=]+", _dashed, word) for word in words], namespace)


def _dashed(flag: re.Match[str]) -> str:
    return flag[0].replace("_", "-")
