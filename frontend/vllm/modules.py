"""`wavecore.vllm` and the modules below it, made of a table: `modules.json`. After `stand_in` they are `vllm`, too."""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from wavecore.frontend.compat import refused

_TABLES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
_HOMES: dict[str, str] = _TABLES["homes"]
"""vLLM's name -> the module of ours that has it, with another name there behind a colon."""
MODULES: dict[str, list[str]] = _TABLES["modules"]
"""A module of vLLM, without the leading "vllm" -> the names that may be imported from it."""
_ABSENT: dict[str, str] = _TABLES["absent"]
"""A module of vLLM that is not here -> the way out."""
ROOTS = ("wavecore.vllm", "vllm")
VERSION: str = _TABLES["version"]
VERSION_TUPLE: tuple[int, ...] = tuple(map(int, VERSION.split(".")))


def find(module: str, name: str) -> Any:
    """What a name of one of `MODULES` stands for.

    Raises:
        ImportError: vLLM has it and we do not; with the way out. An AttributeError would lose the message, where the
            name is imported.
        AttributeError: nobody knows it.
    """
    if name in MODULES[module]:
        home, _, other = _HOMES[name].partition(":")
        return getattr(import_module(f"wavecore.{home}"), other or name)
    submodule = f"{module}.{name}".lstrip(".")
    if submodule in MODULES:  # `import vllm` is enough to reach all of them
        return import_module(f"{ROOTS[0]}.{submodule}")
    if reason := None if name.startswith("_") else refused("classes", name):
        raise ImportError(str(reason))
    raise AttributeError(f"module {ROOTS[0]!r} has no attribute {submodule!r}")


class _Finder(MetaPathFinder, Loader):
    """Finds `MODULES` below `wavecore.vllm` and, once it is told to, as `vllm`: of which version, asks lm-eval."""

    roots: tuple[str, ...] = ROOTS[:1]

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:  # noqa: ARG002
        module = _below(fullname, self.roots)
        if module is None or module.startswith("_"):
            return None
        if module not in MODULES:
            way_out = _ABSENT.get(module, "docs/coming-from-vllm.md lists what is here")
            raise ModuleNotFoundError(f"{fullname} is not part of this stand-in for vLLM; {way_out}", name=fullname)
        return ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        below = _below(module.__name__, ROOTS) or ""
        module.__dict__["__getattr__"] = lambda name: find(below, name)
        module.__dict__["__all__"] = MODULES[below]

    def find_distributions(self, context: importlib.metadata.DistributionFinder.Context) -> Iterator[_Distribution]:
        if context.name == ROOTS[1] in self.roots:
            yield _Distribution()


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata.version("vllm")` reads."""

    def read_text(self, filename: str) -> str | None:
        return f"Name: vllm\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).with_name(str(path))


def _below(fullname: str, roots: Sequence[str]) -> str | None:
    """ "wavecore.vllm.outputs" is "outputs"; None for what lies elsewhere."""
    for root in roots:
        if fullname == root or fullname.startswith(f"{root}."):
            return fullname[len(root) + 1 :]
    return None


_finder = _Finder()
sys.meta_path.append(_finder)


def stand_in() -> None:
    """From now on `import vllm` finds us, even where vLLM is installed."""
    _finder.roots = ROOTS
    sys.meta_path.remove(_finder)
    sys.meta_path.insert(0, _finder)
    for name in [name for name in sys.modules if _below(name, ROOTS[1:]) is not None]:
        del sys.modules[name]
