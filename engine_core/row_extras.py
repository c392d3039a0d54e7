"""What some rows of a step ask for beyond a token: log-probabilities of output and prompt, and embeddings.

Log-probabilities are the raw model's: log-softmax of the logits before bias, penalties and temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from wavecore.engine_core.model import Decoder
from wavecore.engine_core.plan import RowLogprobs
from wavecore.engine_core.slot_state import POOLING, SlotState
from wavecore.engine_core.step_shape import StepShape

CHUNK = 128  # prompt positions whose logits over the vocabulary exist at once

Fetch = Callable[[Tensor], Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


@dataclass(slots=True)
class Extras:
    """What rows asked for, on the device and, after `map`, on the host.

    Attributes:
        logprobs: ids, log-probabilities and ranks of `logprob_rows`, or None.
        logprob_rows: (row of the plan, how many alternatives it wants), as the rows of `logprobs`.
        prompt_logprobs, pooled: by row of the plan.
    """

    logprobs: Triple | None = None
    logprob_rows: list[tuple[int, int]] = field(default_factory=list)
    prompt_logprobs: dict[int, Triple] = field(default_factory=dict)
    pooled: dict[int, Tensor] = field(default_factory=dict)

    def map(self, fetch: Fetch) -> Extras:
        """Every tensor passed through `fetch`."""

        def each(triple: Triple) -> Triple:
            a, b, c = triple
            return fetch(a), fetch(b), fetch(c)

        return Extras(
            logprobs=each(self.logprobs) if self.logprobs else None,
            logprob_rows=self.logprob_rows,
            prompt_logprobs={row: each(triple) for row, triple in self.prompt_logprobs.items()},
            pooled={row: fetch(vector) for row, vector in self.pooled.items()},
        )

    def row_logprobs(self) -> dict[int, RowLogprobs]:
        """Of the output, by row of the plan; on the host."""
        if self.logprobs is None:
            return {}
        ids, values, ranks = (tensor.numpy() for tensor in self.logprobs)
        return {
            row: RowLogprobs(ids[i : i + 1, : 1 + count], values[i : i + 1, : 1 + count], ranks[i : i + 1])
            for i, (row, count) in enumerate(self.logprob_rows)
        }


class LogprobRows:
    """The output log-probabilities of one step: made before sampling, which edits the logits; finished after it.

    Args:
        index: int32, the device rows that ask.
    """

    def __init__(self, logits: Tensor, index: Tensor) -> None:
        self.index = index.long()
        if len(index):
            self.logprobs = logits[self.index].float().log_softmax(-1)

    def finish(self, tokens: Tensor, shape: StepShape, state: SlotState, extras: Extras) -> None:
        if not len(self.index):
            return
        rows = state.logprob_rows(shape)
        counts = state.logprobs[shape.slots[rows]]
        extras.logprobs = _report(self.logprobs, tokens[self.index].long(), int(counts.max()))
        extras.logprob_rows = list(zip(shape.order[rows].tolist(), counts.tolist(), strict=True))


def prompt_logprobs(
    model: Decoder, x: Tensor, residual: Tensor, shape: StepShape, state: SlotState, extras: Extras
) -> None:
    """For rows that ask: every query position whose next token belongs to the prompt."""
    counts = state.prompt_logprobs[shape.slots]
    ends = np.minimum(shape.starts + shape.query_lens, state.num_prompt[shape.slots] - 1)
    first_token = shape.query_lens.cumsum() - shape.query_lens
    for row in np.flatnonzero((counts >= 0) & (ends > shape.starts)).tolist():
        slot, start, end = int(shape.slots[row]), int(shape.starts[row]), int(ends[row])
        at = int(first_token[row])
        targets = state.token_table[slot, start + 1 : end + 1].long()
        chunks = []
        for begin in range(0, end - start, CHUNK):
            part = slice(at + begin, at + min(begin + CHUNK, end - start))
            logprobs = model.logits(model.final(x[part], residual[part])).float().log_softmax(-1)
            chunks.append(_report(logprobs, targets[begin : begin + CHUNK], int(counts[row])))
        ids, values, ranks = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        extras.prompt_logprobs[int(shape.order[row])] = ids, values, ranks


def pool(model: Decoder, x: Tensor, residual: Tensor, shape: StepShape, state: SlotState, extras: Extras) -> None:
    """For embedding requests: the mean over the prompt (summed chunk by chunk) or its last token, of length 1."""
    kinds = state.pooling[shape.slots]
    ends = shape.query_lens.cumsum()
    for row in np.flatnonzero(kinds).tolist():
        slot, end = int(shape.slots[row]), int(ends[row])
        last = bool(shape.starts[row] + shape.query_lens[row] >= state.num_prompt[slot])
        if kinds[row] == POOLING["last"]:
            vector = model.final(x[end - 1 : end], residual[end - 1 : end])[0].float() if last else None
        else:
            part = slice(end - int(shape.query_lens[row]), end)
            vector = model.final(x[part], residual[part]).float().sum(0)
            vector = vector + state.pooled_sum[slot] if shape.starts[row] else vector
            state.pooled_sum[slot] = vector
        if last and vector is not None:
            extras.pooled[int(shape.order[row])] = F.normalize(vector, dim=0)


def to_row_logprobs(triple: Triple) -> RowLogprobs:
    ids, values, ranks = triple
    return RowLogprobs(ids.numpy(), values.numpy(), ranks.numpy())


def _report(logprobs: Tensor, chosen: Tensor, count: int) -> Triple:
    """Chosen token and the `count` most likely: ids int32 [n, 1 + count], log-probabilities, ranks int32 [n]."""
    own = logprobs.gather(1, chosen[:, None])
    ranks = (logprobs > own).sum(-1, dtype=torch.int32) + 1
    best = logprobs.topk(count)
    return torch.cat((chosen[:, None], best.indices), 1).int(), torch.cat((own, best.values), 1), ranks
