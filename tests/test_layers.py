"""The layers of ARCHITECTURE.md, enforced: an import may only point down, and nothing uses a bare folder name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("frontend", "engine_core", "parallel", "kernels", "transport")
MAY_IMPORT = {
    "frontend": (
        "transport",
        "engine_core.api",
    ),
    "engine_core": ("transport", "parallel", "kernels"),
    "parallel": ("transport", "kernels"),
    "kernels": (),
    "transport": (),
}
TORCH_FREE = ("frontend", "transport")


def imports(path: Path) -> Iterator[str]:
    """Every absolute module name that a file imports, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(folder: str, name: str) -> bool:
    top, _, rest = name.partition(".")
    if top in FOLDERS or (top in ("torch", "triton") and folder in TORCH_FREE):
        return True
    if top != "wavecore" or not rest:
        return False
    allowed = (folder, *MAY_IMPORT[folder])
    return not any(rest == a or rest.startswith(a + ".") for a in allowed)


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_point_down(folder: str) -> None:
    bad = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in imports(path)
        if violations(folder, name)
    ]
    assert not bad, "\n".join(bad)


def test_the_rule_sees_a_violation() -> None:
    assert violations("transport", "wavecore.frontend.llm")
    assert violations("frontend", "wavecore.engine_core.scheduling.scheduler.Scheduler")
    assert violations("frontend", "torch")
    assert violations("engine_core", "kernels")
    assert not violations("frontend", "wavecore.engine_core.api.config.EngineConfig")


def test_kernels_is_no_regular_package() -> None:
    """A regular top-level package `kernels` on sys.path would break `import transformers`, which looks for
    Hugging Face's package of that name."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
