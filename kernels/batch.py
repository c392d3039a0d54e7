"""The device tensors of one step: its rows as the host plans them, and the batch that every layer reads.

rows        r0      r1          r2                 a row is one sequence's share of the step
tokens      t0      t1 t2 t3    t4 t5    x  x      x = padding up to the bucket
query_start [0,     1,          4,       6]        rows with one query token come first
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step, padded to a bucket of T tokens and R rows.

    Padding tokens have id 0, position 0 and KV slot -1: their keys and values are written nowhere, their rotated
    queries and their attention are zero, whatever their hidden state holds. That one is what the layers make of token
    0 by itself; no real token reads it. Padding rows have no query, length 0 and sample_index 0: attention skips them,
    and `sample` yields -1 for slot -1. Make a new object for each forward pass (also over the same buffers): `shared`
    lives as long.

    Attributes:
        token_ids: int32 [T].
        positions: int32 [T], place of each token in its sequence.
        kv_slots: int64 [T], block * block_size + offset where the token's key and value go, or -1.
        query_start: int32 [R + 1], first token of each row.
        seq_lens: int32 [R], tokens of the sequence, this step's included.
        block_tables: int32 [R, max_blocks], the blocks of each row; entries beyond its length are never read.
        sample_index: int64 [R], index of the row's last token (0 for padding rows).
        num_decode_rows: upper bound of rows with one query token.
        max_query_len: upper bound over the rows.
        shared: what the first layer of a pass computes and the others reuse (task maps, masks, gathers).
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    sample_index: Tensor
    num_decode_rows: int
    max_query_len: int
    shared: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)


class BatchBuffers(NamedTuple):
    """Static memory that `prepare_batch` fills, large enough for every bucket. Fields as in `Batch`."""

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    sample_index: Tensor

    @classmethod
    def allocate(cls, max_tokens: int, max_rows: int, max_blocks: int, device: torch.device | str) -> BatchBuffers:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=zeros(max_tokens),
            positions=zeros(max_tokens),
            kv_slots=zeros(max_tokens, dtype=torch.int64),
            seq_lens=zeros(max_rows),
            block_tables=zeros(max_rows, max_blocks),
            sample_index=zeros(max_rows, dtype=torch.int64),
        )

    def view(self, rows: StepRows) -> Batch:
        """The batch of a step whose columns have been filled (or will be, by what is queued on the device)."""
        count, tokens = len(rows.slots), rows.bucket_tokens
        return Batch(
            token_ids=self.token_ids[:tokens],
            positions=self.positions[:tokens],
            kv_slots=self.kv_slots[:tokens],
            query_start=rows.query_start,
            seq_lens=self.seq_lens[:count],
            block_tables=self.block_tables[:count],
            sample_index=self.sample_index[:count],
            num_decode_rows=rows.num_decode_rows,
            max_query_len=rows.max_query_len,
        )


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of a step as the host plans them, on the device.

    Attributes:
        slots: int32 [R], -1 for padding rows.
        starts: int32 [R], position of each row's first query token.
        query_start: int32 [R + 1]; padding rows repeat the number of tokens.
        num_decode_rows, max_query_len: as in `Batch`.
        bucket_tokens: T, at least the number of tokens.
    """

    slots: Tensor
    starts: Tensor
    query_start: Tensor
    num_decode_rows: int
    max_query_len: int
    bucket_tokens: int

    @property
    def device(self) -> torch.device:
        return self.slots.device
