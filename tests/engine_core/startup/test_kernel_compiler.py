"""What stands in for modules of torch that are slow to import: a name that it lacks brings the real one."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from wavecore.engine_core.startup import kernel_compiler
from wavecore.engine_core.startup.kernel_compiler import Late


@pytest.mark.parametrize("names", [["known"], ["known", "join", "split"]])
def test_what_is_not_known_is_asked_of_the_real_module(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    """However often: one import statement asks for several names."""
    monkeypatch.setattr(kernel_compiler, "LATE", {"posixpath": {"known": 1}, "ntpath": {}})
    stand_in: dict[str, ModuleType] = {name: Late(name) for name in kernel_compiler.LATE}
    vars(stand_in["posixpath"])["known"] = 1
    for name, module in stand_in.items():
        monkeypatch.setitem(sys.modules, name, module)
    found = [getattr(stand_in["posixpath"], name) for name in names]
    real = len(names) > 1
    assert found[0] == 1 and all(callable(function) for function in found[1:])
    assert ("ntpath" in sys.modules, isinstance(sys.modules["posixpath"], Late)) == (not real, not real)
    with pytest.raises(AttributeError):
        _ = stand_in["posixpath"].__path__
