"""Searching for a floor among logits by bisection over their ordered bits.

Candidates lie in no fixed order, so their masses are added as 64-bit integers: the sum does not depend on the order,
and a seed gives the same tokens whatever the batch. A whole row is read in a fixed order, where float32 serves.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wavecore.kernels.sampling.values import limits_top_k, row_values


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
def search_row(v, row, slot, floor, peak, BLOCK: tl.constexpr):
    """The floor of top_k and top_p over a whole row above min_p's floor: slow, and always right.

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
                    kept += tl.where(x >= floor, tl.exp(x - peak), 0.0)
                goal = tl.sum(kept) * tl.load(v.top_p + slot)
            low = ordered(floor).to(tl.int64)
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
            floor = tl.maximum(floor, unordered(low.to(tl.int32)))
    return floor
