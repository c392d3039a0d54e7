"""wavecore: a distributed LLM inference engine. The public names, imported when they are first used.

from wavecore import LLM, SamplingParams

with LLM("default") as llm:
    print(llm.generate("The capital of France is")[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavecore.engine_core.api.config import EngineConfig
    from wavecore.engine_core.api.custom_ops import register_op
    from wavecore.engine_core.api.sampling_params import SamplingParams
    from wavecore.frontend.async_llm import AsyncLLM
    from wavecore.frontend.client.mailbox import OutputKind
    from wavecore.frontend.connect import connect
    from wavecore.frontend.llm import LLM
    from wavecore.frontend.outputs import (
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        Logprob,
        RequestMetrics,
        RequestOutput,
    )
    from wavecore.frontend.prompts import EmbedsPrompt, PromptType, TextPrompt, TokensPrompt
    from wavecore.transport.errors import (
        ConfigError,
        EngineDead,
        ModelError,
        NotSupportedError,
        NumericalError,
        Overloaded,
        ProtocolError,
        RequestError,
        RequestTimeout,
        ResourceError,
        StartError,
        ValidationError,
        WavecoreError,
    )
    from wavecore.transport.version import VERSION as __version__

_HOMES = {
    "engine_core.api.config": ("EngineConfig",),
    "engine_core.api.custom_ops": ("register_op",),
    "engine_core.api.sampling_params": ("SamplingParams",),
    "frontend.async_llm": ("AsyncLLM",),
    "frontend.connect": ("connect",),
    "frontend.llm": ("LLM",),
    "frontend.client.mailbox": ("OutputKind",),
    "frontend.outputs": (
        "CompletionOutput",
        "EmbeddingOutput",
        "EmbeddingRequestOutput",
        "Logprob",
        "RequestMetrics",
        "RequestOutput",
    ),
    "frontend.prompts": ("EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"),
    "transport.errors": (
        "ConfigError",
        "EngineDead",
        "ModelError",
        "NotSupportedError",
        "NumericalError",
        "Overloaded",
        "ProtocolError",
        "RequestError",
        "RequestTimeout",
        "ResourceError",
        "StartError",
        "ValidationError",
        "WavecoreError",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "ConfigError",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineConfig",
    "EngineDead",
    "Logprob",
    "ModelError",
    "NotSupportedError",
    "NumericalError",
    "OutputKind",
    "Overloaded",
    "PromptType",
    "ProtocolError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "RequestTimeout",
    "ResourceError",
    "SamplingParams",
    "StartError",
    "TextPrompt",
    "TokensPrompt",
    "ValidationError",
    "WavecoreError",
    "__version__",
    "connect",
    "register_op",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"wavecore.{_HOME_OF[name]}"), name)
    if name == "__version__":
        return import_module("wavecore.transport.version").VERSION
    if name.startswith("_"):
        raise AttributeError(f"module 'wavecore' has no attribute {name!r}")
    names = import_module("wavecore.frontend.compat")
    if name in names.CLASSES:
        errors = import_module("wavecore.transport.errors")
        raise errors.NotSupportedError(f"{name}: {names.CLASSES[name]}")
    raise AttributeError(f"module 'wavecore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
