"""Sampling on a GPU: edit the logits, find the cutoff of truncation, draw, finish.

The first two run only where the host knows of a row that asks for them; other rows leave them at once. Greedy rows
and rows with a temperature cost one pass over the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.sampling.cutoff import find_cutoff
from wavecore.kernels.sampling.hash import gumbel, row_keys
from wavecore.kernels.sampling.rows import SamplingRows
from wavecore.kernels.sampling.values import EXACT, is_greedy, row_values, values_of

BLOCK = 2048
WORD_BLOCK = 256
"""A bad word has at most so many tokens (`sampling_params.MAX_STOP_LENGTH`)."""


def sample(logits: Tensor, rows: SamplingRows) -> None:
    """See `reference.sampling.sample`; logits has unit stride along the vocabulary."""
    count, vocab = logits.shape
    assert logits.stride(1) == 1 and rows.token_ids.stride(1) == 1
    assert rows.tokens.is_contiguous() and rows.faults.is_contiguous()
    if not count:
        return
    if rows.edits:
        logits = logits.float()
        _edit[(count,)](
            logits,
            logits.stride(0),
            rows.slots,
            rows.positions,
            rows.token_ids,
            rows.token_ids.stride(0),
            rows.bias_range,
            rows.bias_ids,
            rows.bias_values,
            rows.bias_until,
            rows.word_range,
            rows.word_start,
            rows.word_tokens,
            BLOCK=WORD_BLOCK,
            num_warps=2,
        )
    values = values_of(logits, rows)
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    _draw[(count, parts)](
        values,
        rows.positions,
        rows.seed,
        rows.choice,
        find_cutoff(values, BLOCK) if rows.truncates else best,
        best,
        best_token,
        HAS_CUTOFF=rows.truncates,
        BLOCK=BLOCK,
        num_warps=4,
        **EXACT,
    )
    _finish[(count,)](
        values,
        best,
        best_token,
        parts,
        rows.positions,
        rows.token_ids,
        rows.token_ids.stride(0),
        rows.token_ids.shape[1],
        rows.tokens,
        rows.faults,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
    )


@triton.jit
def _edit(
    logits_ptr,
    logits_stride,
    slots_ptr,
    positions_ptr,
    token_ids_ptr,
    token_stride,
    bias_range_ptr,
    bias_ids_ptr,
    bias_values_ptr,
    bias_until_ptr,
    word_range_ptr,
    word_start_ptr,
    word_tokens_ptr,
    BLOCK: tl.constexpr,
):
    """A program (row) adds its biases to the float32 logits and bans tokens, BLOCK entries of a list at a time."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    position = tl.load(positions_ptr + row)
    lane = tl.arange(0, BLOCK)
    begin = tl.load(bias_range_ptr + 2 * slot)
    end = tl.load(bias_range_ptr + 2 * slot + 1)
    for bans in tl.static_range(2):  # a token can have both a bias and a ban, and the ban must come last
        for start in range(begin, end, BLOCK):
            inside = start + lane < end
            token = tl.load(bias_ids_ptr + start + lane, mask=inside, other=0)
            value = tl.load(bias_values_ptr + start + lane, mask=inside, other=0.0)
            now = inside & (tl.load(bias_until_ptr + start + lane, mask=inside, other=0) > position)
            now &= (value == float("-inf")).to(tl.int32) == bans
            logit = tl.load(row_ptr + token, mask=now, other=0.0)
            tl.store(row_ptr + token, value if bans else logit + value, mask=now)
        tl.debug_barrier()
    for word in range(tl.load(word_range_ptr + 2 * slot), tl.load(word_range_ptr + 2 * slot + 1)):
        first = tl.load(word_start_ptr + word)
        last = tl.load(word_start_ptr + word + 1) - 1
        before = last - first
        inside = lane < before
        if before <= position:
            wanted = tl.load(word_tokens_ptr + first + lane, mask=inside, other=0)
            past = token_ids_ptr + slot * token_stride + position - before
            if tl.sum((tl.load(past + lane, mask=inside, other=0) != wanted).to(tl.int32)) == 0:
                banned = tl.load(word_tokens_ptr + last)
                tl.store(row_ptr + banned, float("-inf"))


@triton.jit
def _draw(
    v,
    positions_ptr,
    seed_ptr,
    choice_ptr,
    cutoff_ptr,
    best_ptr,
    best_token_ptr,
    HAS_CUTOFF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A program (row, part of BLOCK tokens) writes the part's best value and its token; the value is NaN if any is."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        return
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = row_values(v, row, slot, token)
    broken = tl.max((x != x).to(tl.int32), axis=0)
    if is_greedy(v, slot) == 0:
        key_1, key_2 = row_keys(tl.load(seed_ptr + slot), tl.load(choice_ptr + slot), tl.load(positions_ptr + row))
        noisy = x + gumbel(token, key_1, key_2)
        if HAS_CUTOFF:
            noisy = tl.where(x >= tl.load(cutoff_ptr + row), noisy, float("-inf"))
        x = noisy
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, axis=0)
    place = row.to(tl.int64) * tl.num_programs(1) + part
    tl.store(best_token_ptr + place, tl.min(tl.where(x == best, token, v.vocab), axis=0))
    tl.store(best_ptr + place, tl.where(broken > 0, float("nan"), best))


@triton.jit
def _finish(
    v,
    best_ptr,
    best_token_ptr,
    parts,
    positions_ptr,
    token_ids_ptr,
    token_stride,
    max_len,
    tokens_ptr,
    faults_ptr,
    BLOCK: tl.constexpr,
):
    """A program (row) writes and counts the token of the best part [BLOCK], and says whether the row is faulty."""
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        tl.store(tokens_ptr + row, -1)
        tl.store(faults_ptr + row, 0)
        return
    part = tl.arange(0, BLOCK)
    inside = part < parts
    place = row.to(tl.int64) * parts + part
    value = tl.load(best_ptr + place, mask=inside, other=float("-inf"))
    broken = tl.max((value != value).to(tl.int32), axis=0)
    value = tl.where(value == value, value, float("-inf"))
    best = tl.max(value, axis=0)
    token = tl.load(best_token_ptr + place, mask=inside & (value == best), other=v.vocab)
    token = tl.minimum(tl.min(token, axis=0), v.vocab - 1)
    infinite = (best == float("inf")) | (best == float("-inf"))
    tl.store(tokens_ptr + row, token)
    tl.store(faults_ptr + row, ((broken > 0) | infinite).to(tl.int32))
    position = tl.load(positions_ptr + row)
    tl.store(token_ids_ptr + slot * token_stride + position, token, mask=position < max_len)
    count_row = tl.load(v.count_row + slot).to(tl.int64)
    if count_row >= 0:
        counter = v.counts + count_row * v.vocab + token
        tl.store(counter, tl.load(counter) + 1)
