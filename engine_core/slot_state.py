"""What a device holds for each slot between steps: tokens, block table, sampling columns, and a few rare extras.

A plan brings only what changed; `Packed` puts that into one int32 vector for one copy. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.plan import I32, Admission, StepPlan
from wavecore.engine_core.sampler import SamplingState
from wavecore.engine_core.step_copies import upload
from wavecore.engine_core.step_shape import StepShape

ALIGN = 4  # int32: 16 bytes, as kernels compile anew for other alignments, and the columns begin with 64-bit values
Views = dict[str, Tensor]

POOLING = {"": 0, "mean": 1, "last": 2}


class SlotState:
    """Tables and columns by slot.

    Args:
        slots: places for running requests.
        max_model_len, block_size: bound the tables.
        vocab_size, eos_token_ids: for `SamplingState`.
    """

    def __init__(
        self,
        slots: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.slots = slots
        self.max_blocks = -(-max_model_len // block_size)
        self.token_table = torch.zeros((slots, max_model_len), dtype=torch.int32, device=device)
        self.block_table = torch.zeros((slots, self.max_blocks), dtype=torch.int32, device=device)
        self.sampling = SamplingState(self.token_table, vocab_size, eos_token_ids)
        self.num_prompt = np.zeros(slots, np.int32)
        self.logprobs = np.full(slots, -1, np.int32)
        self.prompt_logprobs = np.full(slots, -1, np.int32)
        self.pooling = np.zeros(slots, np.int8)
        self.pooled_sum: dict[int, Tensor] = {}
        self.embeds: dict[int, Tensor] = {}

    def admit(self, admissions: tuple[Admission, ...]) -> None:
        """The host's half of admissions, and the rare extras whose size the packed buffer does not bound."""
        self.sampling.admit(admissions)
        for admission in admissions:
            slot, params = admission.slot, admission.params
            self.num_prompt[slot] = admission.num_prompt
            self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
            self.prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
            self.pooling[slot] = POOLING[admission.pooling]
            self.pooled_sum.pop(slot, None)
            self.embeds.pop(slot, None)
            if admission.prompt_embeds is not None:
                self.embeds[slot] = upload(np.array(admission.prompt_embeds), self.token_table.device)

    def pack(self, plan: StepPlan, shape: StepShape) -> Packed:
        """One vector with the step's padded rows and with every change of the tables."""
        pad = shape.bucket_rows - len(shape.slots)
        sample_slots = np.where(shape.samples, shape.slots, -1)
        parts: dict[str, I32] = {
            "slots": np.pad(shape.slots, (0, pad), constant_values=-1),
            "starts": np.pad(shape.starts, (0, pad)),
            "query_start": np.pad(shape.query_lens, (1, pad)).cumsum(dtype=np.int32),
            "sample_slots": np.pad(sample_slots, (0, pad), constant_values=-1),
            "positions": np.pad(shape.starts + shape.query_lens, (0, pad)),
            "logprob_rows": self.logprob_rows(shape),
            "copies": plan.copies.ravel(),
            "table_index": plan.block_slots * self.max_blocks + plan.block_indices,
            "table_value": plan.block_ids,
        }
        if plan.admitted:
            parts["columns"] = self.sampling.host_columns
            parts |= {f"tokens of slot {a.slot}": a.token_ids for a in plan.admitted}
        return Packed.of(parts)

    def logprob_rows(self, shape: StepShape) -> I32:
        """Device rows that report log-probabilities of their token."""
        return np.flatnonzero(shape.samples & (self.logprobs[shape.slots] >= 0)).astype(np.int32)

    def update(self, plan: StepPlan, views: Views) -> None:
        """The device's half: `views` are the parts of `pack` on the device."""
        if len(plan.block_ids):
            self.block_table.view(-1).index_copy_(0, views["table_index"].long(), views["table_value"])
        if plan.admitted:
            self.sampling.device_columns.copy_(views["columns"])
            for admission in plan.admitted:
                tokens = views[f"tokens of slot {admission.slot}"]
                self.token_table[admission.slot, : len(tokens)].copy_(tokens)

    def insert_embeds(self, x: Tensor, shape: StepShape) -> None:
        """Put given prompt embeddings in the place of the tokens', in x [T, hidden]."""
        at = 0
        for slot, start, length in zip(
            shape.slots.tolist(), shape.starts.tolist(), shape.query_lens.tolist(), strict=True
        ):
            given = self.embeds.get(slot)
            if given is not None and start < len(given):
                part = given[start : start + length]
                x[at : at + len(part)] = part.to(x.dtype)
            at += length


@dataclass(frozen=True, slots=True)
class Packed:
    """One vector of many parts.

    Attributes:
        values: int32, the parts one after another, each at a multiple of ALIGN.
        places: offset and length of each part.
    """

    values: I32
    places: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, parts: dict[str, I32]) -> Packed:
        places, end = {}, 0
        for name, part in parts.items():
            places[name] = end, len(part)
            end += -(-len(part) // ALIGN) * ALIGN
        values = np.zeros(end, np.int32)
        for name, (offset, length) in places.items():
            values[offset : offset + length] = parts[name]
        return cls(values, places)

    def split(self, device_values: Tensor) -> Views:
        return {name: device_values[offset : offset + length] for name, (offset, length) in self.places.items()}
