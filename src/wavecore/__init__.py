"""wavecore: a distributed LLM inference engine. The public names, imported when they are first used.

from wavecore import LLM, SamplingParams

with LLM("default") as llm:
    print(llm.generate("The capital of France is")[0].outputs[0].text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; `X as X` makes a name public
    from wavecore.engine_core.api.config import EngineConfig as EngineConfig
    from wavecore.engine_core.api.custom_ops import register_op as register_op
    from wavecore.engine_core.api.sampling_params import SamplingParams as SamplingParams
    from wavecore.frontend.async_llm import AsyncLLM as AsyncLLM
    from wavecore.frontend.client.mailbox import OutputKind as OutputKind
    from wavecore.frontend.llm import LLM as LLM
    from wavecore.frontend.llm import connect as connect
    from wavecore.frontend.outputs import CompletionOutput as CompletionOutput
    from wavecore.frontend.outputs import EmbeddingOutput as EmbeddingOutput
    from wavecore.frontend.outputs import EmbeddingRequestOutput as EmbeddingRequestOutput
    from wavecore.frontend.outputs import Logprob as Logprob
    from wavecore.frontend.outputs import RequestMetrics as RequestMetrics
    from wavecore.frontend.outputs import RequestOutput as RequestOutput
    from wavecore.frontend.prompts import EmbedsPrompt as EmbedsPrompt
    from wavecore.frontend.prompts import PromptType as PromptType
    from wavecore.frontend.prompts import TextPrompt as TextPrompt
    from wavecore.frontend.prompts import TokensPrompt as TokensPrompt
    from wavecore.transport.errors import ConfigError as ConfigError
    from wavecore.transport.errors import EngineDead as EngineDead
    from wavecore.transport.errors import ModelError as ModelError
    from wavecore.transport.errors import NotSupportedError as NotSupportedError
    from wavecore.transport.errors import NumericalError as NumericalError
    from wavecore.transport.errors import Overloaded as Overloaded
    from wavecore.transport.errors import ProtocolError as ProtocolError
    from wavecore.transport.errors import RequestError as RequestError
    from wavecore.transport.errors import RequestTimeout as RequestTimeout
    from wavecore.transport.errors import ResourceError as ResourceError
    from wavecore.transport.errors import StartError as StartError
    from wavecore.transport.errors import ValidationError as ValidationError
    from wavecore.transport.errors import WavecoreError as WavecoreError
    from wavecore.transport.version import VERSION as __version__  # noqa: F401

_NAMES = {
    "engine_core.api.config": "EngineConfig",
    "engine_core.api.custom_ops": "register_op",
    "engine_core.api.sampling_params": "SamplingParams",
    "frontend.async_llm": "AsyncLLM",
    "frontend.client.mailbox": "OutputKind",
    "frontend.llm": "LLM connect",
    "frontend.outputs": "CompletionOutput EmbeddingOutput EmbeddingRequestOutput Logprob RequestMetrics RequestOutput",
    "frontend.prompts": "EmbedsPrompt PromptType TextPrompt TokensPrompt",
    "transport.errors": "ConfigError EngineDead ModelError NotSupportedError NumericalError Overloaded ProtocolError "
    "RequestError RequestTimeout ResourceError StartError ValidationError WavecoreError",
}
_HOME_OF = {name: home for home, names in _NAMES.items() for name in names.split()}
__all__ = sorted([*_HOME_OF, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"wavecore.{_HOME_OF[name]}"), name)
    if name == "__version__":
        return import_module("wavecore.transport.version").VERSION
    if not name.startswith("_") and (refused := import_module("wavecore.frontend.compat").refuse_class(name)):
        raise refused
    raise AttributeError(f"module 'wavecore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
