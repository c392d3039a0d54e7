"""Sampling state of every slot, as the columns that `kernels.ops.sample` reads. Knows no step and no logits.

One flat int32 vector holds all fixed-size columns, on the host and on the device, so that an admission costs one copy.
Rare options (penalties, allowed tokens, bias, bad words) lie in pools that exist only while a slot asks for them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavecore.engine_core.plan import I32, Admission
from wavecore.engine_core.sampling_params import SamplingParams
from wavecore.engine_core.step_copies import upload as to_device
from wavecore.kernels.sampling_rows import SEEN_IN_PROMPT, SamplingRows

# Name, dtype, values a slot; the 64-bit column first, for its alignment.
COLUMNS: tuple[tuple[str, type[np.generic], int], ...] = (
    ("seed", np.int64, 1),
    ("temperature", np.float32, 1),
    ("top_k", np.int32, 1),
    ("top_p", np.float32, 1),
    ("min_p", np.float32, 1),
    ("choice", np.int32, 1),
    ("presence_penalty", np.float32, 1),
    ("frequency_penalty", np.float32, 1),
    ("repetition_penalty", np.float32, 1),
    ("count_row", np.int32, 1),
    ("allowed_row", np.int32, 1),
    ("bias_range", np.int32, 2),
    ("word_range", np.int32, 2),
)
TORCH: dict[type[np.generic], torch.dtype] = {np.int64: torch.int64, np.float32: torch.float32, np.int32: torch.int32}
FOREVER = (1 << 31) - 1


class SamplingState:
    """Parameters of every slot.

    Args:
        token_table: int32 [slots, max_len] on the device; `sample` appends to it.
        vocab_size: columns of the logits.
        eos_token_ids: banned, as stop_token_ids are, until min_tokens are out.
    """

    def __init__(self, token_table: Tensor, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.token_table = token_table
        self.device = token_table.device
        self.vocab_size = vocab_size
        self.eos = eos_token_ids
        slots = len(token_table)
        size = sum(width * np.dtype(kind).itemsize // 4 for _, kind, width in COLUMNS) * slots
        self.host_columns = np.zeros(size, np.int32)
        self.device_columns = torch.from_numpy(self.host_columns)
        if self.device.type != "cpu":
            self.device_columns = self.device_columns.to(self.device)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.on_device: dict[str, Tensor] = {}
        at = 0
        for name, kind, width in COLUMNS:
            end = at + width * slots * np.dtype(kind).itemsize // 4
            shape = (slots, width) if width > 1 else (slots,)
            self.host[name] = self.host_columns[at:end].view(kind).reshape(shape)
            self.on_device[name] = self.device_columns[at:end].view(TORCH[kind]).view(shape)
            at = end
        self.truncates = np.zeros(slots, np.bool_)
        self.edits = np.zeros(slots, np.bool_)
        self.counts = RowPool(vocab_size, self.device)
        self.allowed = RowPool(-(-vocab_size // 32), self.device)
        self.biases: dict[int, list[tuple[int, float, int]]] = {}
        self.words: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.lists = self._upload_lists()

    def admit(self, admissions: tuple[Admission, ...]) -> None:
        """Take over the parameters of slots that begin; the caller then copies `host_columns` to the device."""
        lists_changed = False
        for admission in admissions:
            slot, params, host = admission.slot, admission.params, self.host
            host["seed"][slot] = params.seed or 0
            host["temperature"][slot] = params.temperature
            host["top_k"][slot] = max(params.top_k, 0) if params.top_k < self.vocab_size else 0
            host["top_p"][slot] = params.top_p
            host["min_p"][slot] = params.min_p
            host["choice"][slot] = admission.choice
            for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
                host[name][slot] = getattr(params, name)
            truncated = host["top_k"][slot] > 0 or params.top_p < 1 or params.min_p > 0
            self.truncates[slot] = params.temperature > 0 and truncated
            host["count_row"][slot] = self.counts.put(slot, self._count(admission))
            host["allowed_row"][slot] = self.allowed.put(slot, self._allow(params))
            lists_changed |= self._set_lists(admission)
        if lists_changed:
            self.lists = self._upload_lists()

    def rows(self, slots: Tensor, positions: Tensor, host_slots: I32) -> SamplingRows:
        """What `sample` reads for one step.

        Args:
            slots, positions: int32 [R] on the device; see `SamplingRows`.
            host_slots: the slots that sample, on the host.
        """
        return SamplingRows(
            slots=slots,
            positions=positions,
            token_ids=self.token_table,
            counts=self.counts.rows,
            allowed=self.allowed.rows,
            truncates=bool(self.truncates[host_slots].any()),
            edits=bool(self.edits[host_slots].any()),
            **self.on_device,
            **self.lists,
        )

    def _count(self, admission: Admission) -> I32 | None:
        params = admission.params
        if not params.presence_penalty and not params.frequency_penalty and params.repetition_penalty == 1:
            return None
        counts = np.bincount(admission.token_ids[admission.num_prompt :], minlength=self.vocab_size).astype(np.int32)
        if admission.prompt_embeds is None:  # else the ids are placeholders
            counts[admission.token_ids[: admission.num_prompt]] |= SEEN_IN_PROMPT
        return counts

    def _allow(self, params: SamplingParams) -> I32 | None:
        if params.allowed_token_ids is None:
            return None
        bits = np.zeros(self.allowed.width * 32, np.uint8)
        bits[list(params.allowed_token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

    def _set_lists(self, admission: Admission) -> bool:
        """Note the slot's bias and bad words; True if any list changed."""
        slot, params = admission.slot, admission.params
        had = self.biases.pop(slot, None), self.words.pop(slot, None)
        entries = [(token, value, FOREVER) for token, value in (params.logit_bias or {}).items()]
        if params.min_tokens:
            until = admission.num_prompt + params.min_tokens
            stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos)}
            entries += [(token, -math.inf, until) for token in sorted(stops)]
        words = tuple(tuple(word) for word in params.bad_words_token_ids or () if word)
        if entries:
            self.biases[slot] = entries
        if words:
            self.words[slot] = words
        self.edits[slot] = bool(entries or words)
        return any(had) or bool(entries or words)

    def _upload_lists(self) -> dict[str, Tensor]:
        entries: list[tuple[int, float, int]] = []
        word_start, word_tokens = [0], list[int]()
        self.host["bias_range"].fill(0)
        self.host["word_range"].fill(0)
        for slot, biases in self.biases.items():
            self.host["bias_range"][slot] = len(entries), len(entries) + len(biases)
            entries += biases
        for slot, words in self.words.items():
            self.host["word_range"][slot] = len(word_start) - 1, len(word_start) - 1 + len(words)
            for word in words:
                word_tokens += word
                word_start.append(len(word_tokens))
        ids, values, until = zip(*entries, strict=True) if entries else ((), (), ())

        def upload(items: Any, dtype: type[np.generic]) -> Tensor:
            return to_device(np.array(items or [0], dtype), self.device)

        return {
            "bias_ids": upload(ids, np.int32),
            "bias_values": upload(values, np.float32),
            "bias_until": upload(until, np.int32),
            "word_start": upload(word_start, np.int32),
            "word_tokens": upload(word_tokens, np.int32),
        }


class RowPool:
    """Rows of one width on a device, one for each slot that needs one; grows by doubling, never shrinks.

    Attributes:
        rows: int32 [n, width].
    """

    def __init__(self, width: int, device: torch.device) -> None:
        self.width = width
        self.rows = torch.zeros((1, width), dtype=torch.int32, device=device)
        self._owned: dict[int, int] = {}
        self._free = [0]

    def put(self, slot: int, values: I32 | None) -> int:
        """Give the slot a row with these values, or take its row away for None; returns the row or -1."""
        if values is None:
            if slot in self._owned:
                self._free.append(self._owned.pop(slot))
            return -1
        if slot not in self._owned:
            if not self._free:
                count = len(self.rows)
                self.rows = torch.cat((self.rows, torch.zeros_like(self.rows)))
                self._free.extend(range(count, 2 * count))
            self._owned[slot] = self._free.pop()
        self.rows[self._owned[slot]] = to_device(values, self.rows.device)
        return self._owned[slot]
