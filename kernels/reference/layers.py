"""Torch twins of every kernel but attention and sampling. Same names and signatures as the kernels.

A twin is the oracle in tests and the path on a CPU; attention's and sampling's have files of their own.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from wavecore.kernels.batch import Batch, BatchBuffers, StepRows

SWAPPED_ROWS = (1, *range(12, 49))
"""On a CPU these few rows are 10 to 25% faster as (weight @ x^T)^T; with 2 to 11 that is slower by half, above 48 the
same (float32 and bfloat16, oneDNN and MKL of torch 2.13 on Xeon; bench_cpu.py shows the sum)."""


def update_block_table(block_table: Tensor, changes: Tensor) -> None:
    """Write new entries of the block table.

    Args:
        block_table: int32 [slots, max_blocks].
        changes: int32 [1 + 3 * n]: how many of the n entries behind it count, then slot, index and block of each.
    """
    slot, index, block = changes[1 : 1 + 3 * int(changes[0])].view(-1, 3).unbind(1)
    block_table[slot.long(), index.long()] = block


def prepare_batch(
    rows: StepRows, token_table: Tensor, block_table: Tensor, block_size: int, buffers: BatchBuffers
) -> Batch:
    """Fill the buffers for one step from the slots' state.

    Args:
        rows: the step's rows, padded to R.
        token_table: int32 [slots, max_len].
        block_table: int32 [slots, max_blocks], at most as wide as the buffers' tables.
        block_size: tokens a block.
        buffers: written and viewed by the returned batch.
    """
    count, tokens = len(rows.slots), rows.bucket_tokens
    query_start = rows.query_start.long()
    row = torch.searchsorted(query_start[1:], torch.arange(tokens, device=query_start.device), right=True)
    real = row < count
    row_or_0 = torch.where(real, row, 0)
    slots = rows.slots.long().clamp(min=0)
    position = rows.starts[row_or_0] + torch.arange(tokens, device=row.device) - query_start[row_or_0]
    position = torch.where(real, position, 0)
    slot = slots[row_or_0]
    block = block_table[slot, position // block_size].long()

    buffers.positions[:tokens] = position
    buffers.token_ids[:tokens] = torch.where(real, token_table[slot, position], 0)
    buffers.kv_slots[:tokens] = torch.where(real, block * block_size + position % block_size, -1)
    query_len = query_start.diff()
    used = query_len > 0
    buffers.seq_lens[:count] = torch.where(used, rows.starts + query_len, 0)
    width = block_table.shape[1]
    buffers.block_tables[:count, :width] = torch.where(used[:, None], block_table[slots], 0)
    buffers.sample_index[:count] = torch.where(used, query_start[1:] - 1, 0)
    return buffers.view(rows)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight^T + bias.

    Args:
        x: [T, in].
        weight: [out, in].
        bias: [out] or None.

    Returns:
        [T, out], contiguous.
    """
    if not x.is_cpu or len(x) not in SWAPPED_ROWS:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t().contiguous()
    return torch.addmm(bias[:, None], weight, x.t()).t().contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float) -> Tensor:
    """RMSNorm over the last dimension (arXiv 1910.07467); scaled by weight + weight_offset (1.0 in Gemma)."""
    if weight_offset:
        wide = torch.promote_types(x.dtype, torch.float32)
        return F.rms_norm(x.to(wide), x.shape[-1:], weight.to(wide) + weight_offset, eps).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """residual + x, and its RMSNorm.

    Args:
        x, residual: [T, H]; residual None stands for zero. Neither is changed.
        weight: [H].
        weight_offset: added to the weight.

    Returns:
        (normed [T, H], sum [T, H]), both of x's dtype.
    """
    total = x if residual is None else x + residual
    return rms_norm(total, weight, eps, weight_offset), total


def gather_add_rms_norm(
    x: Tensor, residual: Tensor, index: Tensor, weight: Tensor, eps: float, weight_offset: float, out: Tensor
) -> None:
    """RMSNorm of residual + x at some tokens.

    Args:
        x, residual: [T, H].
        index: int64 [R], the tokens.
        weight: [H].
        weight_offset: added to the weight.
        out: [R, H], written.
    """
    out.copy_(rms_norm(x[index] + residual[index], weight, eps, weight_offset))


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [T, 2 I] = gate | up; gives [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up with the tanh approximation, of [T, 2 I] = gate | up; gives [T, I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


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
    """Normalise queries and keys per head, rotate them, and write keys and values into the cache.

    Args:
        qkv: [T, (Hq + 2 Hkv) * D].
        q_norm, k_norm: [D], both or neither.
        cos_sin: float32 [positions, rot_dim]: cosines of the rot_dim / 2 angles, then sines; the first rot_dim
            dimensions of a head are rotated, halves paired (arXiv 2104.09864 in the order of GPT-NeoX).
        kv_cache: [num_blocks, num_layers, 2, Hkv, block_size, D], written at `batch.kv_slots`.
        layer: which layer of the cache.

    Returns:
        The rotated queries [T, Hq, D]; zero for padding tokens.
    """
    tokens, dim = qkv.shape[0], kv_cache.shape[-1]
    heads = qkv.view(tokens, num_heads + 2 * num_kv_heads, dim)
    qk = heads[:, : num_heads + num_kv_heads]
    if q_norm is not None and k_norm is not None:
        q = rms_norm(qk[:, :num_heads], q_norm, eps, weight_offset)
        k = rms_norm(qk[:, num_heads:], k_norm, eps, weight_offset)
        qk = torch.cat((q, k), dim=1)
    qk = _rotate(qk, cos_sin, batch)
    keys_values = torch.cat((qk[:, num_heads:], heads[:, num_heads + num_kv_heads :]), dim=1)
    write_kv(keys_values, batch, kv_cache, layer)
    q = qk[:, :num_heads]
    kept, _ = batch.shared["kv_write"]
    return q if kept is None else q.masked_fill(batch.kv_slots[:, None, None] < 0, 0)


def _rotate(x: Tensor, cos_sin: Tensor, batch: Batch) -> Tensor:
    rot = cos_sin.shape[1]
    key = ("rope", cos_sin.data_ptr())
    if key not in batch.shared:
        cos, sin = cos_sin[batch.positions.long()].chunk(2, dim=-1)
        batch.shared[key] = (torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    cos, sin = batch.shared[key]
    part = x if rot == x.shape[-1] else x[..., :rot]
    turned = torch.addcmul(part * cos, part.roll(rot // 2, -1), sin).to(x.dtype)
    return turned if part is x else torch.cat((turned, x[..., rot:]), dim=-1)


def write_kv(keys_values: Tensor, batch: Batch, kv_cache: Tensor, layer: int) -> None:
    """Write [T, 2 Hkv, D], keys then values, to the tokens' KV slots of one layer."""
    _, num_layers, _, kv_heads, block_size, dim = kv_cache.shape
    if "kv_write" not in batch.shared:
        kept = (batch.kv_slots >= 0).nonzero().flatten()
        kv_slot = batch.kv_slots[kept, None]
        part = torch.arange(2 * kv_heads, device=kv_slot.device)
        index = ((kv_slot // block_size) * num_layers * 2 * kv_heads + part) * block_size + kv_slot % block_size
        batch.shared["kv_write"] = (None if len(kept) == len(batch.kv_slots) else kept, index.flatten())
    kept, index = batch.shared["kv_write"]
    rows = keys_values if kept is None else keys_values[kept]
    offset = layer * 2 * kv_heads * block_size
    kv_cache.view(-1, dim).index_copy_(0, index + offset, rows.reshape(-1, dim))


def copy_blocks(kv_cache: Tensor, pairs: Tensor) -> None:
    """Copy whole blocks, all layers: kv_cache[pairs[i, 1]] = kv_cache[pairs[i, 0]].

    Args:
        kv_cache: [num_blocks, ...].
        pairs: int32 [C, 2]; no destination is also a source or comes twice.
    """
    sources, targets = pairs.long().unbind(1)
    kv_cache.index_copy_(0, targets, kv_cache.index_select(0, sources))
