"""One step in numbers that the host knows, and its bucket: the padded size that the device sees. Knows no tensors.

On a GPU rows and tokens are rounded up to a few sizes, at most an eighth larger, so that matrix products and kernels
meet few shapes; the plan alone decides the bucket. Above `MAX_BUCKET` only the number of tokens stays as it is (there
padding would cost, and rows still decide the shape of the last product); on a CPU nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.plan import I32, StepPlan

MAX_BUCKET = 2048


@dataclass(frozen=True, slots=True)
class StepShape:
    """Rows in device order: those with one query token first.

    Attributes:
        order: int64 [rows], the plan's row at each device row; None where the plan has them in device order already.
        slots, starts, query_lens, ends: int32 [rows]; ends = starts + query_lens.
        samples: bool [rows].
        num_samples: how many rows sample.
        num_tokens: without padding.
        num_decode_rows: rows with one query token.
        max_query_len: over the rows; 0 without rows.
        bucket_tokens, bucket_rows: the sizes with padding.
    """

    order: npt.NDArray[np.int64] | None
    slots: I32
    starts: I32
    query_lens: I32
    ends: I32
    samples: npt.NDArray[np.bool_]
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
        slots, starts, query_lens, samples = plan.slots, plan.starts, plan.query_lens, plan.samples.view(np.bool_)
        order, decode, longest = None, rows, min(rows, 1)
        if tokens > rows:
            long = query_lens > 1
            decode, longest = rows - int(np.count_nonzero(long)), int(query_lens.max())
            if not long[decode:].all():
                order = np.argsort(long, kind="stable")
                slots, starts, query_lens, samples = slots[order], starts[order], query_lens[order], samples[order]
        ends = starts + query_lens
        bucket_tokens, bucket_rows = tokens, rows
        if limits is not None and rows:
            bucket_rows = bucket(rows, limits[1])
            if tokens == rows:
                bucket_tokens = bucket_rows
            elif tokens <= MAX_BUCKET:
                bucket_tokens = bucket(tokens, limits[0])
        return cls(
            order=order,
            slots=slots,
            starts=starts,
            query_lens=query_lens,
            ends=ends,
            samples=samples,
            num_samples=int(np.count_nonzero(samples)),
            num_tokens=tokens,
            num_decode_rows=decode,
            max_query_len=longest,
            bucket_tokens=bucket_tokens,
            bucket_rows=bucket_rows,
        )

    def plan_rows(self, rows: npt.NDArray[np.signedinteger]) -> list[int]:
        """Rows of the plan at these device rows."""
        found: list[int] = (rows if self.order is None else self.order[rows]).tolist()
        return found


def bucket(size: int, limit: int) -> int:
    """The least bucket that holds `size`: every number to 8, then eight sizes for each doubling."""
    grain = max(1, (1 << (size - 1).bit_length()) // 16)
    return min(-(-size // grain) * grain, limit)
