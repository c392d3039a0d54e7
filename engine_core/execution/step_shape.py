"""One step in numbers that the host knows, and its bucket: the padded size that the device sees.

On a GPU rows and tokens are rounded up to a few sizes, at most an eighth larger, so that matrix products and kernels
meet few shapes, and each size can have a CUDA graph; the plan alone decides the bucket. A step with prompts has one of
four numbers of rows: its tokens cost, and rows without any next to nothing. Above `MAX_BUCKET` tokens padding would
cost, too: there only the rows are padded, which decide the shape of the last product. On a CPU nothing is padded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wavecore.engine_core.plan import LeastSize, StepPlan

MAX_BUCKET = 2048


class Bucket(NamedTuple):
    """The size of a step, with padding: all that its kernels know of it but what lies on the device.

    Attributes:
        tokens, rows: T and R of `kernels.batch`.
        num_decode_rows, max_query_len: at least those of every step of this size.
    """

    tokens: int
    rows: int
    num_decode_rows: int
    max_query_len: int

    def at_least(self, least: LeastSize) -> Bucket:
        names = "tokens", "rows", "max_query_len"
        return self._replace(**{name: max(getattr(self, name), getattr(least, name)) for name in names})


class Buckets:
    """The sizes of an engine's steps.

    Args:
        max_num_batched_tokens, max_num_seqs: bounds of a plan.
        sizes: rows of decode steps and tokens of others, to which steps are padded and for which there are graphs;
            None chooses. Steps above the largest are padded as they are without.

    Attributes:
        rows: of decode steps; those of other steps are four of them.
        tokens: of steps with prompts, as far as they are padded.
        graphs: the buckets that may have a graph.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, sizes: Sequence[int] | None = None) -> None:
        most_rows, most_tokens = (max_num_seqs, MAX_BUCKET) if sizes is None else (max(sizes, default=0),) * 2
        self.rows = _sizes(sizes or (), max_num_seqs)
        self.tokens = _sizes(sizes or (), min(max_num_batched_tokens, max(MAX_BUCKET, most_tokens)))
        self._few_rows = sorted({_fitting(self.rows, -(-max_num_seqs // part)) for part in (1, 4, 16, 64)})
        decode = {Bucket(rows, rows, rows, 1) for rows in self.rows if rows <= most_rows}
        mixed = {Bucket(t, rows, rows, t) for t in self.tokens if 1 < t <= most_tokens for rows in self._few_rows}
        self.graphs = frozenset(decode | mixed)

    def padded(self, step: Bucket) -> Bucket:
        """The bucket of a step, given in its own numbers."""
        rows = _fitting(self.rows, step.rows)
        if step.max_query_len == 1:
            return Bucket(rows, rows, rows, 1)
        if step.tokens > self.tokens[-1]:
            return step._replace(rows=rows)
        tokens, few = _fitting(self.tokens, step.tokens), _fitting(self._few_rows, step.rows)
        return Bucket(tokens, few, few, tokens)


class StepShape:
    """A plan, with what is derived from it.

    Args:
        buckets: None pads nothing.
        least: of a step in lockstep, which has at least a padding row; see `Runner.launch`. Above the largest
            padded size each rank's step has its own size, and none a graph.
        exchanges: the ranks exchange their tokens, so their steps are of one size whatever it is, on any device.

    Attributes:
        ends: int32 [rows], as of the plan.
        num_samples: how many rows sample.
        num_tokens: without padding.
        bucket: of the step; where nothing is padded its numbers are the step's own.
        has_graph: whether the bucket may have one.
    """

    def __init__(
        self, plan: StepPlan, buckets: Buckets | None, least: LeastSize | None = None, exchanges: bool = False
    ) -> None:
        rows, tokens = plan.num_rows, plan.num_tokens
        self.plan, self.ends, self.num_tokens = plan, plan.ends, tokens
        self.num_samples = int(np.count_nonzero(plan.samples))
        found = Bucket(rows, rows, rows, min(rows, 1))
        if tokens > rows:
            long = plan.query_lens > 1
            num_decode_rows = rows - int(np.count_nonzero(long))
            assert long[num_decode_rows:].all(), "a plan's rows with one query token come first"
            found = Bucket(tokens, rows, num_decode_rows, int(plan.query_lens.max()))
        if least is not None and not rows:
            found = Bucket(1, 1, 1, 1)
        fits = buckets is not None and (least is None or least.tokens <= buckets.tokens[-1])
        if least is not None and (fits or exchanges):
            found = found.at_least(least)
        if buckets is not None and found.rows:
            found = buckets.padded(found)
        self.bucket, self.has_graph = found, fits and buckets is not None and found in buckets.graphs


def bucket(size: int, limit: int) -> int:
    """The least usual size that holds `size`: every number to 8, then eight sizes for each doubling."""
    grain = max(1, (1 << (size - 1).bit_length()) // 16)
    return min(-(-size // grain) * grain, limit)


def _sizes(given: Sequence[int], limit: int) -> list[int]:
    """The given sizes, and above the largest the usual ones, up to the limit."""
    usual = {bucket(size, limit) for size in range(max(given, default=0) + 1, limit + 1)}
    return sorted(usual | {min(size, limit) for size in given})


def _fitting(sizes: Sequence[int], size: int) -> int:
    """The least of the sizes that holds `size`."""
    return sizes[bisect_left(sizes, size)]
