"""A program, not a test: compiles every kernel in bfloat16 for an H200 (sm_90), on a machine without a GPU.

Triton's interpreter forgives what the compiler does not (a variable of two types, bfloat16 products). A stand-in for
the driver names the target, and launches stop after compilation. Prints the kernels' names.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from wavecore.kernels.attention import paged_attention
from wavecore.kernels.examples import EXAMPLES, make_batch, make_pages
from wavecore.kernels.ops import KERNEL_FILES


class Driver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int = 0) -> int:
        return 0


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    run = JITFunction.run
    compiled = set()

    def compile_only(self: Any, *args: Any, **options: Any) -> Any:
        kernel = run(self, *args, **(options | {"warmup": True}))
        assert kernel.asm["cubin"]
        compiled.add(self.__name__)
        return kernel

    JITFunction.run = compile_only
    like = torch.empty(0, dtype=torch.bfloat16)
    for name, make in EXAMPLES.items():
        getattr(import_module(f"wavecore.kernels.{KERNEL_FILES[name]}"), name)(*make(like))
    batch, num_pages = make_batch([1, 1], [70, 3], 16)  # decode alone, which zeroes its padding
    q = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
    paged_attention(q, make_pages(num_pages, 1, 2, 16, 128, like), 0, batch, 0.1)
    print(*sorted(compiled))


if __name__ == "__main__":
    main()
