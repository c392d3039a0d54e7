"""What some rows of a step ask for beyond a token: log-probabilities of output and prompt, and embeddings.

Log-probabilities are the raw model's: log-softmax of the logits before bias, penalties and temperature. They are made
for a few positions at once, so that the memory for them does not grow with the step.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS
from wavecore.engine_core.execution.device_state import LOGPROBS, POOLING, POOLS, PROMPT_LOGPROBS, SlotState
from wavecore.engine_core.execution.pinned_copies import CopyOut, Place
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.models.decoder import Decoder
from wavecore.engine_core.plan import I32, RowLogprobs
from wavecore.kernels import ops
from wavecore.kernels.sampling.rows import SamplingRows

CHUNK = 64  # positions whose log-probabilities over the vocabulary exist at once


@dataclass(frozen=True, slots=True)
class Report:
    """Where the log-probabilities of n positions lie: ids [n, 1 + k], log-probabilities alike, ranks [n]."""

    ids: Place
    values: Place
    ranks: Place

    def read(self, vector: I32) -> RowLogprobs:
        return RowLogprobs(self.ids.read(vector), self.values.read(vector), self.ranks.read(vector))


@dataclass(slots=True)
class Extras:
    """What rows asked for; in the step's output vector.

    Attributes:
        logprobs: of `logprob_rows`, or None.
        logprob_rows: (row of the plan, how many alternatives it wants), as the rows of `logprobs`.
        prompt_logprobs, pooled: by row of the plan.
    """

    logprobs: Report | None = None
    logprob_rows: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: dict[int, Report] = field(default_factory=dict)
    pooled: dict[int, Place] = field(default_factory=dict)

    def row_logprobs(self, vector: I32) -> dict[int, RowLogprobs]:
        """Of the output, by row of the plan."""
        if self.logprobs is None:
            return {}
        all_rows = self.logprobs.read(vector)
        return {
            row: RowLogprobs(
                all_rows.token_ids[i : i + 1, : 1 + count],
                all_rows.logprobs[i : i + 1, : 1 + count],
                all_rows.ranks[i : i + 1],
            )
            for i, (row, count) in enumerate(self.logprob_rows)
        }


def room_for_extras(tokens: int, rows: int, hidden_size: int) -> int:
    """int32 values that the rows of one step can ask for: a report for each token, a pooled vector for each row."""
    return tokens * (2 * (1 + MAX_LOGPROBS) + 1) + rows * hidden_size


class _ReportRoom:
    """Room for the log-probabilities of n positions on the device, to be filled a few at a time."""

    def __init__(self, out: CopyOut, positions: int, count: int) -> None:
        self.count = count
        self.ids, ids = out.take(positions, 1 + count, kind=np.int32)
        self.values, values = out.take(positions, 1 + count, kind=np.float32)
        self.ranks, ranks = out.take(positions, kind=np.int32)
        self.report = Report(ids, values, ranks)

    def put(self, part: slice, logprobs: Tensor, chosen: Tensor) -> None:
        """The chosen token (int64 [m]) and the most likely ones, from log-probabilities [m, vocab]."""
        own = logprobs.gather(1, chosen[:, None])
        best = logprobs.topk(self.count)
        self.ids[part, :1] = chosen[:, None]
        self.ids[part, 1:] = best.indices
        self.values[part, :1] = own
        self.values[part, 1:] = best.values
        self.ranks[part] = (logprobs > own).sum(-1) + 1


def draw(logits: Tensor, rows: SamplingRows, out: CopyOut, first: int = 0) -> None:
    """Sample the logits [R, vocab] of the device rows from `first` on into the step's output."""
    last = first + logits.shape[0]
    out.tokens[first:last], out.faults[first:last] = ops.sample(logits, rows)


def draw_and_report(
    logits: Tensor,
    rows: SamplingRows,
    asking: I32,
    index: Tensor,
    shape: StepShape,
    state: SlotState,
    out: CopyOut,
    extras: Extras,
) -> None:
    """`draw`, and the log-probabilities of the rows that ask.

    Sampling edits the logits, so the raw log-probabilities come first, and with many rows that ask both are done for
    CHUNK rows at a time.

    Args:
        asking, index: int32, the device rows that ask, on the host and on the device.
    """
    counts = state.logprobs[shape.slots[asking]]
    room = _ReportRoom(out, len(asking), int(counts.max()))
    step = len(logits) if len(asking) <= CHUNK else CHUNK
    for begin in range(0, len(logits), step):
        part = slice(begin, begin + step)
        first, last = np.searchsorted(asking, (begin, begin + step)).tolist()
        chosen = index[first:last].long()
        logprobs = logits[chosen].float().log_softmax(-1)
        draw(logits[part], replace(rows, slots=rows.slots[part], positions=rows.positions[part]), out, begin)
        if last > first:
            room.put(slice(first, last), logprobs, out.tokens[chosen].long())
    extras.logprobs = room.report
    extras.logprob_rows = list(zip(shape.plan_rows(asking), counts.tolist(), strict=True))


def logprob_rows(shape: StepShape, state: SlotState) -> I32:
    """Device rows that report log-probabilities of their token."""
    return np.flatnonzero(shape.samples & ((state.asks[shape.slots] & LOGPROBS) > 0)).astype(np.int32)


def prompt_logprobs(
    model: Decoder, x: Tensor, residual: Tensor, shape: StepShape, state: SlotState, out: CopyOut, extras: Extras
) -> None:
    """For rows that ask: every query position whose next token belongs to the prompt."""
    ends = np.minimum(shape.ends, state.num_prompt[shape.slots] - 1)
    first_token = shape.query_lens.cumsum() - shape.query_lens
    rows = np.flatnonzero(((state.asks[shape.slots] & PROMPT_LOGPROBS) > 0) & (ends > shape.starts))
    for row, plan_row in zip(rows.tolist(), shape.plan_rows(rows), strict=True):
        slot, start, length = int(shape.slots[row]), int(shape.starts[row]), int(ends[row] - shape.starts[row])
        at = int(first_token[row])
        room = _ReportRoom(out, length, int(state.prompt_logprobs[slot]))
        for begin in range(0, length, CHUNK):
            end = min(begin + CHUNK, length)
            part = slice(at + begin, at + end)
            logits = model.logits(_whole_chunk(model.final(x[part], residual[part])))
            logprobs = logits[: end - begin].float().log_softmax(-1)
            targets = state.token_table[slot, start + 1 + begin : start + 1 + end].long()
            room.put(slice(begin, end), logprobs, targets)
        extras.prompt_logprobs[plan_row] = room.report


def _whole_chunk(hidden: Tensor) -> Tensor:
    """Padded to CHUNK rows on a GPU: a matrix product of a new size may load its kernel, which waits for the device."""
    short = CHUNK - hidden.shape[0]
    return F.pad(hidden, (0, 0, 0, short)) if short and hidden.is_cuda else hidden


def pool(
    model: Decoder, x: Tensor, residual: Tensor, shape: StepShape, state: SlotState, out: CopyOut, extras: Extras
) -> None:
    """For embedding requests: the mean over the prompt (summed chunk by chunk) or its last token, of length 1."""
    token_ends = shape.query_lens.cumsum()
    rows = np.flatnonzero(state.asks[shape.slots] & POOLS)
    for row, plan_row in zip(rows.tolist(), shape.plan_rows(rows), strict=True):
        slot, end = int(shape.slots[row]), int(token_ends[row])
        last = bool(shape.ends[row] >= state.num_prompt[slot])
        if state.pooling[slot] == POOLING["mean"]:
            part = slice(end - int(shape.query_lens[row]), end)
            vector = model.final(x[part], residual[part]).float().sum(0)
            if shape.starts[row]:
                vector += state.pooled_sum[slot]
            if not last:
                state.pooled_sum[slot] = vector
        elif last:
            vector = model.final(x[end - 1 : end], residual[end - 1 : end])[0].float()
        if last:
            target, extras.pooled[plan_row] = out.take(len(vector), kind=np.float32)
            target.copy_(F.normalize(vector, dim=0))
