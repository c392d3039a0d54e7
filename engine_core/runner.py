"""Runs step plans on one device: slot state, one packed copy in, the model, sampling, one copy out.

On a CPU `launch` only notes the plan and `wait` computes it, so that two steps in flight delay no token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.model import Decoder
from wavecore.engine_core.plan import I32, PendingStep, RunnerInfo, StepPlan, StepResult
from wavecore.engine_core.row_extras import (
    Extras,
    LogprobRows,
    pool,
    pooled_vector,
    prompt_logprobs,
    to_row_logprobs,
)
from wavecore.engine_core.slot_state import SlotState, StepShape
from wavecore.kernels import ops
from wavecore.kernels.batch import BatchBuffers, StepRows


class ModelRunner:
    """The runner of one device.

    Args:
        model: on its device.
        info: what the loader resolved.
        max_num_seqs, max_num_batched_tokens: bounds of a plan.
    """

    def __init__(self, model: Decoder, info: RunnerInfo, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        spec = model.spec
        self.info = info
        self.model = model
        self.device = model.embedding.device
        page = (spec.num_layers, 2, spec.num_kv_heads, info.block_size, spec.head_dim)
        dtype = model.embedding.dtype
        self.pages = _zeros((info.num_blocks, *page), dtype, self.device)
        self.host_pages = _zeros((info.num_host_blocks, *page), dtype, torch.device("cpu"))
        self.state = SlotState(
            max_num_seqs, info.max_model_len, info.block_size, info.vocab_size, info.eos_token_ids, self.device
        )
        self.buffers = BatchBuffers.allocate(max_num_batched_tokens, max_num_seqs, self.state.max_blocks, self.device)

    def launch(self, plan: StepPlan) -> PendingStep:
        return _Deferred(lambda: self.execute(plan))

    def shutdown(self) -> None:
        """Nothing runs between calls."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's events in their order, run its rows, and fetch what they produced."""
        self._move_blocks(plan)
        shape = StepShape.of(plan)
        self.state.admit(plan.admitted)
        packed = self.state.pack(plan, shape)
        views = packed.split(torch.from_numpy(packed.values))
        self.state.update(plan, views)
        if not len(shape.slots):
            return StepResult(np.zeros(0, np.int32), np.zeros(0, np.uint8))
        tokens, faults, extras = self._forward(shape, views)
        return _to_result(shape, tokens, faults, extras)

    def _move_blocks(self, plan: StepPlan) -> None:
        for pairs, source, target in (
            (plan.swap_out, self.pages, self.host_pages),
            (plan.swap_in, self.host_pages, self.pages),
        ):
            if len(pairs):
                index = torch.from_numpy(pairs.astype(np.int64))
                target[index[:, 1].to(target.device)] = source[index[:, 0].to(source.device)].to(target.device)
        if len(plan.copies):
            ops.copy_blocks(self.pages, torch.from_numpy(plan.copies.astype(np.int64)).to(self.device))

    def _forward(self, shape: StepShape, views: list[Tensor]) -> tuple[Tensor, Tensor, Extras]:
        """Tokens int32 [R] and faults uint8 [R] in device row order, and the extras by plan row."""
        state, model = self.state, self.model
        slots, starts, query_start, sample_slots, positions = views[:5]
        rows = StepRows(
            slots=slots,
            starts=starts,
            query_start=query_start,
            num_tokens=shape.num_tokens,
            num_rows=len(shape.slots),
            num_decode_rows=shape.num_decode_rows,
            max_query_len=int(shape.query_lens.max()),
            max_seq_len=int((shape.starts + shape.query_lens).max()),
            bucket_tokens=shape.num_tokens,
        )
        batch = ops.prepare_batch(rows, state.token_table, state.block_table, self.info.block_size, self.buffers)
        x = model.embed(batch.token_ids)
        if state.embeds:
            self._insert_embeds(x, shape)
        x, residual = model.forward(x, batch, self.pages)
        extras = Extras()
        prompt_logprobs(model, x, residual, shape, state, extras)
        pool(model, x, residual, shape, state, extras)
        if not shape.samples.any():  # nothing but parts of prompts
            nothing = torch.full((len(shape.slots),), -1, dtype=torch.int32)
            return nothing, torch.zeros(len(shape.slots), dtype=torch.uint8), extras
        last = batch.sample_index
        logits = model.logits(model.final(x[last], residual[last]))
        logprobs = LogprobRows(logits, shape, state)
        sampling = state.sampling.rows(sample_slots, positions, shape.slots[shape.samples])
        tokens, faults = ops.sample(logits, sampling)
        logprobs.finish(tokens, shape, extras)
        return tokens, faults, extras

    def _insert_embeds(self, x: Tensor, shape: StepShape) -> None:
        """Put given prompt embeddings in the place of the tokens'."""
        at = 0
        for slot, start, length in zip(
            shape.slots.tolist(), shape.starts.tolist(), shape.query_lens.tolist(), strict=True
        ):
            given = self.state.embeds.get(slot)
            if given is not None and start < len(given):
                part = given[start : start + length]
                x[at : at + len(part)] = part.to(x.dtype)
            at += length


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU numpy's, whose memory the system hands out when it is first written, not all at once."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)


@dataclass(slots=True)
class _Deferred:
    """A step that is computed when its result is asked for."""

    run: Callable[[], StepResult]

    def wait(self) -> StepResult:
        return self.run()


def _to_result(shape: StepShape, tokens: Tensor, faults: Tensor, extras: Extras) -> StepResult:
    """Back to the plan's row order, as numpy."""
    plan_tokens: I32 = np.empty(len(shape.order), np.int32)
    plan_faults = np.empty(len(shape.order), np.uint8)
    plan_tokens[shape.order] = tokens.numpy()
    plan_faults[shape.order] = faults.numpy()
    pooled = {row: pooled_vector(vector) for row, vector in extras.pooled.items()}
    for row, vector in pooled.items():
        plan_faults[row] |= not np.isfinite(vector).all()
    return StepResult(
        tokens=plan_tokens,
        faults=plan_faults,
        logprobs={row: to_row_logprobs(triple) for row, triple in extras.logprobs.items()},
        prompt_logprobs={row: to_row_logprobs(triple) for row, triple in extras.prompt_logprobs.items()},
        pooled=pooled,
    )
