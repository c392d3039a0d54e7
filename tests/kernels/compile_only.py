"""Triton without a GPU: launches stop once the kernel is compiled. For programs of their own, as it stays that way."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction


class _Driver:
    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


def compile_only(capability: int) -> list[tuple[str, Any]]:
    """From here on launches compile for a GPU of this compute capability (90: Hopper) and do no more.

    Returns: name and compiled kernel of every launch, as they come.
    """
    triton.runtime.driver.set_active(_Driver(capability))
    run = JITFunction.run
    launched: list[tuple[str, Any]] = []

    def compiled(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **(options | {"warmup": True}))
        launched.append((self.__name__, kernel))
        return kernel

    JITFunction.run = compiled
    return launched


def no_machine_code() -> None:
    """Compilations stop at Triton's own IR: for what asks whether a launch compiles, not what comes of it."""

    def no_llvm(_self: Any, _module: Any, metadata: dict[str, Any], *_: Any) -> str:
        metadata |= {"shared": 0, "name": ""}
        return ""

    CUDABackend.make_ttgir = lambda _self, module, *_: module
    CUDABackend.make_llir = no_llvm
    CUDABackend.make_ptx = lambda *_: ""
    CUDABackend.make_cubin = lambda *_: b""
