"""Sampling on a GPU in at most four launches: edit, find the floor of truncation, draw, finish.

Nothing is sorted: the floor (the smallest logit that min_p, top_k and top_p keep) is found by bisection over the
ordered bits of the logits, four ways a pass. Rows that ask for nothing leave each kernel at once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.reference_sampling import GREEDY_BELOW
from wavecore.kernels.sampling_hash import gumbel, row_keys
from wavecore.kernels.sampling_rows import SEEN_IN_PROMPT, SamplingRows

BLOCK = 2048
WORD_BLOCK = 256
"""Bad words have fewer tokens than this."""


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """See `reference.sample`; logits has unit stride along the vocabulary."""
    count, vocab = logits.shape
    assert logits.stride(1) == 1 and rows.token_ids.stride(1) == 1
    tokens = torch.empty(count, dtype=torch.int32, device=logits.device)
    faults = torch.empty(count, dtype=torch.uint8, device=logits.device)
    if not count:
        return tokens, faults
    if rows.edits:
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
    values = (
        logits,
        logits.stride(0),
        vocab,
        rows.slots,
        rows.temperature,
        rows.count_row,
        rows.counts,
        rows.repetition_penalty,
        rows.frequency_penalty,
        rows.presence_penalty,
        rows.allowed_row,
        rows.allowed,
        rows.allowed.stride(0),
    )
    limits = {"PROMPT_BIT": SEEN_IN_PROMPT, "GREEDY": GREEDY_BELOW, "BLOCK": BLOCK}
    floor = torch.empty(count, dtype=torch.float32, device=logits.device)
    if rows.truncates:
        _find_floor[(count,)](*values, rows.top_k, rows.top_p, rows.min_p, floor, **limits, num_warps=8)
    parts = triton.cdiv(vocab, BLOCK)
    best = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    best_token = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    _draw[(parts, count)](
        *values,
        rows.positions,
        rows.seed,
        rows.choice,
        floor,
        best,
        best_token,
        HAS_FLOOR=rows.truncates,
        **limits,
        num_warps=4,
    )
    _finish[(count,)](
        best,
        best_token,
        parts,
        vocab,
        rows.slots,
        rows.positions,
        rows.token_ids,
        rows.token_ids.stride(0),
        rows.token_ids.shape[1],
        rows.count_row,
        rows.counts,
        tokens,
        faults,
        BLOCK=triton.next_power_of_2(parts),
        num_warps=1,
    )
    return tokens, faults


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
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    position = tl.load(positions_ptr + row)
    lane = tl.arange(0, BLOCK)
    begin = tl.load(bias_range_ptr + 2 * slot)
    end = tl.load(bias_range_ptr + 2 * slot + 1)
    for start in range(begin, end, BLOCK):
        inside = start + lane < end
        token = tl.load(bias_ids_ptr + start + lane, mask=inside, other=0)
        value = tl.load(bias_values_ptr + start + lane, mask=inside, other=0.0)
        now = inside & (tl.load(bias_until_ptr + start + lane, mask=inside, other=0) > position)
        add = now & (value != float("-inf"))
        logit = tl.load(row_ptr + token, mask=add, other=0.0)
        tl.store(row_ptr + token, (logit.to(tl.float32) + value).to(logit.dtype), mask=add)
    tl.debug_barrier()  # a token can have both a bias and a ban, and the ban must come last
    for start in range(begin, end, BLOCK):
        inside = start + lane < end
        token = tl.load(bias_ids_ptr + start + lane, mask=inside, other=0)
        value = tl.load(bias_values_ptr + start + lane, mask=inside, other=0.0)
        now = inside & (tl.load(bias_until_ptr + start + lane, mask=inside, other=0) > position)
        tl.store(row_ptr + token, value.to(logits_ptr.dtype.element_ty), mask=now & (value == float("-inf")))
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
def _values(
    token,
    row,
    logits_ptr,
    logits_stride,
    vocab,
    temperature,
    count_row,
    counts_ptr,
    repetition,
    frequency,
    presence,
    allowed_row,
    allowed_ptr,
    allowed_stride,
    PROMPT_BIT: tl.constexpr,
):
    """float32 logits of some tokens of a row: allowed, penalised, divided by the temperature (1 if greedy)."""
    inside = token < vocab
    x = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + token, mask=inside, other=float("-inf"))
    x = x.to(tl.float32)
    if allowed_row >= 0:
        word = tl.load(allowed_ptr + allowed_row.to(tl.int64) * allowed_stride + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) == 1, x, float("-inf"))
    if count_row >= 0:
        count = tl.load(counts_ptr + count_row.to(tl.int64) * vocab + token, mask=inside, other=0)
        x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        output = count & (PROMPT_BIT - 1)
        x = x - frequency * output.to(tl.float32)
        x = x - tl.where(output > 0, presence, 0.0)
    return x / temperature


@triton.jit
def _ordered(x):
    """int32 keys in the order of float32 values."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _find_floor(
    logits_ptr,
    logits_stride,
    vocab,
    slots_ptr,
    temperature_ptr,
    count_row_ptr,
    counts_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    allowed_row_ptr,
    allowed_ptr,
    allowed_stride,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    floor_ptr,
    PROMPT_BIT: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    tl.store(floor_ptr + row, float("-inf"))
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    use_k = (top_k > 0) & (top_k < vocab)
    if (temperature < GREEDY) | ((min_p <= 0.0) & (top_p >= 1.0) & (use_k == 0)):
        return
    count_row = tl.load(count_row_ptr + slot)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    allowed_row = tl.load(allowed_row_ptr + slot)
    lane = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        x = _values(
            start + lane, row, logits_ptr, logits_stride, vocab, temperature, count_row, counts_ptr,
            repetition, frequency, presence, allowed_row, allowed_ptr, allowed_stride, PROMPT_BIT,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.where(x == x, x, float("-inf")))
    peak = tl.max(largest)
    floor = float("-inf")
    if min_p > 0.0:
        floor = peak + tl.log(min_p)

    # Two searches for the largest key whose tokens at or above it reach a goal: k tokens, then top_p of the mass.
    for search in tl.static_range(2):
        wanted = use_k
        if search == 1:
            wanted = top_p < 1.0
        if wanted:
            low_key = _ordered(floor)
            high_key = _ordered(peak)
            goal = top_k.to(tl.float32)
            if search == 1:
                kept_mass = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocab, BLOCK):
                    x = _values(
                        start + lane, row, logits_ptr, logits_stride, vocab, temperature, count_row, counts_ptr,
                        repetition, frequency, presence, allowed_row, allowed_ptr, allowed_stride, PROMPT_BIT,
                    )  # fmt: skip
                    kept_mass += tl.where(x >= floor, tl.exp(x - peak), 0.0)
                goal = top_p * tl.sum(kept_mass)
            # the answer lies in [low_key, high_key]; differences of keys can need 33 bits
            low = low_key.to(tl.int64)
            high = high_key.to(tl.int64)
            while low < high:
                quarter = (high - low + 3) // 4
                key_1 = low + quarter
                key_2 = tl.minimum(low + 2 * quarter, high)
                key_3 = tl.minimum(low + 3 * quarter, high)
                sum_1 = tl.zeros([BLOCK], tl.float32)
                sum_2 = tl.zeros([BLOCK], tl.float32)
                sum_3 = tl.zeros([BLOCK], tl.float32)
                for start in range(0, vocab, BLOCK):
                    x = _values(
                        start + lane, row, logits_ptr, logits_stride, vocab, temperature, count_row, counts_ptr,
                        repetition, frequency, presence, allowed_row, allowed_ptr, allowed_stride, PROMPT_BIT,
                    )  # fmt: skip
                    weight = tl.full([BLOCK], 1.0, tl.float32)
                    if search == 1:
                        weight = tl.exp(x - peak)
                    key = _ordered(x)
                    sum_1 += tl.where(key >= key_1.to(tl.int32), weight, 0.0)
                    sum_2 += tl.where(key >= key_2.to(tl.int32), weight, 0.0)
                    sum_3 += tl.where(key >= key_3.to(tl.int32), weight, 0.0)
                reach_1 = tl.sum(sum_1) >= goal
                reach_2 = tl.sum(sum_2) >= goal
                reach_3 = tl.sum(sum_3) >= goal
                low = tl.where(reach_3, key_3, tl.where(reach_2, key_2, tl.where(reach_1, key_1, low)))
                above = tl.where(reach_2, key_3, tl.where(reach_1, key_2, key_1)) - 1
                high = tl.where(reach_3, high, tl.maximum(above, low))
            key = low.to(tl.int32)
            bits = key ^ ((key >> 31) & 0x7FFFFFFF)
            floor = tl.maximum(floor, bits.to(tl.float32, bitcast=True))
    tl.store(floor_ptr + row, floor)


@triton.jit
def _draw(
    logits_ptr,
    logits_stride,
    vocab,
    slots_ptr,
    temperature_ptr,
    count_row_ptr,
    counts_ptr,
    repetition_ptr,
    frequency_ptr,
    presence_ptr,
    allowed_row_ptr,
    allowed_ptr,
    allowed_stride,
    positions_ptr,
    seed_ptr,
    choice_ptr,
    floor_ptr,
    best_ptr,
    best_token_ptr,
    HAS_FLOOR: tl.constexpr,
    PROMPT_BIT: tl.constexpr,
    GREEDY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot)
    greedy = temperature < GREEDY
    token = part * BLOCK + tl.arange(0, BLOCK)
    x = _values(
        token,
        row,
        logits_ptr,
        logits_stride,
        vocab,
        tl.where(greedy, 1.0, temperature),
        tl.load(count_row_ptr + slot),
        counts_ptr,
        tl.load(repetition_ptr + slot),
        tl.load(frequency_ptr + slot),
        tl.load(presence_ptr + slot),
        tl.load(allowed_row_ptr + slot),
        allowed_ptr,
        allowed_stride,
        PROMPT_BIT,
    )
    broken = tl.max((x != x).to(tl.int32), axis=0)
    if greedy == 0:
        key_1, key_2 = row_keys(tl.load(seed_ptr + slot), tl.load(choice_ptr + slot), tl.load(positions_ptr + row))
        noisy = x + gumbel(token, key_1, key_2)
        if HAS_FLOOR:
            noisy = tl.where(x >= tl.load(floor_ptr + row), noisy, float("-inf"))
        x = noisy
    x = tl.where(x == x, x, float("-inf"))
    best = tl.max(x, axis=0)
    place = row.to(tl.int64) * tl.num_programs(0) + part
    tl.store(best_token_ptr + place, tl.min(tl.where(x == best, token, vocab), axis=0))
    tl.store(best_ptr + place, tl.where(broken > 0, float("nan"), best))


@triton.jit
def _finish(
    best_ptr,
    best_token_ptr,
    parts,
    vocab,
    slots_ptr,
    positions_ptr,
    token_ids_ptr,
    token_stride,
    max_len,
    count_row_ptr,
    counts_ptr,
    tokens_ptr,
    faults_ptr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
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
    token = tl.load(best_token_ptr + place, mask=inside & (value == best), other=vocab)
    token = tl.minimum(tl.min(token, axis=0), vocab - 1)
    infinite = (best == float("inf")) | (best == float("-inf"))
    tl.store(tokens_ptr + row, token)
    tl.store(faults_ptr + row, ((broken > 0) | infinite).to(tl.uint8))
    position = tl.load(positions_ptr + row)
    tl.store(token_ids_ptr + slot * token_stride + position, token, mask=position < max_len)
    count_row = tl.load(count_row_ptr + slot)
    if count_row >= 0:
        counter = counts_ptr + count_row.to(tl.int64) * vocab + token
        tl.store(counter, tl.load(counter) + 1)
