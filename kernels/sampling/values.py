"""Logits of a row as sampling sees them: allowed, penalised, divided by the temperature."""

from collections import namedtuple
from dataclasses import fields
from operator import attrgetter
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from wavecore.kernels.sampling.rows import GREEDY_BELOW, SEEN_IN_PROMPT, SamplingRows

_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
_OUTPUT_COUNT = tl.constexpr(SEEN_IN_PROMPT - 1)

EXACT = {"enable_fp_fusion": False}
"""Launch option of every kernel that computes `row_values`. Each computes them anew; a multiply-add fused in one
kernel and not in another would differ in the last bit, and a cutoff found by the one could drop every token in the
other."""

_ROWS = tuple(field.name for field in fields(SamplingRows) if field.name not in ("truncates", "edits"))
_of_rows = attrgetter(*_ROWS)
_ADDED = "logits", "stride", "vocab", "token_stride", "allowed_stride", "counts_stride"
Values: Any = namedtuple("Values", (*_ADDED, *_ROWS))  # type: ignore[misc]
"""What kernels of sampling get: the logits, strides, and the fields of `SamplingRows`, but what the host alone asks."""


def values_of(logits: Tensor, rows: SamplingRows) -> Any:
    """Values of logits [R, V], of unit stride along the vocabulary."""
    strides = rows.token_ids.stride(0), rows.allowed.stride(0), rows.counts.stride(0)
    return Values._make((logits, logits.stride(0), logits.shape[1], *strides, *_of_rows(rows)))


@triton.jit
def is_greedy(v, slot):
    return tl.load(v.temperature + slot) < _GREEDY_BELOW


@triton.jit
def limits_top_k(v, slot):
    top_k = tl.load(v.top_k + slot)
    return (top_k > 0) & (top_k < v.vocab)


@triton.jit
def truncates(v, slot):
    """Whether a row drops tokens by min_p, top_k or top_p."""
    asks = (tl.load(v.min_p + slot) > 0.0) | (tl.load(v.top_p + slot) < 1.0) | limits_top_k(v, slot)
    return asks & (is_greedy(v, slot) == 0)


@triton.jit
def row_values(v, row, slot, token):
    """float32 values of some columns, -inf behind the last."""
    return adjusted(v, row, slot, token) / tl.where(is_greedy(v, slot), 1.0, tl.load(v.temperature + slot))


@triton.jit
def adjusted(v, row, slot, token, changed=True):
    """The same, not yet divided by the temperature; `changed` may say what `changes` does, asked once for many."""
    x = logits_of(v, row, token).to(tl.float32)
    if changed:
        x = penalised(v, x, slot, token)
    return x


@triton.jit
def logits_of(v, row, token):
    """As they are stored: what converts them waits for them."""
    return tl.load(v.logits + row.to(tl.int64) * v.stride + token, mask=token < v.vocab, other=float("-inf"))


@triton.jit
def changes(v, slot):
    """Whether `penalised` changes anything of a row."""
    return (tl.load(v.allowed_row + slot) >= 0) | (tl.load(v.count_row + slot) >= 0)


@triton.jit
def penalised(v, x, slot, token):
    x = x.to(tl.float32)
    inside = token < v.vocab
    allowed_row = tl.load(v.allowed_row + slot).to(tl.int64)
    if allowed_row >= 0:
        word = tl.load(v.allowed + allowed_row * v.allowed_stride + token // 32, mask=inside, other=0)
        x = tl.where(((word >> (token % 32)) & 1) == 1, x, float("-inf"))
    count_row = tl.load(v.count_row + slot).to(tl.int64)
    if count_row >= 0:
        count = tl.load(v.counts + count_row * v.counts_stride + token, mask=inside, other=0)
        repetition = tl.load(v.repetition_penalty + slot)
        x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
        output = count & _OUTPUT_COUNT
        x -= tl.load(v.frequency_penalty + slot) * output.to(tl.float32)
        x -= tl.where(output > 0, tl.load(v.presence_penalty + slot), 0.0)
    return x


@triton.jit
def largest(x):
    """The largest value, or NaN if any is."""
    return tl.reduce(x, 0, _larger)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
