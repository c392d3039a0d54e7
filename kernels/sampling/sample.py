"""Sampling on a GPU: edit the logits, find the cutoff of truncation, draw, finish.

The first two run only where the host knows of a row that asks for them; other rows leave them at once. Greedy rows
and rows with a temperature cost one pass over the logits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.sampling.cutoff import find_cutoff
from wavecore.kernels.sampling.hash import gumbel, gumbel_bound, row_keys
from wavecore.kernels.sampling.rows import PART, SamplingRows, part_size
from wavecore.kernels.sampling.values import (
    EXACT,
    adjusted,
    changes,
    is_greedy,
    largest,
    logits_of,
    penalised,
    row_values,
    values_of,
)

WORD_BLOCK = 256
"""A bad word has at most so many tokens (`sampling_params.MAX_STOP_LENGTH`)."""


def adjust(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See `reference.sampling.adjust`; logits has unit stride along the vocabulary."""
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    count, vocab = logits.shape
    if count:
        values = _edited(logits, rows)
        _adjust[(count, triton.cdiv(vocab, PART))](values, out, BLOCK=PART, num_warps=4, **EXACT)
    return out


def draw(logits: Tensor, rows: SamplingRows) -> Tensor:
    """See `reference.sampling.draw`; logits has unit stride along the vocabulary."""
    count, vocab = logits.shape
    assert logits.stride(1) == 1 and rows.token_ids.stride(1) == 1 and rows.counts.stride(1) == 1
    size = part_size(count, vocab)
    best = torch.empty(2, count, triton.cdiv(vocab, size), dtype=torch.float32, device=logits.device)
    if not count:
        return best
    values = _edited(logits, rows)
    cutoff = find_cutoff(values) if rows.truncates else best
    _draw[best.shape[1:]](values, cutoff, best, size, HAS_CUTOFF=rows.truncates, BLOCK=PART, num_warps=1, **EXACT)
    return best


def finish(best: Tensor, rows: SamplingRows) -> None:
    """See `reference.sampling.finish`."""
    ranks, _, count, parts = best.shape
    assert best.is_contiguous() and rows.tokens.is_contiguous() and rows.faults.is_contiguous()
    if not count:
        return
    drawn = best, ranks * parts, parts, rows.slots, rows.positions
    tokens = rows.token_ids, rows.token_ids.stride(0), rows.token_ids.shape[1]
    counts = rows.count_row, rows.counts, rows.counts.stride(0), rows.counts.shape[1], rows.first
    block = triton.next_power_of_2(ranks * parts)
    _finish[(count,)](*drawn, *tokens, *counts, rows.tokens, rows.faults, BLOCK=block, num_warps=1)


def _edited(logits: Tensor, rows: SamplingRows) -> Any:
    """The logits with bias and bans, where rows have any, and the rows."""
    if not rows.edits:
        return values_of(logits, rows)
    values = values_of(logits.float(), rows)
    _edit[(len(logits),)](values, BLOCK=WORD_BLOCK, num_warps=2)
    return values


@triton.jit
def _edit(v, BLOCK: tl.constexpr):
    """A program (row) adds its biases to the float32 logits and bans tokens, BLOCK entries of a list at a time."""
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        return
    row_ptr = v.logits + row.to(tl.int64) * v.stride
    position = tl.load(v.positions + row)
    lane = tl.arange(0, BLOCK)
    begin = tl.load(v.bias_range + 2 * slot)
    end = tl.load(v.bias_range + 2 * slot + 1)
    for bans in tl.static_range(2):  # a token can have both a bias and a ban, and the ban must come last
        for start in range(begin, end, BLOCK):
            inside = start + lane < end
            token = tl.load(v.bias_ids + start + lane, mask=inside, other=0) - v.first
            value = tl.load(v.bias_values + start + lane, mask=inside, other=0.0)
            now = inside & (token >= 0) & (token < v.vocab)
            now &= tl.load(v.bias_until + start + lane, mask=inside, other=0) > position
            now &= (value == float("-inf")).to(tl.int32) == bans
            logit = tl.load(row_ptr + token, mask=now, other=0.0)
            tl.store(row_ptr + token, value if bans else logit + value, mask=now)
        tl.debug_barrier()
    for word in range(tl.load(v.word_range + 2 * slot), tl.load(v.word_range + 2 * slot + 1)):
        first = tl.load(v.word_start + word)
        last = tl.load(v.word_start + word + 1) - 1
        before = last - first
        inside = lane < before
        if before <= position:
            wanted = tl.load(v.word_tokens + first + lane, mask=inside, other=0)
            past = v.token_ids + slot * v.token_stride + position - before
            if tl.sum((tl.load(past + lane, mask=inside, other=0) != wanted).to(tl.int32)) == 0:
                banned = tl.load(v.word_tokens + last) - v.first
                tl.store(row_ptr + banned, float("-inf"), mask=(banned >= 0) & (banned < v.vocab))


@triton.jit
def _adjust(v, out_ptr, BLOCK: tl.constexpr):
    """A program (row, part of BLOCK tokens) writes out [rows, v.vocab]; 0 where the row does not sample."""
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.zeros([BLOCK], tl.float32)
    if slot >= 0:
        x = adjusted(v, row, slot, token)
    tl.store(out_ptr + row.to(tl.int64) * v.vocab + token, x, mask=token < v.vocab)


@triton.jit
def _draw(v, cutoff_ptr, best_ptr, size, HAS_CUTOFF: tl.constexpr, BLOCK: tl.constexpr):
    """A program (row, part of `size` tokens) writes to best [2, rows, parts] the part's best value, NaN if any is, and
    its token; 0 where the row does not sample.

    With a temperature a token gets a bound of its noise; only where that lets it win its true noise is computed.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    value_ptr = best_ptr + row.to(tl.int64) * parts + part
    token_ptr = value_ptr + tl.num_programs(0).to(tl.int64) * parts
    begin = part * size
    end = tl.minimum(begin + size, v.vocab)
    ahead = logits_of(v, row, begin + tl.arange(0, BLOCK))  # on its way while the row's parameters are
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        tl.store(value_ptr, 0.0)
        tl.store(token_ptr, 0.0)
        return
    noisy = is_greedy(v, slot) == 0
    changed = changes(v, slot)
    temperature = tl.load(v.temperature + slot)
    key_1, key_2 = row_keys(tl.load(v.seed + slot), tl.load(v.choice + slot), tl.load(v.positions + row))
    cutoff = float("-inf")
    if HAS_CUTOFF:
        cutoff = tl.load(cutoff_ptr + row)
    best = float("-inf")
    token = begin
    broken = False
    for start in range(begin, end, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = ahead.to(tl.float32)
        if start + BLOCK < end:
            ahead = logits_of(v, row, column + BLOCK)
        if changed:
            x = penalised(v, x, slot, column)
        if HAS_CUTOFF:
            kept = noisy & ((largest(x) < cutoff) == 0)
        else:
            kept = noisy
        if kept:
            if HAS_CUTOFF:
                x = tl.where(x < cutoff, float("-inf"), x)
            x = tl.fma(x, 1.0 / temperature, gumbel_bound(v.first + column, key_1, key_2))
        elif noisy:
            x = tl.full([BLOCK], float("-inf"), tl.float32)
        bound = largest(x)
        if bound != bound:
            broken = True
            x = tl.where(x == x, x, float("-inf"))
            bound = tl.max(x)
        while bound + tl.where(noisy, 1e-4 + tl.abs(bound) * 1e-6, 0.0) > best:  # the bound of noise is rounded
            at = tl.min(tl.where(x == bound, column, v.vocab), axis=0)
            value = bound
            if noisy:
                value = row_values(v, row, slot, at) + gumbel(v.first + at, key_1, key_2)
            token = tl.where((value > best) | ((value == best) & (at < token)), at, token)
            best = tl.maximum(value, best)
            x = tl.where(column == at, float("-inf"), x)
            bound = largest(x)
    tl.store(value_ptr, tl.where(broken, float("nan"), best))
    tl.store(token_ptr, (v.first + token).to(tl.float32))


@triton.jit
def _finish(
    best_ptr, entries, parts, slots_ptr, positions_ptr, token_ids_ptr, token_stride, max_len, count_row_ptr,
    counts_ptr, counts_stride, columns, first_id, tokens_ptr, faults_ptr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program (row) writes and counts the token of the best of all ranks' parts, best [ranks, 2, rows, parts] with
    ranks * parts = entries, and says whether the row is faulty."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        tl.store(tokens_ptr + row, -1)
        tl.store(faults_ptr + row, 0)
        return
    entry = tl.arange(0, BLOCK)
    inside = entry < entries
    rows = tl.num_programs(0)
    place = best_ptr + (entry // parts * 2 * rows + row) * parts + entry % parts
    value = tl.load(place, mask=inside, other=float("-inf"))
    broken = tl.max((value != value).to(tl.int32), axis=0)
    value = tl.where(value == value, value, float("-inf"))
    best = tl.max(value, axis=0)
    token = tl.load(place + rows * parts, mask=inside & (value == best), other=float("inf"))
    token = tl.min(token, axis=0).to(tl.int32)
    infinite = (best == float("inf")) | (best == float("-inf"))
    tl.store(tokens_ptr + row, token)
    tl.store(faults_ptr + row, ((broken > 0) | infinite).to(tl.int32))
    position = tl.load(positions_ptr + row)
    tl.store(token_ids_ptr + slot * token_stride + position, token, mask=position < max_len)
    count_row = tl.load(count_row_ptr + slot).to(tl.int64)
    column = token - first_id
    if (count_row >= 0) & (column >= 0) & (column < columns):
        counter = counts_ptr + count_row * counts_stride + column
        tl.store(counter, tl.load(counter) + 1)
