"""One step in numbers that the host knows, and its bucket: the padded size that the device sees. Knows no tensors.

On a GPU rows and tokens are rounded up to a few sizes, at most an eighth larger, so that matrix products and kernels
meet few shapes; the plan alone decides the bucket. Above `MAX_BUCKET` tokens, and on a CPU, nothing is padded.
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
        order: int64 [rows], the plan's row at each device row.
        slots, starts, query_lens: int32 [rows].
        samples: bool [rows].
        bucket_tokens, bucket_rows: the sizes with padding.
    """

    order: npt.NDArray[np.int64]
    slots: I32
    starts: I32
    query_lens: I32
    samples: npt.NDArray[np.bool_]
    num_tokens: int
    num_decode_rows: int
    bucket_tokens: int
    bucket_rows: int

    @classmethod
    def of(cls, plan: StepPlan, limits: tuple[int, int] | None) -> StepShape:
        """The shape of a plan.

        Args:
            limits: most tokens and rows of a padded step; None pads nothing.
        """
        order = np.argsort(plan.query_lens > 1, kind="stable")
        query_lens = plan.query_lens[order]
        rows, tokens = len(order), int(query_lens.sum())
        bucket_tokens, bucket_rows = tokens, rows
        if limits is not None and tokens <= MAX_BUCKET:
            bucket_rows = bucket(rows, limits[1])
            bucket_tokens = bucket_rows if tokens == rows else bucket(tokens, limits[0])
        return cls(
            order=order,
            slots=plan.slots[order],
            starts=plan.starts[order],
            query_lens=query_lens,
            samples=plan.samples[order].astype(np.bool_),
            num_tokens=tokens,
            num_decode_rows=int(np.count_nonzero(query_lens == 1)),
            bucket_tokens=bucket_tokens,
            bucket_rows=bucket_rows,
        )


def bucket(size: int, limit: int) -> int:
    """The least bucket that holds `size`: every number to 8, then eight sizes for each doubling."""
    grain = max(1, (1 << (size - 1).bit_length()) // 16)
    return min(-(-size // grain) * grain, limit)
