"""EngineArgs: vLLM's settings as an object and as flags. Their names, defaults and treatment stand in `compat.json`."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from inspect import Signature, signature
from typing import Any, Self, TypeVar

from wavecore.frontend.compat import FOREIGN, SETTINGS, SHORT_FLAGS, SWITCHES, from_environment, yaml_value
from wavecore.frontend.vllm.params import Fields
from wavecore.frontend.vllm.utils import current_platform

DEFAULTS = {name: rule["default"] for name, rule in FOREIGN.items() if "default" in rule} | {"model": "default"}
"""Every setting of vLLM with its default there; None where that is an object of vLLM's own."""
Init = TypeVar("Init", bound=Callable[..., None])
RELIED_ON = ("seed", "gpu_memory_utilization")


def own_defaults() -> dict[str, Any]:
    """Defaults that are not ours and that a program may rely on, unless the environment says otherwise.

    The GPU as well, for a program that starts its data-parallel ranks by itself and tells each in its environment.
    """
    rank = os.environ.get("VLLM_DP_RANK_LOCAL")
    device = {"device": f"cuda:{rank}"} if rank and current_platform.is_cuda() else {}
    return {name: DEFAULTS[name] for name in RELIED_ON} | device | from_environment(RELIED_ON)


class EngineArgs(Fields, defaults={**DEFAULTS, **SETTINGS, **DEFAULTS}):
    """Settings of an engine to come: vLLM's, and ours as well."""

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser, async_args_only: bool = False) -> argparse.ArgumentParser:
        """A flag for each setting of vLLM, spelled as there; `async_args_only` leaves all but those of its server."""
        group = parser.add_argument_group("engine")
        for name in ["enable_log_requests"] if async_args_only else DEFAULTS:
            switch = {"action": argparse.BooleanOptionalAction} if name in SWITCHES else {"type": yaml_value}
            flags = ["--" + name.lstrip("_").replace("_", "-"), *SHORT_FLAGS.get(name, ())]
            group.add_argument(*flags, dest=name, default=DEFAULTS[name], **switch)
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


def shows_settings(init: Init) -> Init:
    """An `__init__` that shows all settings to `inspect`; older names of them are taken as well."""
    own, _, more = signature(init).parameters.values()
    init.__signature__ = Signature([own, *signature(EngineArgs).parameters.values(), more])  # type: ignore[attr-defined]
    return init


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` for `--max-model-len`."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([re.sub("^--[^=]+", _dashed, word) for word in words], namespace)


def _dashed(flag: re.Match[str]) -> str:
    return flag[0].replace("_", "-")
