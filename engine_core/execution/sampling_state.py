"""The sampling parameters of every slot, as the columns that sampling reads.

Everything has one address for the engine's life, so that a captured graph reads what requests that came later asked
for, and a request that ends leaves nothing behind. One flat int32 vector holds all columns of fixed size, on the host
and on the device, so that new requests cost one copy. What rare options need besides lies in pools with a row for
each slot, as large as `SamplingParams` allows:

    counts (penalties)           4 bytes a vocabulary entry     0.6 MB a slot at 151,936 entries, over all ranks
    allowed tokens               1 bit a vocabulary entry       19 KB
    bias, and bans of min_tokens 12 bytes an entry              14 KB
    bad words                    4 bytes a token and a word     66 KB

A row for each slot costs what the keys and values of five or six tokens do (Qwen3-0.6B and 8B: 0.11 and 0.15 MB a
token), and a slot that is used holds hundreds. Fewer rows would need a rule for who waits for one, or a way to grow
that graphs and the memory measured at the start survive; less memory than one in a hundred of the KV cache buys none of
that.
"""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from wavecore.engine_core.api.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKENS,
    SamplingParams,
)
from wavecore.engine_core.execution.pinned_copies import zeros
from wavecore.engine_core.execution.uploads import Uploads
from wavecore.engine_core.plan import NewRequest
from wavecore.kernels.sampling.rows import NO_LIMIT, SEEN_IN_PROMPT, SamplingRows

# Parameters that are brought as they are, by the names of SamplingParams.
PLAIN = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
# Name, dtype, values a slot; the 64-bit column first, for its alignment.
COLUMNS: tuple[tuple[str, type[np.generic], int], ...] = (
    ("seed", np.int64, 1),
    *((name, np.float32, 1) for name in PLAIN),
    *((name, np.int32, 1) for name in ("top_k", "choice", "count_row", "allowed_row")),
    *((name, np.int32, 2) for name in ("bias_range", "word_range")),
)
TORCH: dict[type[np.generic], torch.dtype] = {np.int64: torch.int64, np.float32: torch.float32, np.int32: torch.int32}
COLUMN_SIZE = sum(width * np.dtype(kind).itemsize // 4 for _, kind, width in COLUMNS)  # int32 values a slot
WORDS = 2 * MAX_BAD_WORDS  # with and without a space before them


class SamplingState:
    """Parameters of every slot.

    Args:
        token_table: int32 [max_num_seqs, max_len] on the device; `finish` appends to it.
        vocab_size: tokens that there are.
        own: vocabulary ids of this rank's columns of the logits.
        eos_token_ids: banned, as stop_token_ids are, until min_tokens are out.
        columns: int32 [max_num_seqs * COLUMN_SIZE] on the device, where the caller copies `host_columns` to.
    """

    def __init__(
        self,
        token_table: Tensor,
        vocab_size: int,
        own: range,
        eos_token_ids: tuple[int, ...],
        columns: Tensor,
        uploads: Uploads,
    ) -> None:
        self.token_table = token_table
        self.vocab_size, self.own = vocab_size, own
        self.eos = eos_token_ids
        self.uploads = uploads
        self.host_columns = columns.numpy() if columns.is_cpu else np.zeros(len(columns), np.int32)
        self.host: dict[str, npt.NDArray[Any]] = {}
        self.on_device: dict[str, Tensor] = {}
        seqs, device = len(token_table), token_table.device
        at = 0
        for name, kind, width in COLUMNS:
            end = at + width * seqs * np.dtype(kind).itemsize // 4
            shape = (seqs, width) if width > 1 else (seqs,)
            self.host[name] = self.host_columns[at:end].view(kind).reshape(shape)
            self.on_device[name] = columns[at:end].view(TORCH[kind]).view(shape)
            at = end
        self.biases = MAX_LOGIT_BIAS + MAX_STOP_TOKENS + len(eos_token_ids)  # at most, of one slot
        self.pools = {
            "counts": zeros(seqs, (len(own) // 16 + 1) * 16, device=device),  # one more, and aligned
            "allowed": zeros(seqs, -(-len(own) // 32), device=device),
            "bias_ids": zeros(seqs * self.biases, device=device),
            "bias_values": zeros(seqs * self.biases, dtype=torch.float32, device=device),
            "bias_until": zeros(seqs * self.biases, device=device),
            "word_start": zeros(seqs * (WORDS + 1), device=device),
            "word_tokens": zeros(seqs * MAX_BAD_WORD_TOKENS, device=device),
        }
        self._rows = {name: pool.view(seqs, -1) for name, pool in self.pools.items()}

    def tensors(self) -> Iterator[Tensor]:
        """The pools; table and columns belong to others."""
        yield from self.pools.values()

    def begin(self, new: NewRequest) -> tuple[bool, bool]:
        """Take over the parameters of a slot that begins, and have `uploads` write its rows of the pools.

        Returns: whether it may use truncation, and bias or bad words; see `SamplingRows`.
        """
        slot, params, host = new.slot, new.params, self.host
        host["seed"][slot] = params.seed or 0
        host["top_k"][slot] = max(params.top_k, 0) if params.top_k < self.vocab_size else 0
        host["choice"][slot] = new.choice
        for name in PLAIN:
            host[name][slot] = getattr(params, name)
        host["count_row"][slot] = slot if _penalises(params) else -1
        host["allowed_row"][slot] = self._allow(slot, params)
        edits = self._put_biases(new) + self._put_words(slot, params) > 0
        return params.temperature > 0 and (host["top_k"][slot] > 0 or params.top_p < 1 or params.min_p > 0), edits

    def count(self, new: NewRequest) -> None:
        """Count the tokens of a slot with penalties, once its row of the token table is there."""
        if not _penalises(new.params):
            return
        own, ids = self.own, self.token_table[new.slot, : len(new.token_ids)].long()
        if len(own) < self.vocab_size:  # the column behind the last one is for what other ranks have
            ids -= own.start
            ids = ids.where((ids >= 0) & (ids < len(own)), len(own))
        prompt, output = ids[: new.num_prompt], ids[new.num_prompt :]
        counts = self.pools["counts"][new.slot].zero_()
        if new.prompt_embeds is None:  # else the ids are placeholders
            counts.index_fill_(0, prompt, SEEN_IN_PROMPT)
        counts.index_add_(0, output, torch.ones_like(output, dtype=counts.dtype))

    def rows(self, truncates: bool, edits: bool, **of_step: Tensor) -> SamplingRows:
        """What sampling reads and writes in one step; see `SamplingRows`.

        Args:
            of_step: slots, positions, tokens, faults.
        """
        return SamplingRows(
            token_ids=self.token_table,
            truncates=truncates,
            edits=edits,
            **of_step,
            first=self.own.start,
            **self.on_device,
            **{**self.pools, "counts": self.pools["counts"][:, : len(self.own)]},
        )

    def _allow(self, slot: int, params: SamplingParams) -> int:
        if params.allowed_token_ids is None:
            return -1
        bits = np.zeros(self.pools["allowed"].shape[1] * 32, np.uint8)
        columns = np.array(params.allowed_token_ids) - self.own.start
        bits[columns[(columns >= 0) & (columns < len(self.own))]] = 1
        self._put("allowed", slot, np.packbits(bits, bitorder="little").view(np.int32))
        return slot

    def _put_biases(self, new: NewRequest) -> int:
        """Write the slot's biases and bans; how many there are."""
        slot, params = new.slot, new.params
        entries = [(token, value, NO_LIMIT) for token, value in (params.logit_bias or {}).items()]
        if params.min_tokens:
            until = new.num_prompt + params.min_tokens
            stops = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self.eos)}
            entries += [(token, -math.inf, until) for token in sorted(stops)]
        begin = slot * self.biases
        self.host["bias_range"][slot] = begin, begin + len(entries)
        if entries:
            ids, values, until_ = zip(*entries, strict=True)
            self._put("bias_ids", slot, np.array(ids, np.int32))
            self._put("bias_values", slot, np.array(values, np.float32))
            self._put("bias_until", slot, np.array(until_, np.int32))
        return len(entries)

    def _put_words(self, slot: int, params: SamplingParams) -> int:
        """Write the slot's bad words; how many there are."""
        words = [word for word in params.bad_words_token_ids or () if word]
        begin, tokens = slot * (WORDS + 1), slot * MAX_BAD_WORD_TOKENS
        self.host["word_range"][slot] = begin, begin + len(words)
        if words:
            starts = np.cumsum([tokens, *map(len, words)])
            self._put("word_start", slot, starts.astype(np.int32))
            self._put("word_tokens", slot, np.concatenate(words).astype(np.int32))
        return len(words)

    def _put(self, pool: str, slot: int, values: npt.NDArray[Any]) -> None:
        self.uploads.write_row(self._rows[pool], slot, values)


def _penalises(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
