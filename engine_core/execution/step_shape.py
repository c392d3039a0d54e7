"""One step in numbers that the host knows, and its bucket: the padded size that the device sees.

On a GPU rows and tokens are rounded up to a few sizes, at most an eighth larger, so that matrix products and kernels
meet few shapes; the plan alone decides the bucket. Above `MAX_BUCKET` only the number of tokens stays as it is (there
padding would cost, and rows still decide the shape of the last product); on a CPU nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wavecore.engine_core.plan import I32, StepPlan

MAX_BUCKET = 2048


@dataclass(frozen=True, slots=True)
class StepShape:
    """A plan with what is derived from it.

    Attributes:
        ends: int32 [rows], as of the plan.
        num_samples: how many rows sample.
        num_tokens: without padding.
        num_decode_rows: rows with one query token.
        max_query_len: over the rows; 0 without rows.
        bucket_tokens, bucket_rows: the sizes with padding.
    """

    plan: StepPlan
    ends: I32
    num_samples: int
    num_tokens: int
    num_decode_rows: int
    max_query_len: int
    bucket_tokens: int
    bucket_rows: int

    @classmethod
    def of(cls, plan: StepPlan, limits: tuple[int, int] | None) -> StepShape:
        """The shape of a plan.

        Args:
            limits: most tokens and rows of a padded step; None pads nothing.
        """
        rows, tokens = plan.num_rows, plan.num_tokens
        decode, longest = rows, min(rows, 1)
        if tokens > rows:
            long = plan.query_lens > 1
            decode, longest = rows - int(np.count_nonzero(long)), int(plan.query_lens.max())
            assert long[decode:].all(), "a plan's rows with one query token come first"
        bucket_tokens, bucket_rows = tokens, rows
        if limits is not None and rows:
            bucket_rows = bucket(rows, limits[1])
            if tokens == rows:
                bucket_tokens = bucket_rows
            elif tokens <= MAX_BUCKET:
                bucket_tokens = bucket(tokens, limits[0])
        return cls(
            plan=plan,
            ends=plan.ends,
            num_samples=int(np.count_nonzero(plan.samples)),
            num_tokens=tokens,
            num_decode_rows=decode,
            max_query_len=longest,
            bucket_tokens=bucket_tokens,
            bucket_rows=bucket_rows,
        )


def bucket(size: int, limit: int) -> int:
    """The least bucket that holds `size`: every number to 8, then eight sizes for each doubling."""
    grain = max(1, (1 << (size - 1).bit_length()) // 16)
    return min(-(-size // grain) * grain, limit)
