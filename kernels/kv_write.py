"""QK-norm, RoPE and the write of keys and values into the cache, in one launch from the fused QKV buffer."""

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.batch import Batch
from wavecore.kernels.chain import follow
from wavecore.kernels.device import early

HEADS_PER_PROGRAM, WARPS = 16, 8


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
        parts = triton.cdiv(heads, HEADS_PER_PROGRAM)
        read = q_norm, k_norm, eps, weight_offset, cos_sin, batch.positions, batch.kv_slots
        rot = cos_sin.shape[1]
        sizes = {"HQ": num_heads, "HKV": num_kv_heads, "DIM": dim, "ROT": rot, "KV_BLOCK": block_size}
        blocks = {"BLOCK_H": HEADS_PER_PROGRAM, "PAIRS": triton.next_power_of_2(rot // 2), "num_warps": WARPS}
        blocks["REST"] = triton.next_power_of_2(dim - rot) if rot < dim else 0
        written = q, kv_cache, layer, num_layers
        _norm_rope_write[(tokens * parts,)](qkv, *read, *written, **sizes, **blocks, **early(qkv.device))
    return q


@triton.jit(do_not_specialize=["layer", "num_layers"])
def _norm_rope_write(
    qkv_ptr, q_norm_ptr, k_norm_ptr, eps, weight_offset, cos_sin_ptr, positions_ptr, kv_slots_ptr, q_ptr, cache_ptr,
    layer, num_layers,
    HQ: tl.constexpr, HKV: tl.constexpr, DIM: tl.constexpr, ROT: tl.constexpr, KV_BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program (token, BLOCK_H of its heads) handles pairs of values, near and far x [BLOCK_H, PAIRS], which turn
    together, and the rest x [BLOCK_H, REST], which does not turn. So each is read once, and from places in a row.

    head [BLOCK_H, 1]   counts the heads as they lie in qkv: HQ of queries, then HKV of keys, then HKV of values
    pair [1, PAIRS]     place of `near` in a head, ROT // 2 of them real; `far` is ROT // 2 behind
    place [1, REST]     place of `rest` in a head
    """
    follow(EARLY)
    parts = tl.cdiv(HQ + 2 * HKV, BLOCK_H)
    token = (tl.program_id(0) // parts).to(tl.int64)  # programs beside each other read on in memory
    kv_slot = tl.load(kv_slots_ptr + token)
    head = (tl.program_id(0) % parts * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    turns = pair < ROT // 2
    real = head < HQ + 2 * HKV
    is_q = head < HQ
    row = qkv_ptr + token * ((HQ + 2 * HKV) * DIM) + head * DIM
    near_raw = tl.load(row + pair, mask=real & turns, other=0.0)
    far_raw = tl.load(row + ROT // 2 + pair, mask=real & turns, other=0.0)
    near, far = near_raw.to(tl.float32), far_raw.to(tl.float32)
    place = ROT + tl.arange(0, REST if REST else 1)[None, :]
    rest_raw = tl.load(row + place, mask=real & (place < DIM), other=0.0) if REST else near_raw
    rest = rest_raw.to(tl.float32)
    if q_norm_ptr is not None:
        squares = tl.sum(near * near + far * far, axis=1)
        if REST:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        near *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_q, pair, turns, weight_offset)
        far *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_q, ROT // 2 + pair, turns, weight_offset)
        if REST:
            rest *= scale * _norm_weight(q_norm_ptr, k_norm_ptr, is_q, place, place < DIM, weight_offset)
    angles = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * ROT + pair
    cos = tl.load(angles, mask=turns, other=1.0)
    sin = tl.load(angles + ROT // 2, mask=turns, other=0.0)
    to_q = q_ptr + token * (HQ * DIM) + head * DIM
    chunk = (kv_slot // KV_BLOCK * num_layers + layer) * (2 * HKV) + (head - HQ)  # of [KV_BLOCK, DIM], int64
    to_cache = cache_ptr + (chunk * KV_BLOCK + kv_slot % KV_BLOCK) * DIM
    as_it_is = head >= HQ + HKV
    _write(near * cos - far * sin, near_raw, as_it_is, kv_slot, to_q + pair, is_q, to_cache + pair, real & turns)
    far_turned = far * cos + near * sin
    far_at = ROT // 2 + pair
    _write(far_turned, far_raw, as_it_is, kv_slot, to_q + far_at, is_q, to_cache + far_at, real & turns)
    if REST:
        _write(rest, rest_raw, as_it_is, kv_slot, to_q + place, is_q, to_cache + place, real & (place < DIM))


@triton.jit
def _write(values, raw, as_it_is, kv_slot, to_q, is_q, to_cache, inside):
    values = tl.where(as_it_is, raw, values.to(raw.dtype))
    values = tl.where(kv_slot >= 0, values, 0.0)  # queries of padding tokens; a select, so that not even NaN passes
    tl.store(to_q, values, mask=inside & is_q)
    tl.store(to_cache, values, mask=inside & (is_q == 0) & (kv_slot >= 0))


@triton.jit
def _norm_weight(q_norm_ptr, k_norm_ptr, is_q, d, inside, weight_offset):
    q = tl.load(q_norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
    k = tl.load(k_norm_ptr + d, mask=inside, other=0.0).to(tl.float32)
    return tl.where(is_q, q, k) + weight_offset
