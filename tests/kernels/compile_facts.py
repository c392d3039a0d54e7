"""A program, not a test: what the compiler makes of kernels for the smallest GPU that is served.

That is compute capability 8.9 (8.6 is alike) with 99 KiB of shared memory a program. Prints JSON: `shared`, bytes of
shared memory by attention kernel and shape, and `loose`, by sampling kernel how many operations are fused multiply-adds
or could become one.
"""

from __future__ import annotations

import json
import re
import sys

import torch
from tests.kernels.compile_only import compile_only

from wavecore.kernels.attention import shapes
from wavecore.kernels.attention.paged import paged_attention
from wavecore.kernels.examples import EXAMPLES, make_batch, make_kv_cache
from wavecore.kernels.sampling import sample

LOOSE = re.compile(r"\b(?:fma\.rn|mul|add|sub)\.f32")  # with .rn the last three are never fused


def main() -> None:
    launched = compile_only(89)
    shapes.shared_memory = lambda _device: 99 << 10
    shared = {}
    bf16, most, few = torch.bfloat16, shapes.MAX_GROUP, 4  # of many heads no two rows fit one product
    for dim, heads, dtype in ((256, most, bf16), (256, most, torch.float32), (256, few, bf16), (128, few, bf16)):
        batch, num_blocks = make_batch([1, 5], [70, 40], 16)
        q = torch.zeros(6, heads, dim, dtype=dtype)
        paged_attention(q, make_kv_cache(num_blocks, 1, 1, 16, dim, q), 0, batch, 0.1)
        shared |= {f"{name} {dim} x {heads} {dtype}": kernel.metadata.shared for name, kernel in launched}
        launched.clear()
    for operation in (sample.adjust, sample.draw):
        operation(*EXAMPLES[operation.__name__](torch.empty(0, dtype=torch.bfloat16)))
    loose = {name: len(LOOSE.findall(kernel.asm["ptx"])) for name, kernel in launched}
    json.dump({"shared": shared, "loose": loose}, sys.stdout)


if __name__ == "__main__":
    main()
