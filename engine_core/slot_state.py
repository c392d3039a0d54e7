"""What a device holds for each slot between steps: tokens, block table, sampling columns, and a few rare extras.

A plan brings only what changed; `Packed` puts that into one int32 vector for one copy. Knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavecore.engine_core.plan import I32, Admission, StepPlan
from wavecore.engine_core.sampler import SamplingState

POOLING = {"": 0, "mean": 1, "last": 2}


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step in numbers that the host knows, rows in device order (one query token first).

    Attributes:
        order: int64 [rows], the plan's row at each device row.
        slots, starts, query_lens: int32 [rows].
        samples: bool [rows].
    """

    order: npt.NDArray[np.int64]
    slots: I32
    starts: I32
    query_lens: I32
    samples: npt.NDArray[np.bool_]
    num_tokens: int
    num_decode_rows: int

    @classmethod
    def of(cls, plan: StepPlan) -> StepShape:
        order = np.argsort(plan.query_lens > 1, kind="stable")
        query_lens = plan.query_lens[order]
        return cls(
            order=order,
            slots=plan.slots[order],
            starts=plan.starts[order],
            query_lens=query_lens,
            samples=plan.samples[order].astype(np.bool_),
            num_tokens=int(query_lens.sum()),
            num_decode_rows=int(np.count_nonzero(query_lens == 1)),
        )


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
                self.embeds[slot] = torch.from_numpy(np.array(admission.prompt_embeds)).to(self.token_table.device)

    def pack(self, plan: StepPlan, shape: StepShape) -> Packed:
        """One vector with the step's rows and with every change of the tables."""
        query_start = np.concatenate((np.zeros(1, np.int32), shape.query_lens.cumsum(dtype=np.int32)))
        sample_slots = np.where(shape.samples, shape.slots, -1)
        parts: list[I32] = [shape.slots, shape.starts, query_start, sample_slots, shape.starts + shape.query_lens]
        parts += [plan.block_slots * self.max_blocks + plan.block_indices, plan.block_ids]
        if plan.admitted:
            parts.append(self.sampling.host_columns)
            parts += [admission.token_ids for admission in plan.admitted]
        sizes = [-(-len(part) // 2) * 2 for part in parts]  # even: the columns begin with 64-bit values
        values = np.zeros(sum(sizes), np.int32)
        offsets = [0, *np.cumsum(sizes)[:-1].tolist()]
        for part, offset in zip(parts, offsets, strict=True):
            values[offset : offset + len(part)] = part
        return Packed(values, tuple(offsets), tuple(len(part) for part in parts))

    def update(self, plan: StepPlan, views: list[Tensor]) -> None:
        """The device's half: `views` are the parts of `pack` on the device."""
        if len(plan.block_ids):
            self.block_table.view(-1).index_copy_(0, views[5].long(), views[6])
        if plan.admitted:
            self.sampling.device_columns.copy_(views[7])
            for admission, tokens in zip(plan.admitted, views[8:], strict=True):
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
        values: int32, the parts one after another, each at an even offset.
        offsets, lengths: of the parts.
    """

    values: I32
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    def split(self, device_values: Tensor) -> list[Tensor]:
        return [device_values[at : at + n] for at, n in zip(self.offsets, self.lengths, strict=True)]
