"""One step in numbers that the host knows, and its bucket: the padded size that the device sees.

On a GPU rows and tokens are rounded up to a few sizes, at most an eighth larger, so that matrix products and kernels
meet few shapes; the plan alone decides the bucket. Above `MAX_BUCKET` only the number of tokens stays as it is (there
padding would cost, and rows still decide the shape of the last product); on a CPU nothing is padded.
"""

from __future__ import annotations

import numpy as np

from wavecore.engine_core.plan import StepPlan

MAX_BUCKET = 2048


class StepShape:
    """A plan, with what is derived from it.

    Args:
        limits: most tokens and rows of a padded step; None pads nothing.

    Attributes:
        ends: int32 [rows], as of the plan.
        num_samples: how many rows sample.
        num_tokens: without padding.
        num_decode_rows: rows with one query token.
        max_query_len: over the rows; 0 without rows.
        bucket_tokens, bucket_rows: the sizes with padding.
    """

    def __init__(self, plan: StepPlan, limits: tuple[int, int] | None) -> None:
        rows, tokens = plan.num_rows, plan.num_tokens
        self.plan, self.ends, self.num_tokens = plan, plan.ends, tokens
        self.num_samples = int(np.count_nonzero(plan.samples))
        self.num_decode_rows, self.max_query_len = rows, min(rows, 1)
        if tokens > rows:
            long = plan.query_lens > 1
            self.num_decode_rows = rows - int(np.count_nonzero(long))
            self.max_query_len = int(plan.query_lens.max())
            assert long[self.num_decode_rows :].all(), "a plan's rows with one query token come first"
        self.bucket_tokens, self.bucket_rows = tokens, rows
        if limits is not None and rows:
            self.bucket_rows = bucket(rows, limits[1])
            if tokens == rows:
                self.bucket_tokens = self.bucket_rows
            elif tokens <= MAX_BUCKET:
                self.bucket_tokens = bucket(tokens, limits[0])


def bucket(size: int, limit: int) -> int:
    """The least bucket that holds `size`: every number to 8, then eight sizes for each doubling."""
    grain = max(1, (1 << (size - 1).bit_length()) // 16)
    return min(-(-size // grain) * grain, limit)
