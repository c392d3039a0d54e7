"""The output of a step's rows: the drawn tokens, and what some rows want besides: log-probabilities and embeddings.

*Extras* are all that a row reports beyond its token. Log-probabilities are the raw model's: log-softmax of the logits
before bias, penalties and temperature. They are made for a few positions at once, so that the memory for them does not
grow with the step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.nn.functional as F
from torch import Tensor

from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS
from wavecore.engine_core.execution.device_state import LOGPROBS, POOLING, POOLS, PROMPT_LOGPROBS, DeviceState
from wavecore.engine_core.execution.pinned_copies import CopyOut, Place
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.models.decoder import Decoder
from wavecore.engine_core.plan import I32, LOGPROB_CHUNK, Index, RowLogprobs, RunnerInfo, room_for_many
from wavecore.kernels.sampling.rows import SamplingRows
from wavecore.parallel.sampler import sample

NO_ROWS = np.zeros(0, np.int32)


class Report:
    """Log-probabilities of n positions in a step's output: room to be filled a few at a time, and read when that is
    back. Ids [n, 1 + k], log-probabilities alike, ranks [n]."""

    def __init__(self, out: CopyOut, positions: int, count: int) -> None:
        self.count = count
        self.ids, ids = out.take(positions, 1 + count, kind=np.int32)
        self.values, values = out.take(positions, 1 + count, kind=np.float32)
        self.ranks, ranks = out.take(positions, kind=np.int32)
        self._places = ids, values, ranks

    def put(self, part: slice, logprobs: Tensor, chosen: Tensor) -> None:
        """The chosen token (int64 [m]) and the most likely ones, from log-probabilities [m, vocab]."""
        own = logprobs.gather(1, chosen[:, None])
        best = logprobs.topk(self.count)
        self.ids[part, :1] = chosen[:, None]
        self.ids[part, 1:] = best.indices
        self.values[part, :1] = own
        self.values[part, 1:] = best.values
        self.ranks[part] = (logprobs > own).sum(-1) + 1

    def read(self, vector: I32) -> RowLogprobs:
        return RowLogprobs(*(place.read(vector) for place in self._places))


def room_for_extras(max_num_batched_tokens: int, max_num_seqs: int, info: RunnerInfo) -> int:
    """int32 values that the rows of one step can want: a report for each token, a pooled vector for each row, and what
    the scheduler shares out among reports of more alternatives."""
    return max_num_batched_tokens * (2 * (1 + MAX_LOGPROBS) + 1) + max_num_seqs * info.hidden_size + room_for_many(info)


class Extras:
    """Fills the output of one step: tokens, and what rows want beyond them; reads the latter when that is back.

    Attributes:
        options: what any row wants, bits of `DeviceState.options`.
        logprob_rows: int32, the rows that report log-probabilities of their token.
    """

    def __init__(self, shape: StepShape, state: DeviceState, out: CopyOut) -> None:
        self._shape, self._plan, self._state, self._out = shape, shape.plan, state, out
        self.options = state.options_of(shape)
        self.logprob_rows = self._counts = NO_ROWS
        if self.options & LOGPROBS:
            self.logprob_rows = self._rows_with(LOGPROBS * self._plan.samples).astype(np.int32)
            self._counts = state.logprobs[self._plan.slots[self.logprob_rows]]  # alternatives that they want
        self._logprobs: Report | None = None
        self._many: dict[int, Report] = {}  # of rows that want more than MAX_LOGPROBS
        self._prompt_logprobs: dict[int, Report] = {}
        self._pooled: dict[int, Place] = {}

    def draw(self, model: Decoder, hidden: Tensor, rows: SamplingRows, logprob_rows: Tensor) -> None:
        """Sample after the hidden states [R, hidden], and report the log-probabilities of the rows that want them.

        Sampling edits the logits, so the raw log-probabilities come first, and with many such rows both are done for
        LOGPROB_CHUNK rows at a time.

        Args:
            logprob_rows: int32, the attribute of that name on the device.
        """
        report = Report(self._out, len(self.logprob_rows), min(int(self._counts.max()), MAX_LOGPROBS))
        logits = model.own_logits(hidden)
        for part, reported in self.chunks(len(hidden)):
            chosen = logprob_rows[reported].long()
            logprobs = model.whole(logits[chosen]).float().log_softmax(-1) if len(chosen) else logits[:0]
            columns = {name: getattr(rows, name)[part] for name in ("slots", "positions", "tokens", "faults")}
            sample(logits[part], replace(rows, **columns), model.spec.vocab_size, model.group)
            if len(chosen):
                first, tokens = reported.start, rows.tokens[chosen].long()
                report.put(reported, logprobs, tokens)
                for i in np.flatnonzero(self._counts[reported] > MAX_LOGPROBS).tolist():
                    many = Report(self._out, 1, int(self._counts[first + i]))
                    many.put(slice(0, 1), logprobs[i : i + 1], tokens[i : i + 1])
                    self._many[int(self.logprob_rows[first + i])] = many
        self._logprobs = report

    def chunks(self, num_rows: int) -> Iterator[tuple[slice, slice]]:
        """The rows that are sampled at once, and which of `logprob_rows` are among them."""
        step = num_rows if len(self.logprob_rows) <= LOGPROB_CHUNK else LOGPROB_CHUNK
        for begin in range(0, num_rows, step):
            first, last = np.searchsorted(self.logprob_rows, (begin, begin + step)).tolist()
            yield slice(begin, min(begin + step, num_rows)), slice(first, last)

    def report_prompts(self, model: Decoder, x: Tensor, residual: Tensor) -> None:
        """Prompt log-probabilities: of every query position whose next token belongs to the prompt."""
        plan, state = self._plan, self._state
        first_token = plan.query_lens.cumsum() - plan.query_lens
        for row, length in self._prompts():
            slot, start, at = int(plan.slots[row]), int(plan.starts[row]), int(first_token[row])
            report = Report(self._out, length, int(state.prompt_logprobs[slot]))
            for begin in range(0, length, LOGPROB_CHUNK):
                end = min(begin + LOGPROB_CHUNK, length)
                part = slice(at + begin, at + end)
                logits = model.logits(_whole_chunk(model.final(x[part], residual[part])))
                logprobs = logits[: end - begin].float().log_softmax(-1)
                targets = state.token_table[slot, start + 1 + begin : start + 1 + end].long()
                report.put(slice(begin, end), logprobs, targets)
            self._prompt_logprobs[row] = report

    def prompt_logits(self, padded: bool) -> Iterator[int]:
        """How many rows of logits `report_prompts` asks the model for, call by call."""
        for _, length in self._prompts():
            for begin in range(0, length, LOGPROB_CHUNK):
                yield LOGPROB_CHUNK if padded else min(LOGPROB_CHUNK, length - begin)

    def _prompts(self) -> Iterator[tuple[int, int]]:
        """The rows that report prompt log-probabilities, and of how many positions."""
        plan = self._plan
        ends = np.minimum(self._shape.ends, self._state.num_prompt[plan.slots] - 1)
        for row in self._rows_with(PROMPT_LOGPROBS * (ends > plan.starts)).tolist():
            yield row, int(ends[row] - plan.starts[row])

    def pool(self, model: Decoder, x: Tensor, residual: Tensor) -> None:
        """Embeddings: the mean over the prompt (summed chunk by chunk) or its last token, of length 1."""
        plan, state = self._plan, self._state
        token_ends = plan.query_lens.cumsum()
        for row in self._rows_with(POOLS).tolist():
            slot, end = int(plan.slots[row]), int(token_ends[row])
            last = bool(self._shape.ends[row] >= state.num_prompt[slot])
            if state.pooling[slot] == POOLING["mean"]:
                part = slice(end - int(plan.query_lens[row]), end)
                vector = model.final(x[part], residual[part]).float().sum(0)
                if plan.starts[row]:
                    vector += state.pooled_sum[slot]
                if not last:
                    state.pooled_sum[slot] = vector
            elif last:
                vector = model.final(x[end - 1 : end], residual[end - 1 : end])[0].float()
            if last:
                target, self._pooled[row] = self._out.take(len(vector), kind=np.float32)
                target.copy_(F.normalize(vector, dim=0))

    def read(self, vector: I32) -> dict[str, dict[int, Any]]:
        """The fields of `StepResult` that are made here, from the vector that came back."""
        return {
            "logprobs": self._read_logprobs(vector),
            "prompt_logprobs": {row: report.read(vector) for row, report in self._prompt_logprobs.items()},
            "pooled": {row: place.read(vector) for row, place in self._pooled.items()},
        }

    def _read_logprobs(self, vector: I32) -> dict[int, RowLogprobs]:
        if self._logprobs is None:
            return {}
        ids, values, ranks = self._logprobs.read(vector)
        wanted = zip(self.logprob_rows.tolist(), self._counts.tolist(), strict=True)
        few = {
            row: RowLogprobs(ids[i : i + 1, : 1 + count], values[i : i + 1, : 1 + count], ranks[i : i + 1])
            for i, (row, count) in enumerate(wanted)
        }
        return few | {row: report.read(vector) for row, report in self._many.items()}

    def _rows_with(self, option: int | npt.NDArray[np.integer]) -> Index:
        """Rows that want this."""
        return np.flatnonzero(self._state.options[self._plan.slots] & option)


def _whole_chunk(hidden: Tensor) -> Tensor:
    """Padded on a GPU to LOGPROB_CHUNK rows: a matrix product of a new size may load its kernel, which waits for the
    device."""
    short = LOGPROB_CHUNK - hidden.shape[0]
    return F.pad(hidden, (0, 0, 0, short)) if short and hidden.is_cuda else hidden
