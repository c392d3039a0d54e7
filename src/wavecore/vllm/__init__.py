"""vLLM's names over this engine: `import wavecore.vllm as vllm`. See docs/coming-from-vllm.md.

from wavecore.vllm import LLM, SamplingParams
from wavecore.vllm.sampling_params import RequestOutputKind
"""

from typing import Any

from wavecore.frontend.vllm.modules import MODULES, find

__all__ = list(MODULES[""])


def __getattr__(name: str) -> Any:
    return find("", name)


def __dir__() -> list[str]:
    return __all__
