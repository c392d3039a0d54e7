"""What a device holds for each slot between steps: tokens, block table, sampling parameters, sums of pooled states.

A plan brings only what changed. Every tensor has one address for the engine's life and a row for each slot, so a
request that ends leaves nothing behind.
"""

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
from wavecore.engine_core.plan import F32, NewRequest, RunnerInfo

POOLING = {"": 0, "mean": 1, "last": 2}
# What a request wants beyond a token: bits of `DeviceState.options`
LOGPROBS, PROMPT_LOGPROBS, POOLS, EMBEDS, TRUNCATES, EDITS = (1 << i for i in range(6))


class DeviceState:
    """Tables and columns by slot.

    Args:
        own: vocabulary ids of this rank's columns of the logits.

    Attributes:
        token_table: int32 [max_num_seqs, max_model_len]; `finish` appends to it.
        block_table: int32 [max_num_seqs, max_blocks].
        pooled_sum: float32 [max_num_seqs, hidden], over the part of a prompt that earlier steps computed.
        num_prompt, logprobs, prompt_logprobs, pooling, options: on the host, [max_num_seqs].
    """

    def __init__(self, max_num_seqs: int, info: RunnerInfo, device: torch.device, own: range) -> None:
        self.max_blocks = -(-info.max_model_len // info.block_size)
        self.token_table = zeros(max_num_seqs, info.max_model_len, device=device)
        self.block_table = zeros(max_num_seqs, self.max_blocks, device=device)
        self.pooled_sum = zeros(max_num_seqs, info.hidden_size, dtype=torch.float32, device=device)
        self.uploads = Uploads(device)
        self.input = StepInput(max_num_seqs, COLUMN_SIZE * max_num_seqs, device, self.uploads)
        self.sampling = SamplingState(
            self.token_table, info.vocab_size, own, info.eos_token_ids, self.input.columns, self.uploads
        )
        self.num_prompt = np.zeros(max_num_seqs, np.int32)
        self.logprobs = np.zeros(max_num_seqs, np.int32)
        self.prompt_logprobs = np.zeros(max_num_seqs, np.int32)
        self.pooling = np.zeros(max_num_seqs, np.int8)
        self.options = np.zeros(max_num_seqs, np.uint8)
        # Of prompts that are not computed yet. The request holds the array while it lives, so nothing stays of one
        # that ends early.
        self.embeds: WeakValueDictionary[int, F32] = WeakValueDictionary()

    def tensors(self) -> Iterator[Tensor]:
        """All but the pools of `sampling`."""
        yield from (self.token_table, self.block_table, self.pooled_sum, self.input.copy.target, self.uploads.packed)

    def begin(self, new_requests: tuple[NewRequest, ...]) -> None:
        """Take over the slots of new requests. No step in flight has a row of them. (One without such a row may be: the
        step that began a request which ended while it was loading. What that step counted is counted again here, behind
        it.)"""
        if not new_requests:
            return
        for new in new_requests:
            slot, params = new.slot, new.params
            self.num_prompt[slot] = new.num_prompt
            self.logprobs[slot] = params.logprobs or 0
            self.prompt_logprobs[slot] = params.prompt_logprobs or 0
            self.pooling[slot] = POOLING[new.pooling]
            self.embeds.pop(slot, None)
            if new.prompt_embeds is not None:
                self.embeds[slot] = new.prompt_embeds
            truncates, edits = self.sampling.begin(new)
            self.options[slot] = (
                LOGPROBS * (params.logprobs is not None)
                + PROMPT_LOGPROBS * (params.prompt_logprobs is not None)
                + POOLS * bool(new.pooling)
                + EMBEDS * (new.prompt_embeds is not None)
                + TRUNCATES * bool(truncates)
                + EDITS * edits
            )
            self.uploads.write_row(self.token_table, slot, new.token_ids)
        self.uploads.join()
        for new in new_requests:
            self.sampling.count(new)

    def options_of(self, shape: StepShape) -> int:
        """What any row of a step wants, as bits; padding wants nothing."""
        return 0 if shape.plan.is_dummy else int(np.bitwise_or.reduce(self.options[shape.plan.slots], initial=0))

    def insert_embeds(self, x: Tensor, shape: StepShape) -> None:
        """Put given prompt embeddings in the place of the tokens' in x [T, hidden]; only the step's part is brought."""
        plan, first = shape.plan, shape.plan.query_lens.cumsum() - shape.plan.query_lens
        for row in np.flatnonzero(self.options[plan.slots] & EMBEDS).tolist():
            slot, start, end, at = int(plan.slots[row]), int(plan.starts[row]), int(shape.ends[row]), int(first[row])
            given = self.embeds[slot]
            part = given[start:end]
            if len(part):
                x[at : at + len(part)] = self.uploads.new(part)
            if end >= len(given):
                del self.embeds[slot]
                self.options[slot] &= ~np.uint8(EMBEDS)
