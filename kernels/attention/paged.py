"""Paged attention on a GPU: rows with one query token take the split-KV kernel, longer rows a prefill kernel.

Both launch on the whole batch and skip the rows of the other, so nothing depends on lengths that only the device
knows. Every output element is written exactly once, padding as zero.
"""

from torch import Tensor

from wavecore.kernels.attention import prefill, prefill_hopper
from wavecore.kernels.attention.decode import decode_attention
from wavecore.kernels.batch import Batch


def paged_attention(
    q: Tensor, kv_cache: Tensor, layer: int, batch: Batch, scale: float, soft_cap: float = 0.0, window: int = 0
) -> Tensor:
    """See `reference.attention.paged_attention`; q and kv_cache are contiguous."""
    tokens, heads, dim = q.shape
    assert q.is_contiguous() and kv_cache.is_contiguous() and batch.block_tables.stride(1) == 1
    assert dim == kv_cache.shape[5] and heads % kv_cache.shape[3] == 0
    out = q.new_empty(tokens, heads * dim)
    if not tokens:
        return out
    prompts = batch.max_query_len > 1
    if prompts:
        kernel = prefill_hopper if prefill_hopper.holds(q, kv_cache) else prefill
        kernel.prefill_attention(out, q, kv_cache, layer, batch, scale, soft_cap, window)
    if batch.num_decode_rows or not prompts:
        decode_attention(out, q, kv_cache, layer, batch, scale, soft_cap, window, zero_padding=not prompts)
    return out
