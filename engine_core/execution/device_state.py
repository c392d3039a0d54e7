"""What a device holds for each slot between steps: tokens, block table, sampling parameters, sums of pooled states.

A plan brings only what changed. Every tensor has one address for the engine's life and a row for each slot, so a
request that ends leaves nothing behind. Knows no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.execution.pinned_copies import zeros
from wavecore.engine_core.execution.sampling_state import COLUMN_SIZE, SamplingState
from wavecore.engine_core.execution.step_input import StepInput
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.execution.uploads import Uploads
from wavecore.engine_core.plan import F32, Admission, RunnerInfo

POOLING = {"": 0, "mean": 1, "last": 2}
# What the rows of a slot ask for beyond a token: bits of `SlotState.asks`
LOGPROBS, PROMPT_LOGPROBS, POOLS, EMBEDS, TRUNCATES, EDITS = (1 << i for i in range(6))


class SlotState:
    """Tables and columns by slot.

    Args:
        slots: places for running requests.

    Attributes:
        token_table: int32 [slots, max_model_len]; `sample` appends to it.
        block_table: int32 [slots, max_blocks].
        pooled_sum: float32 [slots, hidden], over the part of a prompt that earlier steps computed.
        num_prompt, logprobs, prompt_logprobs, pooling, asks: on the host, [slots].
    """

    def __init__(self, slots: int, info: RunnerInfo, device: torch.device) -> None:
        self.max_blocks = -(-info.max_model_len // info.block_size)
        self.token_table = zeros(slots, info.max_model_len, device=device)
        self.block_table = zeros(slots, self.max_blocks, device=device)
        self.pooled_sum = zeros(slots, info.hidden_size, dtype=torch.float32, device=device)
        self.uploads = Uploads(device)
        self.input = StepInput(slots, COLUMN_SIZE * slots, device, self.uploads)
        self.sampling = SamplingState(
            self.token_table, info.vocab_size, info.eos_token_ids, self.input.columns, self.uploads
        )
        self.num_prompt = np.zeros(slots, np.int32)
        self.logprobs = np.zeros(slots, np.int32)
        self.prompt_logprobs = np.zeros(slots, np.int32)
        self.pooling = np.zeros(slots, np.int8)
        self.asks = np.zeros(slots, np.uint8)
        # Of prompts that are not computed yet. The request holds the array while it lives, so nothing stays of one
        # that ends early.
        self.embeds: WeakValueDictionary[int, F32] = WeakValueDictionary()

    def tensors(self) -> Iterator[Tensor]:
        """All but the pools of `sampling`."""
        yield from (self.token_table, self.block_table, self.pooled_sum, self.input.copy.target)

    def admit(self, admissions: tuple[Admission, ...]) -> None:
        """Take over the slots that begin. No row in flight reads them. (A slot may come from a request that ended while
        it was loading, with its admission in flight: what that counted is counted again here, behind it.)"""
        if not admissions:
            return
        for admission in admissions:
            slot, params = admission.slot, admission.params
            self.num_prompt[slot] = admission.num_prompt
            self.logprobs[slot] = params.logprobs or 0
            self.prompt_logprobs[slot] = params.prompt_logprobs or 0
            self.pooling[slot] = POOLING[admission.pooling]
            self.embeds.pop(slot, None)
            if admission.prompt_embeds is not None:
                self.embeds[slot] = admission.prompt_embeds
            truncates, edits = self.sampling.admit(admission)
            self.asks[slot] = (
                LOGPROBS * (params.logprobs is not None)
                + PROMPT_LOGPROBS * (params.prompt_logprobs is not None)
                + POOLS * bool(admission.pooling)
                + EMBEDS * (admission.prompt_embeds is not None)
                + TRUNCATES * bool(truncates)
                + EDITS * edits
            )
            self.uploads.write(self.token_table[slot, : len(admission.token_ids)], admission.token_ids)
        self.uploads.join()
        for admission in admissions:
            self.sampling.count(admission)

    def asked(self, shape: StepShape) -> int:
        """What any row of a step asks for."""
        return int(np.bitwise_or.reduce(self.asks[shape.slots], initial=0))

    def apply(self, entries: Tensor) -> None:
        """Write entries [3, E] of the block table, as `StepInput.bring` returns them."""
        if entries.shape[1]:
            place = entries[:2].long()  # a place in the flat table may not fit 32 bits
            self.block_table.index_put_((place[0], place[1]), entries[2])

    def insert_embeds(self, x: Tensor, shape: StepShape) -> None:
        """Put given prompt embeddings in the place of the tokens' in x [T, hidden]; only the step's part is brought."""
        first = shape.query_lens.cumsum() - shape.query_lens
        for row in np.flatnonzero(self.asks[shape.slots] & EMBEDS).tolist():
            slot, start, end, at = int(shape.slots[row]), int(shape.starts[row]), int(shape.ends[row]), int(first[row])
            given = self.embeds[slot]
            part = given[start:end]
            if len(part):
                x[at : at + len(part)] = self.uploads.new(part)
            if end >= len(given):
                del self.embeds[slot]
                self.asks[slot] &= ~np.uint8(EMBEDS)
