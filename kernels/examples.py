"""Small random inputs for every operation: what `register_op` tries a function on, and what the tests start from."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from wavecore.kernels.batch import Batch, BatchBuffers, StepRows
from wavecore.kernels.reference.layers import prepare_batch
from wavecore.kernels.sampling.rows import NO_LIMIT, SEEN_IN_PROMPT, SamplingRows

Args = tuple[Any, ...]


def step_rows(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    device: torch.device | str,
    pad_rows: int = 0,
    pad_tokens: int = 0,
) -> StepRows:
    """Row r of the step is slot r; decode rows must come first."""
    rows, tokens = len(query_lens), sum(query_lens)
    starts = [s - q for s, q in zip(seq_lens, query_lens, strict=True)]

    def column(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StepRows(
        slots=column([*range(rows)] + [-1] * pad_rows),
        starts=column(starts + [0] * pad_rows),
        query_start=column([*accumulate(query_lens, initial=0)] + [tokens] * pad_rows),
        num_decode_rows=sum(n == 1 for n in query_lens),
        max_query_len=max(query_lens),
        bucket_tokens=tokens + pad_tokens,
    )


def tables(seq_lens: Sequence[int], block_size: int, device: torch.device | str) -> tuple[Tensor, Tensor, int]:
    """A token table, a block table of shuffled blocks, and the number of blocks (block 0 is the null block)."""
    blocks = [-(-n // block_size) for n in seq_lens]
    order = torch.randperm(sum(blocks)) + 1
    table = torch.zeros(len(seq_lens), max(*blocks, 1) + 1, dtype=torch.int32)
    for row, part in enumerate(torch.split(order, blocks)):
        table[row, : len(part)] = part
    tokens = torch.randint(0, 1000, (len(seq_lens), max(*seq_lens, 1) + 1), dtype=torch.int32)
    return tokens.to(device), table.to(device), sum(blocks) + 1


def make_batch(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    device: torch.device | str = "cpu",
    pad_rows: int = 0,
    pad_tokens: int = 0,
) -> tuple[Batch, int]:
    """A batch by the twin of `prepare_batch`, and the number of blocks it needs."""
    rows = step_rows(query_lens, seq_lens, device, pad_rows, pad_tokens)
    token_table, block_table, num_blocks = tables(seq_lens, block_size, device)
    buffers = BatchBuffers.allocate(rows.bucket_tokens, len(rows.slots), block_table.shape[1], device)
    return prepare_batch(rows, token_table, block_table, block_size, buffers), num_blocks


def make_kv_cache(num_blocks: int, layers: int, kv_heads: int, block_size: int, dim: int, like: Tensor) -> Tensor:
    """Random keys and values of `like`'s dtype and device; block 0 is zero."""
    kv_cache = _randn((num_blocks, layers, 2, kv_heads, block_size, dim), like)
    kv_cache[0] = 0
    return kv_cache


def rope_table(positions: int, rot_dim: int, device: torch.device | str, base: float = 10000.0) -> Tensor:
    """float32 [positions, rot_dim], cosines then sines."""
    inverse = base ** (-torch.arange(0, rot_dim, 2, dtype=torch.float64) / rot_dim)
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse
    return torch.cat((angles.cos(), angles.sin()), -1).float().to(device)


def sampling_rows(rows: int, vocab: int, device: torch.device | str, **columns: Tensor) -> SamplingRows:
    """Greedy rows without any option at position 4 of slots 0 .. rows - 1, and room for what is drawn; `columns`
    replaces fields."""

    def full(value: float, dtype: torch.dtype = torch.int32, shape: tuple[int, ...] = (rows,)) -> Tensor:
        return torch.full(shape, value, dtype=dtype, device=device)

    f32 = torch.float32
    fields: dict[str, Any] = {
        "slots": torch.arange(rows, dtype=torch.int32, device=device),
        "positions": full(4),
        "token_ids": torch.randint(0, vocab, (rows, 8), dtype=torch.int32).to(device),
        "seed": torch.arange(rows, dtype=torch.int64, device=device) * 0x1234567890AB - 3,
        "counts": full(0, shape=(1, vocab)),
        "allowed": full(0, shape=(1, (vocab + 31) // 32)),
        "bias_values": full(0.0, f32, (1,)),
        **{name: full(0) for name in ("top_k", "choice")},
        **{name: full(-1) for name in ("count_row", "allowed_row")},
        **{name: full(1.0, f32) for name in ("top_p", "repetition_penalty")},
        **{name: full(0.0, f32) for name in ("temperature", "min_p", "presence_penalty", "frequency_penalty")},
        **{name: full(0, shape=(rows, 2)) for name in ("bias_range", "word_range")},
        **{name: full(0, shape=(1,)) for name in ("bias_ids", "bias_until", "word_start", "word_tokens")},
        **{name: full(0, shape=(len(columns.get("slots", range(rows))),)) for name in ("tokens", "faults")},
    }
    return SamplingRows(**fields | columns)


def _batch_and_kv_cache(like: Tensor) -> tuple[Batch, Tensor]:
    batch, num_blocks = make_batch([1, 1, 5], [9, 1, 7], 4, like.device, pad_rows=1, pad_tokens=1)
    return batch, make_kv_cache(num_blocks, 2, 2, 4, 64, like)


def _prepare(like: Tensor) -> Args:
    rows = step_rows([1, 1, 5], [9, 1, 7], like.device, pad_rows=1, pad_tokens=1)
    rows = replace(rows, slots=torch.tensor([1, 2, 0, -1], dtype=torch.int32, device=like.device))
    token_table, block_table, _ = tables([7, 9, 1], 4, like.device)  # by slot
    return rows, token_table, block_table, 4, BatchBuffers.allocate(8, 4, block_table.shape[1], like.device)


def _changes(like: Tensor) -> Args:
    """Two changes; a third one does not count."""
    changes = torch.tensor([2, 0, 3, 7, 2, 1, 8, 1, 1, 9], dtype=torch.int32, device=like.device)
    return torch.zeros((3, 5), dtype=torch.int32, device=like.device), changes


def _norm(like: Tensor) -> Args:
    x, residual = _randn((3, 96), like), _randn((3, 96), like)
    return x, residual, _randn((96,), like), 1e-5, 1.0


def _gather_norm(like: Tensor) -> Args:
    index = torch.tensor([2, 0], device=like.device)
    return *_norm(like)[:2], index, *_norm(like)[2:], torch.zeros((2, 96), dtype=like.dtype, device=like.device)


def _rope(like: Tensor) -> Args:
    batch, kv_cache = _batch_and_kv_cache(like)
    q_norm, k_norm = _randn((64,), like), _randn((64,), like)
    qkv = _randn((8, 8 * 64), like)
    return qkv, q_norm, k_norm, 1e-6, rope_table(16, 32, like.device), batch, kv_cache, 1, 4, 2


def _attention(like: Tensor) -> Args:
    batch, kv_cache = _batch_and_kv_cache(like)
    return _randn((8, 4, 64), like), kv_cache, 1, batch, 0.125, 20.0, 6


def _gate_up(like: Tensor) -> Args:
    return (_randn((3, 2 * 96), like),)


def _logits(like: Tensor) -> Args:
    vocab, device = 200, like.device

    def ints(values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows = sampling_rows(
        6,
        vocab,
        device,
        slots=ints([4, 0, 5, -1, 2, 1]),
        positions=ints([4, 2, 7, 0, 3, 5]),
        choice=ints([0, 1, 2, 0, 3, 0]),
        temperature=ints([0.0, 0.7, 1.0, 1.0, 1.3, 0.0], torch.float32),
        top_k=ints([0, 5, 0, 0, 20, 0]),
        top_p=ints([1.0, 1.0, 0.8, 1.0, 0.9, 1.0], torch.float32),
        min_p=ints([0.0, 0.0, 0.0, 0.0, 0.1, 0.0], torch.float32),
        repetition_penalty=ints([1.0, 1.0, 1.0, 1.0, 1.5, 1.0], torch.float32),
        frequency_penalty=ints([0.0, 0.0, 0.0, 0.0, 0.5, 0.0], torch.float32),
        presence_penalty=ints([0.0, 0.0, 0.0, 0.0, 0.25, 0.0], torch.float32),
        count_row=ints([-1, -1, -1, -1, 0, -1]),
        counts=torch.randint(0, 3, (1, vocab), dtype=torch.int32).to(device) + SEEN_IN_PROMPT,
        allowed_row=ints([-1, -1, 0, -1, -1, -1]),
        allowed=ints([[0x5A5A5A5A] * 7]),
        bias_range=ints([[0, 2]] + [[0, 0]] * 5),
        bias_ids=ints([3, 7]),
        bias_values=ints([50.0, -torch.inf], torch.float32),
        bias_until=ints([NO_LIMIT, NO_LIMIT]),
    )
    return _randn((6, vocab), like) * 3, rows


def _few_rows(like: Tensor) -> Args:
    return _randn((3, 96), like), _randn((50, 96), like), _randn((50,), like)


def _finish(like: Tensor) -> Args:
    """Of two ranks with three parts each; this is the second one."""
    _, rows = _logits(like)
    tokens = (torch.arange(2 * 3).view(2, 1, 3) * 100 / 3).int().expand(2, 6, 3)
    best = torch.stack((torch.randn(2, 6, 3), tokens.float()), 1).to(like.device)
    return best, replace(rows, first=100, counts=rows.counts[:, 100:])


def _moe(like: Tensor) -> Args:
    experts, own, hidden, inner = 5, 3, 48, 40
    kv_slots = torch.tensor([3, 0, -1, 7, 9, 11, -1], dtype=torch.int32, device=like.device)
    x, scores = _randn((7, hidden), like), _randn((7, experts), like)
    gate_up, down = _randn((own * 2 * inner, hidden), like), _randn((own * hidden, inner), like)
    return x, scores, gate_up / hidden**0.5, down / inner**0.5, kv_slots, 2, True, 1


def _copies(like: Tensor) -> Args:
    pairs = torch.tensor([[1, 2], [4, 3]], dtype=torch.int32, device=like.device)
    return make_kv_cache(5, 2, 2, 4, 64, like), pairs


def _randn(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device=like.device).to(like.dtype)


EXAMPLES: dict[str, Callable[[Tensor], Args]] = {
    "update_block_table": _changes,
    "prepare_batch": _prepare,
    "add_rms_norm": _norm,
    "gather_add_rms_norm": _gather_norm,
    "qk_norm_rope_kv_write": _rope,
    "paged_attention": _attention,
    "silu_mul": _gate_up,
    "gelu_tanh_mul": _gate_up,
    "linear": _few_rows,
    "moe": _moe,
    "adjust": _logits,
    "draw": _logits,
    "finish": _finish,
    "copy_blocks": _copies,
}
"""Operation to a maker of arguments, of the dtype and on the device of the tensor given."""
