"""What the scheduler tells a runner about one step, and what comes back. Columns, one entry a row.

A *slot* is one of `max_num_seqs` fixed places for a running request; a *row* is a slot's share of one step.
The runner keeps the token ids, the block table and the sampling parameters of each slot; a plan carries only what
changed (`new_requests`, `table`, `copies`) and which rows run. The input of a row is always
`token_ids[slot, start : start + query_len]`: a sampled token is written at `token_ids[slot, start + query_len]` on
the device before the next step reads it, so it never passes through the CPU to feed that step.

A plan is numpy, without torch. A steady step reaches the device in one copy; where a request begins, its sampling
parameters are a second one, and its tokens and rare options are uploaded (`step_input`, `uploads`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.sampling_params import MAX_LOGPROBS, SamplingParams
from wavecore.transport.errors import WavecoreError

I32 = npt.NDArray[np.int32]
U8 = npt.NDArray[np.uint8]
F32 = npt.NDArray[np.float32]
Flags = npt.NDArray[np.bool_]
Index = npt.NDArray[np.intp]  # slots or rows, as numpy indexes columns by them

UPDATE_SECONDS = 600.0  # that a rank takes at most to load new weights, unless its disk is very slow
LOGPROB_CHUNK = 64  # positions whose log-probabilities over the vocabulary a runner holds at once
MANY_VALUES = 1 << 21  # int32 values of a step's output that positions with more than MAX_LOGPROBS alternatives share


def report_values(count: int | None) -> int:
    """int32 values that a position with so many alternatives takes of what such positions share; 0 for a few, for which
    each token of a step has room of its own."""
    return 2 * (1 + count) + 1 if count is not None and count > MAX_LOGPROBS else 0


def room_for_many(info: RunnerInfo) -> int:
    """int32 values of a step's output that such positions share: one of a prompt and a drawn token fit, at least."""
    return 0 if 0 <= info.max_logprobs <= MAX_LOGPROBS else max(MANY_VALUES, 2 * report_values(info.vocab_size))


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request takes a slot (first time, or again after a preemption).

    Attributes:
        token_ids: int32 [n], prompt and, after a preemption, the tokens emitted so far.
        num_prompt: how many of them are the prompt.
        params: sampling parameters; `params.seed` is always resolved to a number by now.
        choice: index of this sequence among the request's `n` choices, part of the random key.
        prompt_embeds: float32 [num_prompt, hidden] that stand in for the prompt's token embeddings, or None.
        pooling: "mean" or "last" for an embedding request, "" for generation.
    """

    slot: int
    token_ids: I32
    num_prompt: int
    params: SamplingParams
    choice: int = 0
    prompt_embeds: F32 | None = None
    pooling: str = ""


def int_table(entries: Sequence[tuple[int, ...]], width: int) -> I32:
    """As int32 [n, width]."""
    return np.array(entries, np.int32) if entries else np.zeros((0, width), np.int32)


TABLES = {"swap_out": 2, "swap_in": 2, "copies": 2, "table": 3}
"""Of a plan, with their columns."""


def _no_pairs() -> I32:
    return int_table((), 2)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Copies, new requests and block table are applied, in this order, then the rows run.

    Rows with one query token come first: that is the order in which the device computes them.

    The swaps are a *transfer* beside the steps: first those out, then those in. It begins when the rows of all earlier
    plans are done, and transfers follow one another. Rows may run before it is done, except those of plans that name
    it in `after`.

    Attributes:
        step_id: counts up by one a step.
        slots: intp [rows], no slot twice.
        starts, query_lens: int32 [rows]: the position of the row's first query token, and how many tokens it computes.
        samples: bool [rows]: the last query position yields a token.
        swap_out, swap_in: int32 [n, 2] of (gpu block, host block) and (host block, gpu block).
        copies: int32 [n, 2] of (source block, destination block) on the device.
        table: int32 [n, 3] of (slot, index, block id): what changes in the block table.
        after: copies and rows run behind the transfers of all plans up to this earlier step id; -1 behind none.
        captures: no rows; a part of steps without a CUDA graph gets one, or a size or kind of step that did not run
            yet runs. No other step is in flight.
        num_tokens: of all rows.
        is_dummy: all rows have slot -1: the step runs in the kernels of any other of its size, and changes nothing.
    """

    step_id: int
    slots: Index
    starts: I32
    query_lens: I32
    samples: Flags
    new_requests: tuple[NewRequest, ...] = ()
    swap_out: I32 = field(default_factory=_no_pairs)
    swap_in: I32 = field(default_factory=_no_pairs)
    copies: I32 = field(default_factory=_no_pairs)
    table: I32 = field(default_factory=lambda: int_table((), 3))
    after: int = -1
    captures: bool = False
    num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", int(self.query_lens.sum()))

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def is_dummy(self) -> bool:
        return self.num_rows > 0 and self.slots[0] < 0

    @classmethod
    def empty(cls) -> StepPlan:
        """A step of no plan, which changes nothing."""
        none = np.zeros(0, np.int32)
        return cls(-1, none.astype(np.intp), none, none, none.astype(np.bool_))

    @property
    def ends(self) -> I32:
        """int32 [rows]: the position behind the row's last query token."""
        return self.starts + self.query_lens


class LeastSize(NamedTuple):
    """The least size of a step, where ranks in lockstep run steps of one size: no number in it is 0.

    Attributes:
        eager: no rank runs it from CUDA graphs.
    """

    rows: int
    tokens: int
    max_query_len: int
    eager: bool = False


class RowLogprobs(NamedTuple):
    """Raw model log-probabilities (log-softmax before any processor) of one row, for one or more positions.

    Attributes:
        token_ids: int32 [positions, 1 + k]: the chosen token, then the k most likely.
        logprobs: float32 [positions, 1 + k].
        ranks: int32 [positions]: rank of the chosen token in the whole vocabulary, from 1.
    """

    token_ids: I32
    logprobs: F32
    ranks: I32


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step produced, in the plan's row order.

    Attributes:
        tokens: int32 [rows], -1 where the row does not sample.
        faults: uint8 [rows], 1 where the row's logits held NaN or +infinity, or nothing but -infinity.
        logprobs, prompt_logprobs: by row, of those whose request wants them.
        pooled: float32 [hidden] by row: the embedding of a row that finished a pooling request.
        transferred: the transfers of all plans up to this step id are done; -1 none yet.
    """

    tokens: I32
    faults: U8
    logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[int, RowLogprobs] = field(default_factory=dict)
    pooled: Mapping[int, F32] = field(default_factory=dict)
    transferred: int = -1


class PendingStep(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the CPU. Called once, in launch order."""


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """What a runner resolved while it loaded the model.

    Attributes:
        num_blocks: device KV blocks, block 0 (the null block) included.
        num_host_blocks: host KV blocks for swapping, 0 without swap space.
        block_size: tokens a block.
        max_model_len: longest sequence, prompt and output.
        vocab_size: rows of the LM head; every token id is below it.
        hidden_size: values of an embedding.
        eos_token_ids: all tokens that end a text, as the model's files and its tokenizer's say.
        dtype, device: torch's names of them, "bfloat16" and "cuda:0".
        swap_block_seconds: measured time to copy one KV block to the host, or back.
        token_seconds: rather more than computing a prompt token takes, before any step was measured; 0 for very little.
        max_logprobs: most alternatives that a request may ask for, -1 for the whole vocabulary.
        model_path: the local folder or file that holds the model, "" for a scripted one.
    """

    num_blocks: int
    num_host_blocks: int
    block_size: int
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    model_path: str = ""
    swap_block_seconds: float = 0.0
    token_seconds: float = 0.0
    max_logprobs: int = MAX_LOGPROBS


class Runner(Protocol):
    """Runs plans on one device. `execution.runner` runs real models, `scripts/scripted_runner.py` a scripted one."""

    info: RunnerInfo

    def launch(self, plan: StepPlan | None, least: LeastSize | None = None) -> PendingStep:
        """Start a step; return without waiting for the device.

        Args:
            least: of a step in lockstep: there is a forward pass even without a plan or its rows, and on a device that
                pads steps it is padded to this size at least. Without rows it writes no block.
        """

    def is_eager(self, plan: StepPlan) -> bool:
        """Whether a row of this plan wants what no CUDA graph yields. All plans before it are launched."""

    def wants_capture(self, uses: int) -> bool:
        """Some part of steps has no CUDA graph, could have one, and ran so often: a plan may say `captures`. For `uses`
        of 1, as in idle turns, also where a size of steps did not run yet."""

    def memory_stats(self) -> dict[str, int]:
        """Bytes by use: weights_bytes, kv_cache_bytes, ...; of the device that holds most."""

    def attention_map(self, prompt: list[int], layer: int, head: int) -> F32:
        """Attention weights float32 [n, n] of one head, computed beside the KV cache.

        Raises:
            ValidationError: layer, head or a token id out of range.
            NotSupportedError: this runner has no attention.
            ResourceError: a device has no memory for it.
        """

    def check_weights(self, folder: str) -> None:
        """See whether `update_weights` will do.

        Raises:
            ModelError: unreadable, or a tensor is missing, unknown or of another shape.
            NotSupportedError: this runner has no weights.
        """

    def update_weights(self, folder: str) -> None:
        """Copy other weights over those of the model, on all its ranks. No step is in flight.

        Args:
            folder: of safetensors files with the names and shapes of the model's own.

        Raises:
            Exception: whatever kept it from being done; the weights may be half loaded then.
        """

    def profile(self, on: bool) -> None:
        """Start tracing, or stop it.

        Raises:
            NotSupportedError: this runner, or its settings, cannot.
            ValidationError: it is running already, or is not.
        """


class OutOfMemory(WavecoreError):
    """A step did not fit into memory, in `launch` or in `wait`; others may. The runner then has dropped every step that
    was launched and not waited for: nobody will wait for them, and all requests come back as new ones."""

    code = "resource"
