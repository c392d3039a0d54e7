"""What a step brings to the device, in one vector: its rows, what changes in the tables, and sampling parameters.

    rows      slots | starts | query_start | sample_slots | positions | logprob_rows     at fixed places, each step
    changes   how many | slot, index, block | slot, index, block | ...                   of the block table
    columns   the sampling parameters of all slots (`sampling_state`)                    when a request begins

The rows and changes are one copy, the columns a second one. A plan with more changes than the vector holds (a very long
prompt begins) brings them separately.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.execution.pinned_copies import CopyIn
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.execution.uploads import Uploads
from wavecore.engine_core.plan import I32

ALIGN = 4  # int32: 16 bytes, since kernels compile anew for other alignments; and columns begin with 64-bit values
PADDING = np.array([-1, 0, 0, -1, 0, 0], np.int32)[:, None]  # of RowViews' tensors


class RowViews(NamedTuple):
    """The rows of a step on the device, padded to R; the same tensors whenever a step has that bucket.

    Attributes:
        slots: int32 [R], -1 for padding.
        starts: int32 [R].
        query_start: int32 [R + 1]; padding repeats the number of tokens.
        sample_slots: int32 [R], -1 for rows that do not sample.
        positions: int32 [R], of the token to draw.
        logprob_rows: int32 [R], the rows that report log-probabilities of their token, as many as there are.
    """

    slots: Tensor
    starts: Tensor
    query_start: Tensor
    sample_slots: Tensor
    positions: Tensor
    logprob_rows: Tensor


class StepInput:
    """The vector of one engine.

    Args:
        columns: int32 values of the sampling columns.

    Attributes:
        changes: int32 [1 + 3 * room] on the device, as `kernels.ops.update_block_table` reads them.
        columns: int32 [columns] on the device.
    """

    def __init__(self, max_num_seqs: int, columns: int, device: torch.device, uploads: Uploads) -> None:
        self.width = -(-(max_num_seqs + 1) // ALIGN) * ALIGN
        self.room = max_num_seqs + 1024  # changes: every row may enter a new block
        self.changes_at = len(PADDING) * self.width
        self.columns_at = -(-(self.changes_at + 1 + 3 * self.room) // ALIGN) * ALIGN
        self.copy = CopyIn((self.columns_at, columns), device)
        self.changes = self.copy.target[self.changes_at : self.changes_at + 1 + 3 * self.room]
        self.columns = self.copy.target[self.columns_at :]
        self.uploads = uploads
        self._rows = self.copy.target[: self.changes_at].view(len(PADDING), self.width)
        self._views: dict[int, RowViews] = {}

    def bring(self, shape: StepShape, logprob_rows: I32, columns: I32) -> Tensor | None:
        """Queue the copies of a step.

        Args:
            logprob_rows: rows that report log-probabilities of their token.
            columns: sampling parameters on the host, brought when a request begins.

        Returns:
            More changes than the vector has room for, alike but on their own; else None.
        """
        host = self.copy.room()
        self._fill(host[: self.changes_at].reshape(len(PADDING), self.width), shape, logprob_rows)
        table, apart = shape.plan.table, None
        if len(table) > self.room:
            apart = self.uploads.new(np.append(np.int32(len(table)), table))
            table = table[:0]
        host[self.changes_at] = len(table)
        host[self.changes_at + 1 : self.changes_at + 1 + table.size] = table.reshape(-1)
        if shape.plan.new_requests:
            host[self.columns_at :] = columns
        self.copy.send(2 if shape.plan.new_requests else 1)
        return apart

    def rows(self, count: int) -> RowViews:
        """The rows of a step padded to `count`."""
        if count not in self._views:
            slots, starts, query_start, *others = self._rows
            others = [row[:count] for row in others]
            self._views[count] = RowViews(slots[:count], starts[:count], query_start[: count + 1], *others)
        return self._views[count]

    def _fill(self, host: I32, shape: StepShape, logprob_rows: I32) -> None:
        """Write the rows of a step; the first number of query_start is always 0."""
        plan, rows, padded = shape.plan, shape.plan.num_rows, shape.bucket.rows
        slots, starts, query_start, sample_slots, positions, with_logprobs = host
        if plan.is_dummy:
            host[:, :padded] = PADDING
            query_start[: padded + 1] = 0
            return
        if padded > rows:
            host[:, rows:padded] = PADDING
            query_start[rows + 1 : padded + 1] = shape.num_tokens
        slots[:rows] = sample_slots[:rows] = plan.slots
        starts[:rows] = plan.starts
        np.cumsum(plan.query_lens, dtype=np.int32, out=query_start[1 : rows + 1])
        if shape.num_samples < rows:
            sample_slots[:rows][~plan.samples] = -1
        positions[:rows] = shape.ends
        with_logprobs[: len(logprob_rows)] = logprob_rows
