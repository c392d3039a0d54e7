"""The step that both attention kernels share: one tile of keys and values into a running softmax."""

import triton
import triton.language as tl

LOG2E = 1.4426950408889634


@triton.jit
def load_tile(
    cache_ptr, table_ptr, chunk_offset, block_stride, key, seen,
    MASKED: tl.constexpr, KV_BLOCK: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Rows `key` of one head's [KV_BLOCK, DIM] chunks, found through the block table; zero where not `seen`.

    `chunk_offset` is where the head's chunk lies inside a block. Offsets are int64: caches exceed 2**31 elements.
    """
    d = tl.arange(0, BLOCK_D)[None, :]
    if MASKED:
        block = tl.load(table_ptr + key // KV_BLOCK, mask=seen, other=0).to(tl.int64)
    else:
        block = tl.load(table_ptr + key // KV_BLOCK).to(tl.int64)
    place = cache_ptr + (block * block_stride + chunk_offset + key % KV_BLOCK * DIM)[:, None] + d
    if MASKED:
        tile = tl.load(place, mask=seen[:, None] & (d < DIM), other=0.0)
    elif BLOCK_D != DIM:
        tile = tl.load(place, mask=d < DIM, other=0.0)
    else:
        tile = tl.load(place)
    return tile


@triton.jit
def softmax_step(
    q, k, v, acc, peak, total, visible, scale, soft_cap,
    HAS_CAP: tl.constexpr, MASKED: tl.constexpr, GUARD: tl.constexpr,
):  # fmt: skip
    """acc, peak (base-2 maximum) and total after keys k and values v [N, D] for queries q [M, D].

    `scale` and `soft_cap` hold log2(e). MASKED drops scores that are not `visible`; GUARD keeps queries that have
    seen no visible key at zero instead of NaN.
    """
    # float32 inputs are multiplied as float32 ("ieee"), never as tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if HAS_CAP:
        # soft_cap * tanh(x / soft_cap) by exp2, without overflow on either side; the number is 2 log2(e)
        scores = soft_cap * (1.0 - 2.0 / (tl.exp2(scores * (2.8853900817779268 / soft_cap)) + 1.0))
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = new_peak
    if GUARD:
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, axis=1)
    acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_peak, total
