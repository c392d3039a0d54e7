"""wavecore: an inference engine for large language models. The public names, imported when they are first used.

from wavecore import LLM, SamplingParams

with LLM("default") as llm:
    print(llm.generate("The capital of France is")[0].outputs[0].text)
"""

import re
from importlib import import_module
from pathlib import Path
from typing import Any

# Public name -> module that has it: as the imports of the stub beside this file say, which type checkers read.
_STUB = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
_HOMES = {name: module for module, name in re.findall(r"^from (\S+) import (\w+)", _STUB, re.MULTILINE)}
__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name == "__version__":
        return import_module("wavecore.transport.version").VERSION
    unknown = AttributeError(f"module 'wavecore' has no attribute {name!r}")
    if name.startswith("_"):
        raise unknown
    raise import_module("wavecore.frontend.compat").refused("classes", name) or unknown


def __dir__() -> list[str]:
    return __all__
