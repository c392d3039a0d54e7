"""QK-norm, RoPE and the write of keys and values into the cache, in one launch from the fused QKV buffer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.batch import Batch
from wavecore.kernels.chain import follow
from wavecore.kernels.device import early

HEADS_PER_PROGRAM = 4


def qk_norm_rope_kv_write(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos_sin: Tensor,
    batch: Batch,
    kv_cache: Tensor,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    weight_offset: float = 0.0,
) -> Tensor:
    """See `reference.layers.qk_norm_rope_kv_write`; qkv, cos_sin and kv_cache are contiguous."""
    tokens = qkv.shape[0]
    _, num_layers, _, kv_heads, block_size, dim = kv_cache.shape
    heads = num_heads + 2 * num_kv_heads
    assert qkv.shape[1] == heads * dim and kv_heads == num_kv_heads
    assert qkv.is_contiguous() and kv_cache.is_contiguous() and cos_sin.is_contiguous()
    assert (q_norm is None) == (k_norm is None)
    q = qkv.new_empty(tokens, num_heads, dim)
    if tokens:
        grid = tokens, triton.cdiv(heads, HEADS_PER_PROGRAM)
        read = q_norm, k_norm, eps, weight_offset, cos_sin, batch.positions, batch.kv_slots
        sizes = {"HQ": num_heads, "HKV": num_kv_heads, "DIM": dim, "ROT": cos_sin.shape[1], "KV_BLOCK": block_size}
        blocks = {"BLOCK_H": HEADS_PER_PROGRAM, "BLOCK_D": triton.next_power_of_2(dim), "num_warps": 2}
        written = q, kv_cache, layer, num_layers
        _norm_rope_write[grid](qkv, *read, *written, **sizes, **blocks, **early(qkv.device))
    return q


@triton.jit(do_not_specialize=["layer", "num_layers"])
def _norm_rope_write(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, weight_offset, cos_sin_ptr, positions_ptr, kv_slots_ptr, q_ptr, cache_ptr,
    layer, num_layers,
    HQ: tl.constexpr, HKV: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, KV_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program (token, BLOCK_H of its heads) handles values x [BLOCK_H, BLOCK_D].

    head [BLOCK_H, 1]     counts the heads as they lie in qkv: HQ of queries, then HKV of keys, then HKV of values
    d [1, BLOCK_D]        place in a head, DIM of them real
    partner [1, BLOCK_D]  the place that d is rotated with; y are the values there
    """
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    kv_slot = tl.load(kv_slots_ptr + token)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (head < HQ + 2 * HKV) & (d < DIM)
    is_q = head < HQ
    rotated = d < ROT
    partner = tl.where(rotated, tl.where(d < ROT // 2, d + ROT // 2, d - ROT // 2), d)
    row = qkv_ptr + token * ((HQ + 2 * HKV) * DIM) + head * DIM
    raw = tl.load(row + d, mask=inside, other=0.0)
    x = raw.to(tl.float32)
    y = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32)
    if q_norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)[:, None]
        x *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_q, d, DIM, weight_offset)
        y *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_q, partner, DIM, weight_offset)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROT + d % (ROT // 2)
    cos = tl.load(angles, mask=rotated, other=1.0)
    sin = tl.load(angles + ROT // 2, mask=rotated, other=0.0)
    turned = x * cos + y * tl.where(d < ROT // 2, -sin, sin)
    result = tl.where(head < HQ + HKV, turned.to(raw.dtype), raw)
    result = tl.where(kv_slot >= 0, result, 0.0)  # queries of padding tokens; a select, so that not even NaN passes
    tl.store(q_ptr + token * (HQ * DIM) + head * DIM + d, result, mask=inside & is_q)
    chunk = (kv_slot // KV_BLOCK * num_layers + layer) * (2 * HKV) + (head - HQ)  # of [KV_BLOCK, DIM], int64
    target = cache_ptr + (chunk * KV_BLOCK + kv_slot % KV_BLOCK) * DIM + d
    tl.store(target, result, mask=inside & (head >= HQ) & (kv_slot >= 0))


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_q, d, DIM: tl.constexpr, weight_offset):
    q = tl.load(q_norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    k = tl.load(k_norm_ptr + d, mask=d < DIM, other=0.0).to(tl.float32)
    return tl.where(is_q, q, k) + weight_offset
