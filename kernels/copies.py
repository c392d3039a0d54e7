"""Copies of whole blocks inside the KV cache."""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    """See `reference.layers.copy_blocks`."""
    assert kv_cache.is_contiguous() and pairs.is_contiguous() and pairs.shape[1] == 2
    size = kv_cache[0].numel()
    if len(pairs):
        _copy_blocks[(len(pairs) * triton.cdiv(size, BLOCK),)](kv_cache, pairs, size, BLOCK=BLOCK, num_warps=8)


@triton.jit
def _copy_blocks(cache_ptr, pairs_ptr, size, BLOCK: tl.constexpr):
    """A program (pair, part of BLOCK places) copies its part of one KV block; `size` numbers are in a KV block."""
    parts = tl.cdiv(size, BLOCK)
    pair = tl.program_id(0) // parts  # one axis: either number can be above the 65,535 of the others
    part = (tl.program_id(0) % parts).to(tl.int64)
    source = tl.load(pairs_ptr + 2 * pair).to(tl.int64)
    target = tl.load(pairs_ptr + 2 * pair + 1).to(tl.int64)
    i = part * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    tl.store(cache_ptr + target * size + i, tl.load(cache_ptr + source * size + i, mask=inside), mask=inside)
