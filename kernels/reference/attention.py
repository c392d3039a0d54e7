"""Torch twin of paged attention. Decode rows run as one batch; prefill rows one by one, since there are few."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from wavecore.kernels.batch import Batch


def paged_attention(
    q: Tensor, kv_cache: Tensor, layer: int, batch: Batch, scale: float, soft_cap: float = 0.0, window: int = 0
) -> Tensor:
    """Causal attention of each row's query tokens over its blocks, where their own keys already lie.

    Args:
        q: [T, Hq, D]; Hq is a multiple of Hkv, query head h reads key head h // (Hq / Hkv).
        kv_cache: [num_blocks, num_layers, 2, Hkv, block_size, D], of q's dtype.
        scale: multiplies the scores.
        soft_cap: scores become soft_cap * tanh(score / soft_cap); 0 leaves them.
        window: how many tokens a query sees, itself included; 0 is all.

    Returns:
        [T, Hq * D]; zero for padding tokens and for rows of length 0.
    """
    tokens, heads, dim = q.shape
    kv_heads = kv_cache.shape[3]
    key = ("attention", window)
    if key not in batch.shared:
        batch.shared[key] = _plan(batch, kv_cache, window)
    decode, prefills = batch.shared[key]
    q = q.view(tokens, kv_heads, heads // kv_heads, dim)
    if decode is not None and not prefills and decode.rows == tokens:
        return _decode(q, kv_cache, layer, decode, scale, soft_cap).reshape(tokens, heads * dim)
    out = q.new_zeros(tokens, kv_heads, heads // kv_heads, dim)
    if decode is not None:
        out[: decode.rows] = _decode(q[: decode.rows], kv_cache, layer, decode, scale, soft_cap)
    for row in prefills:
        out[row.begin : row.end] = _prefill(q[row.begin : row.end], kv_cache, layer, row, scale, soft_cap)
    return out.view(tokens, heads * dim)


@dataclass(frozen=True, slots=True)
class _Decode:
    """Rows 0 .. rows - 1 have one query token each; their keys are gathered to a common width.

    Attributes:
        index: int64 [2 * rows * Hkv * blocks], which (block, k/v, head) chunks of layer 0 to gather.
        width: keys a row, all its blocks cut to the longest row.
        mask: bool [rows, 1, 1, width], or None where every key is visible.
        tail: int64, (row, head, key) vectors behind a row's end, cleared so that stale NaN cannot leak in.
        empty: bool [rows, 1, 1, 1], rows of length 0, or None.
    """

    rows: int
    index: Tensor
    blocks: int
    width: int
    mask: Tensor | None
    tail: Tensor | None
    empty: Tensor | None


@dataclass(frozen=True, slots=True)
class _Prefill:
    """Tokens begin .. end - 1 are one row; mask: bool [queries, width], or None where plain causal serves."""

    begin: int
    end: int
    index: Tensor
    width: int
    mask: Tensor | None


def _plan(batch: Batch, kv_cache: Tensor, window: int) -> tuple[_Decode | None, list[_Prefill]]:
    starts = batch.query_start.tolist()
    lens = batch.seq_lens.tolist()
    rows = 0
    while rows < len(lens) and starts[rows + 1] - starts[rows] == 1:
        rows += 1
    decode = _plan_decode(batch.block_tables[:rows], lens[:rows], kv_cache, window) if rows else None
    prefills = [
        _plan_prefill(batch.block_tables[r], starts[r], starts[r + 1], lens[r], kv_cache, window)
        for r in range(rows, len(lens))
        if starts[r + 1] > starts[r] and lens[r]
    ]
    return decode, prefills


def _chunk_index(blocks: Tensor, kv_cache: Tensor) -> Tensor:
    """Indices of layer 0's [block_size * D] chunks for [rows, n] blocks: int64 [2 * rows * Hkv * n]."""
    _, layers, _, kv_heads, _, _ = kv_cache.shape
    part = torch.arange(2 * kv_heads, device=blocks.device).view(2, 1, kv_heads, 1)
    return (blocks.long()[None, :, None] * (layers * 2 * kv_heads) + part).flatten()


def _plan_decode(tables: Tensor, lens: list[int], kv_cache: Tensor, window: int) -> _Decode:
    block_size, kv_heads = kv_cache.shape[4], kv_cache.shape[3]
    device = tables.device
    length = torch.tensor(lens, device=device)
    first_key = (length - window).clamp(min=0) if window else torch.zeros_like(length)
    first_block = first_key // block_size
    shown = length - first_block * block_size
    width = max(1, int(shown.max()))
    num = -(-width // block_size)
    column = first_block[:, None] + torch.arange(num, device=device)
    blocks = tables.gather(1, column.clamp(max=tables.shape[1] - 1))
    blocks = torch.where(column * block_size < length[:, None], blocks, 0)  # block 0 is never written: always finite
    key = torch.arange(num * block_size, device=device)
    behind = key >= shown[:, None]
    visible = ~behind & (key >= (first_key - first_block * block_size)[:, None])
    tail = None
    if bool(behind[:, :width].any()):
        tail = behind[None, :, None].expand(2, -1, kv_heads, -1).flatten().nonzero().flatten()
    mask = visible[:, None, None, :width]
    return _Decode(
        rows=len(lens),
        index=_chunk_index(blocks, kv_cache),
        blocks=num,
        width=width,
        mask=None if bool(mask.all()) else mask,
        tail=tail,
        empty=(length == 0)[:, None, None, None] if 0 in lens else None,
    )


def _plan_prefill(table: Tensor, begin: int, end: int, length: int, kv_cache: Tensor, window: int) -> _Prefill:
    block_size, queries = kv_cache.shape[4], end - begin
    first = length - queries  # position of the first query
    first_block = max(0, first - window + 1) // block_size if window else 0
    last_block = -(-length // block_size)
    width = length - first_block * block_size
    mask = None
    if first or (window and window < length):
        key = torch.arange(first_block * block_size, length, device=table.device)
        query = torch.arange(first, length, device=table.device)[:, None]
        mask = key <= query
        if window:
            mask &= key > query - window
    return _Prefill(begin, end, _chunk_index(table[None, first_block:last_block], kv_cache), width, mask)


def _gather(kv_cache: Tensor, layer: int, index: Tensor, rows: int) -> Tensor:
    """Keys and values of one layer: [2, rows, Hkv, blocks * block_size, D]."""
    kv_heads, block_size, dim = kv_cache.shape[3:]
    chunks = kv_cache.view(-1, block_size * dim).index_select(0, index + layer * 2 * kv_heads)
    return chunks.view(2, rows, kv_heads, -1, dim)


def _decode(q: Tensor, kv_cache: Tensor, layer: int, plan: _Decode, scale: float, soft_cap: float) -> Tensor:
    kv = _gather(kv_cache, layer, plan.index, plan.rows)
    if plan.tail is not None:
        kv.view(-1, kv.shape[-1]).index_fill_(0, plan.tail, 0)
    k, v = kv[:, :, :, : plan.width].unbind(0)
    out = _attend(q, k, v, plan.mask, False, scale, soft_cap)
    return out if plan.empty is None else out.masked_fill(plan.empty, 0)


def _prefill(q: Tensor, kv_cache: Tensor, layer: int, plan: _Prefill, scale: float, soft_cap: float) -> Tensor:
    k, v = _gather(kv_cache, layer, plan.index, 1)[:, 0, :, None, : plan.width].unbind(0)
    group = q.shape[2]
    shape = (-1, group, -1, -1)  # keys are shared by the group without a copy
    out = _attend(q.permute(1, 2, 0, 3), k.expand(shape), v.expand(shape), plan.mask, True, scale, soft_cap)
    return out.permute(2, 0, 1, 3)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, soft_cap: float
) -> Tensor:
    """Attention of [..., queries, D] over [..., keys, D]; `causal` applies where there is no mask."""
    causal = causal and mask is None
    if not soft_cap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = soft_cap * torch.tanh((q @ k.transpose(-1, -2)).to(wide) * (scale / soft_cap))
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).to(q.dtype) @ v
