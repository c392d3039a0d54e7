"""A program, not a test: compiles every kernel in bfloat16 for an H200 (sm_90), on a machine without a GPU.

Triton's interpreter forgives what the compiler does not (a variable of two types, bfloat16 products). Prints the
kernels' names.
"""

from __future__ import annotations

import torch
from tests.kernels.compile_only import compile_only

from wavecore.kernels.all_reduce import PeerBuffers
from wavecore.kernels.attention.paged import paged_attention
from wavecore.kernels.device import STANDS_FOR
from wavecore.kernels.examples import EXAMPLES, make_batch, make_kv_cache
from wavecore.kernels.linear import linear
from wavecore.kernels.moe.experts import moe
from wavecore.kernels.ops import OPERATIONS


def two_ranks(area: int) -> PeerBuffers:
    """Buffers of which nothing is read."""
    return PeerBuffers(tuple(torch.zeros(2, PeerBuffers.num_bytes(area) // 8, dtype=torch.int64)), 0, area, 1 << 20)


def main() -> None:
    launched = compile_only(90)
    STANDS_FOR["capability"] = 90
    like = torch.empty(0, dtype=torch.bfloat16)
    for name, make in EXAMPLES.items():
        OPERATIONS[name].kernel(*make(like))
    for lengths, window in (([1, 1], 0), ([2], 7)):  # decode alone, which zeroes its padding; Hopper's prefill kernel
        batch, num_blocks = make_batch(lengths, [70] * len(lengths), 16)
        q = torch.zeros(2, 8, 128, dtype=torch.bfloat16)
        paged_attention(q, make_kv_cache(num_blocks, 1, 2, 16, 128, like), 0, batch, 0.1, 5.0, window)
    tokens = torch.zeros(97, 64, dtype=torch.bfloat16), torch.zeros(97, 1, dtype=torch.bfloat16)
    weights = torch.zeros(2 * 64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    moe(*tokens, *weights, torch.zeros(97, dtype=torch.int32), 1, True)  # Hopper's products, for many tokens
    linear(like.new_zeros(1, 64), like.new_zeros(8, 64))
    two_ranks(2 * 128).add_rms_norm(like.new_zeros(3, 128), None, like.new_zeros(128), 1e-5, 0.0)
    assert all(kernel.asm["cubin"] for _, kernel in launched)
    print(*sorted({name for name, _ in launched}))


if __name__ == "__main__":
    main()
