"""The cutoff of truncation: the smallest logit that min_p, top_k and top_p keep. Nothing is sorted.

1. The largest logit of every GROUP tokens, in parallel.
2. A threshold: the m-th largest of these, m at least top_k. At least m tokens reach it, and of tokens in random order
   about -n log(1 - m / n), n being the number of groups.
3. The tokens that reach it are collected in parallel; the probability mass of all is added up on the way.
4. A bisection over the collected few finds the cutoff.
5. Where they do not hold the nucleus of top_p (a flat distribution), its cutoff is narrowed down below the threshold:
   each pass over the row, in parallel, adds up the mass from each of WAYS evenly spaced logits on. The tokens between
   the last two are collected and searched like the others.
6. Where collected tokens are too many (thousands of equal logits, or of top_k), the whole row is searched.

A search goes by bisection over the ordered bits of logits. Candidates lie in no fixed order, and the parts of a row
depend on the batch, so masses are added as 64-bit integers, those of PART tokens having been added in a fixed order:
a seed gives the same tokens whatever the batch.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.sampling.rows import PART, part_size
from wavecore.kernels.sampling.values import EXACT, adjusted, changes, limits_top_k, truncates

GROUP = 128
CAPACITY = 8192
"""Candidates kept at most."""
SEARCH_BLOCK = 8192
"""Tokens read at once where a whole row is searched by one program."""
SAMPLE = 4096
"""Tokens of which the least is where narrowing begins."""
PASSES, WAYS = 2, 8
"""A nucleus that candidates do not hold is narrowed down so often, each time to one of so many parts."""
_PASSES, _WAYS, SUMS = tl.constexpr(PASSES), tl.constexpr(WAYS), tl.constexpr(2 + PASSES * WAYS)
WANTED_K, WANTED_P = 512, 3072
"""Candidates aimed at where top_k bounds their number, and where nothing does."""


def find_cutoff(values: Any) -> Tensor:
    """float32 [R], a logit; -inf for rows that keep all tokens."""
    device, count = values.slots.device, len(values.slots)
    groups = triton.cdiv(values.vocab, GROUP)
    peaks = torch.empty(count, groups, dtype=torch.float32, device=device)
    # Each a tensor of its own: a row of one is aligned or not by the count, and a kernel is compiled for either.
    peak, threshold, lowest, cutoff = (torch.empty(count, dtype=torch.float32, device=device) for _ in range(4))
    total = torch.zeros(count, SUMS.value, dtype=torch.int64, device=device)
    found, between = (torch.zeros(count, dtype=torch.int32, device=device) for _ in range(2))
    candidates = torch.empty(count, CAPACITY, dtype=torch.float32, device=device)
    size = part_size(count, values.vocab)
    grid = (count, triton.cdiv(values.vocab, size))
    blocks: dict[str, Any] = {"size": size, "BLOCK": PART, "num_warps": 1, **EXACT}
    _group_peaks[grid](values, peaks, groups, GROUP=GROUP, **blocks)
    goals = [max(1, int(groups * (1 - math.exp(-wanted / groups)))) for wanted in (WANTED_K, WANTED_P)]
    tops = peaks, groups, peak, threshold, lowest
    _threshold[(count,)](values, *tops, *goals, SAMPLE=SAMPLE, BLOCK=triton.next_power_of_2(groups), **EXACT)
    _collect[grid](values, peak, threshold, total, found, candidates, CAPACITY=CAPACITY, **blocks)
    search = {"BLOCK": SEARCH_BLOCK, "num_warps": 16, **EXACT}
    _search[(count,)](values, peak, threshold, total, found, candidates, cutoff, CAPACITY=CAPACITY, **search)
    bracket = peak, threshold, lowest, total, cutoff
    for done in range(PASSES + 1):
        _narrow[grid](values, *bracket, between, candidates, DONE=done, CAPACITY=CAPACITY, **blocks)
    _search_bracket[(count,)](values, *bracket, between, candidates, CAPACITY=CAPACITY, **search)
    return cutoff


@triton.jit
def _group_peaks(v, peaks_ptr, groups, size, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """A program (row, part of `size` tokens) writes peaks [rows, groups]: of each group the largest logit."""
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        return
    if truncates(v, slot):
        changed = changes(v, slot)
        begin = tl.program_id(1) * size
        for start in range(begin, tl.minimum(begin + size, v.vocab), BLOCK):
            x = adjusted(v, row, slot, start + tl.arange(0, BLOCK), changed)
            x = tl.where(x == x, x, float("-inf"))
            group = start // GROUP + tl.arange(0, BLOCK // GROUP)
            peaks = tl.max(tl.reshape(x, (BLOCK // GROUP, GROUP)), axis=1)
            tl.store(peaks_ptr + row.to(tl.int64) * groups + group, peaks, mask=group < groups)


@triton.jit
def _threshold(
    v, peaks_ptr, groups, peak_ptr, threshold_ptr, lowest_ptr, goal_k, goal_p, SAMPLE: tl.constexpr, BLOCK: tl.constexpr
):
    """A program (row) finds the largest logit, the least that a candidate must have, and the least of a sample."""
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
        tl.store(peak_ptr + row, peak)
        tl.store(threshold_ptr + row, tl.maximum(threshold, min_p_cutoff(v, slot, peak)))
        if (tl.load(v.top_p + slot) < 1.0) & (limits_top_k(v, slot) == 0):
            x = adjusted(v, row, slot, tl.arange(0, SAMPLE) * tl.maximum(v.vocab // SAMPLE, 1))
            tl.store(lowest_ptr + row, tl.min(tl.where(x > float("-inf"), x, float("inf"))))


@triton.jit
def _collect(
    v, peak_ptr, threshold_ptr, total_ptr, found_ptr, candidates_ptr, size,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program (row, part of `size` tokens) adds its tokens that reach the threshold to the row's candidates.

    found [rows] counts them, also those that candidates [rows, CAPACITY] have no room for; total [rows] is the mass of
    all tokens that min_p keeps.
    """
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    if slot < 0:
        return
    if truncates(v, slot):
        peak = tl.load(peak_ptr + row)
        threshold = tl.load(threshold_ptr + row)
        least = min_p_cutoff(v, slot, peak)
        rate = 1.0 / tl.load(v.temperature + slot)
        by_mass = tl.load(v.top_p + slot) < 1.0
        total = tl.zeros([], tl.int64)
        changed = changes(v, slot)
        begin = tl.program_id(1) * size
        for start in range(begin, tl.minimum(begin + size, v.vocab), BLOCK):
            x = adjusted(v, row, slot, start + tl.arange(0, BLOCK), changed)
            if by_mass:
                total += fixed(tl.sum(tl.where(x >= least, weight_of(x, peak, rate), 0.0)))
            keep(x, (x >= threshold) & (x > float("-inf")), row, found_ptr, candidates_ptr, CAPACITY)
        if by_mass:
            tl.atomic_add(total_ptr + row.to(tl.int64) * SUMS, total)


@triton.jit
def keep(x, chosen, row, found_ptr, candidates_ptr, CAPACITY: tl.constexpr):
    """Add the chosen logits to the row's candidates."""
    one = chosen.to(tl.int32)
    many = tl.sum(one)
    if many > 0:
        place = tl.atomic_add(found_ptr + row, many) + tl.cumsum(one) - one
        tl.store(candidates_ptr + row.to(tl.int64) * CAPACITY + place, x, mask=chosen & (place < CAPACITY))


@triton.jit
def _search(
    v, peak_ptr, threshold_ptr, total_ptr, found_ptr, candidates_ptr, cutoff_ptr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program (row) finds the cutoff among the candidates, or else, with top_k, in the whole row.

    It is NaN for a nucleus that they do not hold: of that the threshold is then the upper end of the bracket, and
    total [rows, 1] the mass from there on.
    """
    row = tl.program_id(0)
    slot = tl.load(v.slots + row).to(tl.int64)
    tl.store(cutoff_ptr + row, float("-inf"))
    if slot < 0:
        return
    if truncates(v, slot):
        peak = tl.load(peak_ptr + row)
        low = ordered(tl.load(threshold_ptr + row))
        high = ordered(peak)
        rate = 1.0 / tl.load(v.temperature + slot)
        first_cutoff = min_p_cutoff(v, slot, peak)
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
        top_p = tl.load(v.top_p + slot)
        held = tl.zeros([], tl.int64)
        if enough & (top_p < 1.0):
            weight = tl.where(x >= cutoff, fixed(weight_of(x, peak, rate)), 0)
            held = tl.sum(weight)
            goal = nucleus(v, slot, held)
            if limits_top_k(v, slot) == 0:
                goal = nucleus(v, slot, tl.load(total_ptr + row.to(tl.int64) * SUMS))
            enough = held >= goal
            cutoff = tl.maximum(cutoff, unordered(largest_reaching(key, weight, goal, low, high)))
        if enough == 0:
            if limits_top_k(v, slot) | (top_p >= 1.0):
                cutoff = search_row(v, row, slot, first_cutoff, peak, BLOCK)
            else:
                cutoff = float("nan")
                if found > CAPACITY:
                    tl.store(threshold_ptr + row, peak + 1e-3 / rate + 1e-6 * tl.abs(peak))  # above all
                tl.store(total_ptr + row.to(tl.int64) * SUMS + 1, held)
        tl.store(cutoff_ptr + row, cutoff)


@triton.jit
def _narrow(
    v, peak_ptr, threshold_ptr, lowest_ptr, total_ptr, cutoff_ptr, found_ptr, candidates_ptr, size,
    DONE: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program (row, part of `size` tokens) adds up its mass from each rung of the bracket on; after the last pass it
    collects the tokens of the bracket instead. Only where the cutoff is NaN."""
    row = tl.program_id(0)
    cutoff = tl.load(cutoff_ptr + row)
    if cutoff == cutoff:
        return
    slot = tl.load(v.slots + row).to(tl.int64)
    peak = tl.load(peak_ptr + row)
    rate = 1.0 / tl.load(v.temperature + slot)
    low, high, _ = bracket(v, row, slot, peak, threshold_ptr, lowest_ptr, total_ptr, DONE)
    changed = changes(v, slot)
    begin = tl.program_id(1) * size
    end = tl.minimum(begin + size, v.vocab)
    if DONE == _PASSES:
        for start in range(begin, end, BLOCK):
            x = adjusted(v, row, slot, start + tl.arange(0, BLOCK), changed)
            keep(x, (x >= low) & (x < high), row, found_ptr, candidates_ptr, CAPACITY)
    else:
        lane = tl.arange(0, _WAYS)
        sums = tl.zeros([_WAYS], tl.int64)
        for start in range(begin, end, BLOCK):
            x = adjusted(v, row, slot, start + tl.arange(0, BLOCK), changed)
            weight = weight_of(x, peak, rate)
            for way in tl.static_range(_WAYS):
                mass = tl.sum(tl.where(x >= rung(low, high, way), weight, 0.0))
                sums += tl.where(lane == way, fixed(mass), 0)
        tl.atomic_add(total_ptr + row.to(tl.int64) * SUMS + 2 + DONE * _WAYS + lane, sums)


@triton.jit
def _search_bracket(
    v, peak_ptr, threshold_ptr, lowest_ptr, total_ptr, cutoff_ptr, found_ptr, candidates_ptr,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program (row) finds the cutoff among the tokens of the bracket where they have room, or else in the row."""
    row = tl.program_id(0)
    cutoff = tl.load(cutoff_ptr + row)
    if cutoff == cutoff:
        return
    slot = tl.load(v.slots + row).to(tl.int64)
    peak = tl.load(peak_ptr + row)
    found = tl.load(found_ptr + row)
    if found <= CAPACITY:
        low, high, above = bracket(v, row, slot, peak, threshold_ptr, lowest_ptr, total_ptr, _PASSES)
        lane = tl.arange(0, CAPACITY)
        x = tl.load(candidates_ptr + row.to(tl.int64) * CAPACITY + lane, mask=lane < found, other=float("-inf"))
        weight = fixed(weight_of(x, peak, 1.0 / tl.load(v.temperature + slot)))
        goal = nucleus(v, slot, tl.load(total_ptr + row.to(tl.int64) * SUMS)) - above
        cutoff = unordered(largest_reaching(ordered(x), weight, goal, ordered(low), ordered(high)))
    else:
        cutoff = search_row(v, row, slot, min_p_cutoff(v, slot, peak), peak, BLOCK)
    tl.store(cutoff_ptr + row, cutoff)


@triton.jit
def bracket(v, row, slot, peak, threshold_ptr, lowest_ptr, total_ptr, done: tl.constexpr):
    """Two logits between which the cutoff of a nucleus lies, the first included, and the mass from the second on,
    after some passes: each leaves the part between two rungs."""
    sum_ptr = total_ptr + row.to(tl.int64) * SUMS
    goal = nucleus(v, slot, tl.load(sum_ptr))
    # all tokens below this are together less than what a nucleus leaves out
    rest = 1.0 + tl.log(v.vocab / (1.0 - tl.load(v.top_p + slot)))
    floor = tl.maximum(min_p_cutoff(v, slot, peak), peak - rest * tl.load(v.temperature + slot))
    high = tl.load(threshold_ptr + row)
    low = tl.minimum(tl.maximum(floor, tl.load(lowest_ptr + row)), high)
    above = tl.load(sum_ptr + 1)
    way = tl.arange(0, _WAYS)
    for i in tl.static_range(done):
        sums = tl.load(sum_ptr + 2 + i * _WAYS + way)
        reached = tl.sum((sums >= goal).to(tl.int32))
        above = tl.where(reached < _WAYS, tl.sum(tl.where(way == reached, sums, 0)), above)
        next_high = tl.where(reached < _WAYS, rung(low, high, reached), high)
        low = tl.where(reached > 0, rung(low, high, reached - 1), floor)
        high = next_high
    return low, high, above


@triton.jit
def rung(low, high, way):
    return low + (high - low) * (way * (1.0 / _WAYS))


@triton.jit
def nucleus(v, slot, total):
    """The mass that top_p keeps."""
    return (total.to(tl.float64) * tl.load(v.top_p + slot)).to(tl.int64)


@triton.jit
def min_p_cutoff(v, slot, peak):
    min_p = tl.load(v.min_p + slot)
    cutoff = float("-inf")
    if min_p > 0.0:
        cutoff = peak + tl.load(v.temperature + slot) * tl.log(min_p)
    return cutoff


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
def weight_of(x, peak, rate):
    """The mass of logits, that of the largest being 1; 0 for -inf and NaN."""
    return tl.where(x == x, tl.exp((x - peak) * rate), 0.0)


@triton.jit
def fixed(mass):
    """In units of 2**-32, int64."""
    return (mass * 4294967296.0).to(tl.int64)


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

    The same two searches as over candidates, for a goal of tokens and for one of mass.
    """
    rate = 1.0 / tl.load(v.temperature + slot)
    for by_mass in tl.static_range(2):
        if by_mass:
            wanted = tl.load(v.top_p + slot) < 1.0
        else:
            wanted = limits_top_k(v, slot)
        if wanted:
            goal = tl.load(v.top_k + slot).to(tl.float32)
            if by_mass:
                goal = weight_from(v, row, slot, cutoff, peak, rate, by_mass, BLOCK) * tl.load(v.top_p + slot)
            low = ordered(cutoff).to(tl.int64)
            high = ordered(peak).to(tl.int64)
            while low < high:
                middle = (low + high + 1) >> 1
                least = unordered(middle.to(tl.int32))
                reached = weight_from(v, row, slot, least, peak, rate, by_mass, BLOCK) >= goal
                low = tl.where(reached, middle, low)
                high = tl.where(reached, high, middle - 1)
            cutoff = tl.maximum(cutoff, unordered(low.to(tl.int32)))
    return cutoff


@triton.jit
def weight_from(v, row, slot, least, peak, rate, by_mass: tl.constexpr, BLOCK: tl.constexpr):
    """The mass, or else the number, of a row's tokens from a logit on."""
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, v.vocab, BLOCK):
        x = adjusted(v, row, slot, start + tl.arange(0, BLOCK))
        weight = tl.full([BLOCK], 1.0, tl.float32)
        if by_mass:
            weight = weight_of(x, peak, rate)
        weights += tl.where(x >= least, weight, 0.0)
    return tl.sum(weights)
