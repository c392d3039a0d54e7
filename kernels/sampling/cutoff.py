"""The cutoff of truncation: the smallest logit that min_p, top_k and top_p keep. Nothing is sorted.

1. The largest logit of every GROUP tokens, in parallel.
2. A threshold: the m-th largest of these, m at least top_k. At least m tokens reach it, and of tokens in random order
   about -n log(1 - m / n), n being the number of groups.
3. The tokens that reach it are collected in parallel; the probability mass of all is added up on the way.
4. A bisection over the collected few finds the cutoff. Where they do not hold the nucleus of top_p (a very flat
   distribution) or are too many (thousands of equal logits), the whole row is searched instead.

A search goes by bisection over the ordered bits of logits. Candidates lie in no fixed order, so their masses are added
as 64-bit integers: the sum does not depend on the order, and a seed gives the same tokens whatever the batch. A whole
row is read in a fixed order, where float32 serves.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.sampling.values import EXACT, limits_top_k, row_values, truncates

GROUP = 128
CAPACITY = 4096
"""Candidates kept at most."""
SEARCH_BLOCK = 8192
"""Tokens read at once where a whole row is searched by one program."""
WANTED_K, WANTED_P = 512, 3072
"""Candidates aimed at where top_k bounds their number, and where nothing does."""


def find_cutoff(values: Any, block: int) -> Tensor:
    """float32 [R], in units of logit / temperature; -inf for rows that keep all tokens.

    Args:
        block: tokens a program handles.
    """
    device, count = values.slots.device, len(values.slots)
    groups = triton.cdiv(values.vocab, GROUP)
    peaks = torch.empty(count, groups, dtype=torch.float32, device=device)
    peak = torch.empty(count, dtype=torch.float32, device=device)
    threshold = torch.empty(count, dtype=torch.float32, device=device)
    total = torch.zeros(count, dtype=torch.int64, device=device)
    found = torch.zeros(count, dtype=torch.int32, device=device)
    candidates = torch.empty(count, CAPACITY, dtype=torch.float32, device=device)
    cutoff = torch.empty(count, dtype=torch.float32, device=device)
    grid = (count, triton.cdiv(values.vocab, block))
    _group_peaks[grid](values, peaks, groups, GROUP=GROUP, BLOCK=block, **EXACT)
    goals = [max(1, int(groups * (1 - math.exp(-wanted / groups)))) for wanted in (WANTED_K, WANTED_P)]
    _threshold[(count,)](values, peaks, groups, peak, threshold, *goals, BLOCK=triton.next_power_of_2(groups), **EXACT)
    _collect[grid](values, peak, threshold, total, found, candidates, CAPACITY=CAPACITY, BLOCK=block, **EXACT)
    search = {"BLOCK": SEARCH_BLOCK, "num_warps": 16}
    _search[(count,)](values, peak, threshold, total, found, candidates, cutoff, CAPACITY=CAPACITY, **search, **EXACT)
    return cutoff


@triton.jit
def _group_peaks(v, peaks_ptr, groups, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A program (row, part of BLOCK tokens) writes peaks [rows, groups]: of each group the largest value."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        return
    if truncates(v, slot):
        x = row_values(v, row, slot, part * BLOCK + tl.arange(0, BLOCK))
        x = tl.where(x == x, x, float("-inf"))
        group = part * (BLOCK // GROUP) + tl.arange(0, BLOCK // GROUP)
        peaks = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
        tl.store(peaks_ptr + row.to(tl.int64) * groups + group, peaks, mask=group < groups)


@triton.jit
def _threshold(v, peaks_ptr, groups, peak_ptr, threshold_ptr, goal_k, goal_p, BLOCK: tl.constexpr):
    """A program (row) finds the largest of all values, and the least that a candidate must have."""
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        return
    if truncates(v, slot):
        group = tl.arange(0, BLOCK)
        inside = group < groups
        value = tl.load(peaks_ptr + row.to(tl.int64) * groups + group, mask=inside, other=float("-inf"))
        peak = tl.max(value)
        goal = tl.where(limits_top_k(v, slot), tl.maximum(goal_k, tl.load(v.top_k + slot)), goal_p)
        lowest = ordered(tl.min(tl.where(inside, value, float("inf"))))
        key = largest_reaching(ordered(value), inside.to(tl.int32), goal, lowest, ordered(peak))
        # with fewer groups than tokens wanted no threshold promises enough: take all
        threshold = tl.where(goal <= groups, unordered(key), float("-inf"))
        min_p = tl.load(v.min_p + slot)
        if min_p > 0.0:
            threshold = tl.maximum(threshold, peak + tl.log(min_p))
        tl.store(peak_ptr + row, peak)
        tl.store(threshold_ptr + row, threshold)


@triton.jit
def _collect(
    v, peak_ptr, threshold_ptr, total_ptr, found_ptr, candidates_ptr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr
):
    """A program (row, part of BLOCK tokens) adds its tokens that reach the threshold to the row's candidates.

    found [rows] counts them, also those that candidates [rows, CAPACITY] have no room for; total [rows] is the mass of
    all tokens that min_p keeps.
    """
    row = tl.program_id(0)
    part = tl.program_id(1)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        return
    if truncates(v, slot):
        x = row_values(v, row, slot, part * BLOCK + tl.arange(0, BLOCK))
        if tl.load(v.top_p + slot) < 1.0:
            peak = tl.load(peak_ptr + row)
            kept = x
            min_p = tl.load(v.min_p + slot)
            if min_p > 0.0:
                kept = tl.where(x >= peak + tl.log(min_p), x, float("-inf"))
            tl.atomic_add(total_ptr + row, tl.sum(mass(kept, peak)))
        chosen = (x >= tl.load(threshold_ptr + row)) & (x > float("-inf"))
        one = chosen.to(tl.int32)
        place = tl.atomic_add(found_ptr + row, tl.sum(one)) + tl.cumsum(one) - one
        tl.store(candidates_ptr + row.to(tl.int64) * CAPACITY + place, x, mask=chosen & (place < CAPACITY))


@triton.jit
def _search(
    v, peak_ptr, threshold_ptr, total_ptr, found_ptr, candidates_ptr, cutoff_ptr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program (row) finds the cutoff among the candidates, or else in the whole row."""
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    tl.store(cutoff_ptr + row, float("-inf"))
    if slot < 0:
        return
    if truncates(v, slot):
        peak = tl.load(peak_ptr + row)
        low = ordered(tl.load(threshold_ptr + row))
        high = ordered(peak)
        min_p = tl.load(v.min_p + slot)
        top_p = tl.load(v.top_p + slot)
        first_cutoff = tl.where(min_p > 0.0, peak + tl.log(min_p), float("-inf"))
        cutoff = first_cutoff
        found = tl.load(found_ptr + row)
        lane = tl.arange(0, CAPACITY)
        inside = lane < found
        x = tl.load(candidates_ptr + row.to(tl.int64) * CAPACITY + lane, mask=inside, other=float("-inf"))
        key = ordered(x)
        enough = found <= CAPACITY
        if enough & limits_top_k(v, slot):
            # min_p can leave fewer candidates than top_k: then the search ends at its cutoff
            key_k = largest_reaching(key, inside.to(tl.int32), tl.load(v.top_k + slot), low, high)
            cutoff = tl.maximum(cutoff, unordered(key_k))
        if enough & (top_p < 1.0):
            weight = tl.where(x >= cutoff, mass(x, peak), 0)
            held = tl.sum(weight)
            total = held
            if limits_top_k(v, slot) == 0:
                total = tl.load(total_ptr + row)
            goal = (total.to(tl.float64) * top_p).to(tl.int64)
            enough = held >= goal
            cutoff = tl.maximum(cutoff, unordered(largest_reaching(key, weight, goal, low, high)))
        if enough == 0:
            cutoff = search_row(v, row, slot, first_cutoff, peak, BLOCK)
        tl.store(cutoff_ptr + row, cutoff)


@triton.jit
def ordered(x):
    """int32 keys in the order of float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """The float32 value of a key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mass(x, peak):
    """exp(x - peak) in units of 2**-32, int64; 0 for -inf and NaN."""
    return (tl.where(x == x, tl.exp(x - peak), 0.0) * 4294967296.0).to(tl.int64)


@triton.jit
def largest_reaching(key, weight, goal, low, high):
    """The largest k in [low, high] for which the weights of keys at or above k add up to the goal; low if none."""
    low = low.to(tl.int64)  # the sum of two keys needs 33 bits
    high = high.to(tl.int64)
    while low < high:
        middle = (low + high + 1) >> 1
        reached = tl.sum(tl.where(key >= middle.to(tl.int32), weight, 0)) >= goal
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle - 1)
    return low.to(tl.int32)


@triton.jit
def search_row(v, row, slot, cutoff, peak, BLOCK: tl.constexpr):
    """The cutoff of top_k and top_p over a whole row above min_p's cutoff: slow, and always right.

    The same two searches as over candidates, for a goal of tokens and for one of mass, four ways a pass.
    """
    token = tl.arange(0, BLOCK)
    for by_mass in tl.static_range(2):
        if by_mass:
            wanted = tl.load(v.top_p + slot) < 1.0
        else:
            wanted = limits_top_k(v, slot)
        if wanted:
            goal = tl.load(v.top_k + slot).to(tl.float32)
            if by_mass:
                kept = tl.zeros([BLOCK], tl.float32)
                for start in range(0, v.vocab, BLOCK):
                    x = row_values(v, row, slot, start + token)
                    kept += tl.where(x >= cutoff, tl.exp(x - peak), 0.0)
                goal = tl.sum(kept) * tl.load(v.top_p + slot)
            low = ordered(cutoff).to(tl.int64)
            high = ordered(peak).to(tl.int64)
            while low < high:
                quarter = (high - low + 3) // 4
                key_1 = low + quarter
                key_2 = tl.minimum(low + 2 * quarter, high)
                key_3 = tl.minimum(low + 3 * quarter, high)
                sum_1 = tl.zeros([BLOCK], tl.float32)
                sum_2 = tl.zeros([BLOCK], tl.float32)
                sum_3 = tl.zeros([BLOCK], tl.float32)
                for start in range(0, v.vocab, BLOCK):
                    x = row_values(v, row, slot, start + token)
                    weight = tl.full([BLOCK], 1.0, tl.float32)
                    if by_mass:
                        weight = tl.exp(x - peak)
                    key = ordered(x)
                    sum_1 += tl.where(key >= key_1.to(tl.int32), weight, 0.0)
                    sum_2 += tl.where(key >= key_2.to(tl.int32), weight, 0.0)
                    sum_3 += tl.where(key >= key_3.to(tl.int32), weight, 0.0)
                reach_1 = tl.sum(sum_1) >= goal
                reach_2 = tl.sum(sum_2) >= goal
                reach_3 = tl.sum(sum_3) >= goal
                low = tl.where(reach_3, key_3, tl.where(reach_2, key_2, tl.where(reach_1, key_1, low)))
                above = tl.where(reach_2, key_3, tl.where(reach_1, key_2, key_1)) - 1
                high = tl.where(reach_3, high, tl.maximum(above, low))
            cutoff = tl.maximum(cutoff, unordered(low.to(tl.int32)))
    return cutoff
