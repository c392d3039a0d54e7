"""Runs step plans on one device: slot state, one packed copy in, the model, sampling, one copy out; swaps beside it.

On CUDA `launch` queues the step's work and returns; `wait` waits for an event behind the copy of its tokens. On a CPU
`launch` only notes the plan and `wait` computes it, so that two steps in flight delay no token.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core import debug
from wavecore.engine_core.model import Decoder
from wavecore.engine_core.plan import F32, I32, OutOfMemory, PendingStep, RunnerInfo, StepPlan, StepResult
from wavecore.engine_core.row_extras import Extras, LogprobRows, pool, prompt_logprobs, to_row_logprobs
from wavecore.engine_core.slot_state import SlotState, Views
from wavecore.engine_core.step_copies import CopyIn, fetch
from wavecore.engine_core.step_shape import StepShape
from wavecore.engine_core.swap_stream import SwapStream
from wavecore.kernels import ops
from wavecore.kernels.batch import BatchBuffers, StepRows

Forward = tuple[Tensor, Extras]


class ModelRunner:
    """The runner of one device. Begins with no KV cache; `allocate` gives it one.

    Args:
        model: on its device.
        info: what the loader resolved so far.
        max_num_seqs, max_num_batched_tokens: bounds of a plan.
    """

    def __init__(self, model: Decoder, info: RunnerInfo, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.info = info
        self.model = model
        self.device = model.embedding.device
        self.state = SlotState(
            max_num_seqs, info.max_model_len, info.block_size, info.vocab_size, info.eos_token_ids, self.device
        )
        self.buffers = BatchBuffers.allocate(max_num_batched_tokens, max_num_seqs, self.state.max_blocks, self.device)
        self.copy_in = CopyIn(self.device)
        self.swaps = SwapStream(self.device)
        self.bucket_limits = None if self.device.type == "cpu" else (max_num_batched_tokens, max_num_seqs)
        self.pages = self.host_pages = torch.empty(0)

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """(Re)allocate the KV cache: blocks on the device, and pinned ones on the host to swap to."""
        spec, dtype = self.model.spec, self.model.embedding.dtype
        page = (spec.num_layers, 2, spec.num_kv_heads, self.info.block_size, spec.head_dim)
        self.pages = torch.empty(0)  # the old one goes before the new one comes
        self.pages = _zeros((num_blocks, *page), dtype, self.device)
        self.host_pages = torch.zeros((num_host_blocks, *page), dtype=dtype, pin_memory=self.device.type == "cuda")
        self.info = replace(self.info, num_blocks=num_blocks, num_host_blocks=num_host_blocks)
        if num_host_blocks:
            self.info = replace(self.info, swap_block_seconds=self._time_swap())

    @property
    def block_bytes(self) -> int:
        return self.model.spec.kv_values_per_token * self.info.block_size * self.model.embedding.dtype.itemsize

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises OutOfMemory where the device cannot hold the step."""
        if self.device.type == "cpu":
            return _Deferred(lambda: self.start(plan).wait())
        return self.start(plan)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> PendingStep:
        """Begin the plan's transfer, apply its events, run its rows, and begin to fetch what they produce."""
        with _out_of_memory(plan):
            self.swaps.join(plan.after)
            self.swaps.start(plan, self.pages, self.host_pages)
            shape = StepShape.of(plan, self.bucket_limits)
            self.state.admit(plan.admitted)
            packed = self.state.pack(plan, shape)
            views = packed.split(self.copy_in(packed.values))
            if len(plan.copies):  # on the step's own stream: its rows need them at once
                ops.copy_blocks(self.pages, views["copies"].long().view(-1, 2))
            self.state.update(plan, views)
            if not len(shape.slots):
                return _Launched(shape, torch.zeros((2, 0), dtype=torch.int32), Extras(), None, self.swaps)
            outcome, extras = self._forward(shape, views)
            return _Launched.fetching(shape, outcome, extras, self.swaps)

    def memory_stats(self) -> dict[str, int]:
        """Bytes by use."""
        weights = {t.data_ptr(): t.nbytes for t in self.model.tensors()}
        stats = {
            "weights_bytes": sum(weights.values()),
            "kv_cache_bytes": self.pages.nbytes,
            "host_kv_cache_bytes": self.host_pages.nbytes,
        }
        if self.device.type == "cuda":
            stats["allocated_bytes"] = torch.cuda.memory_allocated(self.device)
            stats["reserved_bytes"] = torch.cuda.memory_reserved(self.device)
        return stats

    @torch.inference_mode()
    def attention_map(self, prompt: list[int], layer: int, head: int) -> F32:
        """Attention weights [n, n] of one head over a prompt, computed apart from all running requests.

        Raises:
            ValidationError: no such layer, head or token, or a prompt too long to show.
        """
        return debug.attention_map(self.model, self.info, prompt, layer, head)

    def shutdown(self) -> None:
        """Nothing runs between calls."""

    def _forward(self, shape: StepShape, views: Views) -> Forward:
        """Tokens and faults as int32 [2, R] in device row order, and the extras by plan row."""
        state, model = self.state, self.model
        slots = views["slots"]
        rows = StepRows(
            slots=slots,
            starts=views["starts"],
            query_start=views["query_start"],
            num_tokens=shape.num_tokens,
            num_rows=len(shape.slots),
            num_decode_rows=shape.num_decode_rows,
            max_query_len=int(shape.query_lens.max()),
            max_seq_len=int((shape.starts + shape.query_lens).max()),
            bucket_tokens=shape.bucket_tokens,
        )
        with _range(self.device, "forward"):
            batch = ops.prepare_batch(rows, state.token_table, state.block_table, self.info.block_size, self.buffers)
            x = model.embed(batch.token_ids)
            if state.embeds:
                state.insert_embeds(x, shape)
            x, residual = model.forward(x, batch, self.pages)
        extras = Extras()
        prompt_logprobs(model, x, residual, shape, state, extras)
        pool(model, x, residual, shape, state, extras)
        if not shape.samples.any():  # nothing but parts of prompts
            return torch.stack((torch.full_like(slots, -1), torch.zeros_like(slots))), extras
        with _range(self.device, "sample"):
            last = batch.sample_index
            logits = model.logits(model.final(x[last], residual[last]))
            logprobs = LogprobRows(logits, views["logprob_rows"])
            sampling = state.sampling.rows(views["sample_slots"], views["positions"], shape.slots[shape.samples])
            tokens, faults = ops.sample(logits, sampling)
            logprobs.finish(tokens, shape, state, extras)
        return torch.stack((tokens, faults.int())), extras

    def _time_swap(self, rounds: int = 3) -> float:
        """Seconds to copy one block to the host: the best of a few, the first being slow."""
        best = 1e9
        for _ in range(rounds):
            begin = time.perf_counter()
            self.host_pages[0].copy_(self.pages[0])
            best = min(best, time.perf_counter() - begin)
        return best


@dataclass(slots=True)
class _Deferred:
    """A step that is computed when its result is asked for."""

    run: Callable[[], StepResult]

    def wait(self) -> StepResult:
        return self.run()


@dataclass(slots=True)
class _Launched:
    """A step whose tokens are on their way to the host.

    Attributes:
        outcome: int32 [2, R], tokens and faults in device row order, with padding.
        event: recorded behind the copies; None where there are none.
    """

    shape: StepShape
    outcome: Tensor
    extras: Extras
    event: torch.cuda.Event | None
    swaps: SwapStream

    @classmethod
    def fetching(cls, shape: StepShape, outcome: Tensor, extras: Extras, swaps: SwapStream) -> _Launched:
        host, extras = fetch(outcome), extras.map(fetch)
        event = None
        if outcome.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        return cls(shape, host, extras, event, swaps)

    def wait(self) -> StepResult:
        """The result in the plan's row order."""
        if self.event is not None:
            self.event.synchronize()
        order, extras = self.shape.order, self.extras
        tokens: I32 = np.empty(len(order), np.int32)
        faults = np.empty(len(order), np.uint8)
        tokens[order], faults[order] = self.outcome[:, : len(order)].numpy()
        pooled = {row: np.array(vector.numpy(), np.float32) for row, vector in extras.pooled.items()}
        for row, vector in pooled.items():
            faults[row] |= not np.isfinite(vector).all()
        return StepResult(
            tokens=tokens,
            faults=faults,
            logprobs=extras.row_logprobs(),
            prompt_logprobs={row: to_row_logprobs(triple) for row, triple in extras.prompt_logprobs.items()},
            pooled=pooled,
            transferred=self.swaps.poll(),
        )


def is_out_of_memory(error: Exception) -> bool:
    """torch reports a CPU's failed allocation as a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)


@contextmanager
def _out_of_memory(plan: StepPlan) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        line = (str(error).splitlines() or ["out of memory"])[0]
        raise OutOfMemory(
            f"a step of {plan.num_rows} rows and {plan.num_tokens} tokens does not fit: {line}"
        ) from error


@contextmanager
def _range(device: torch.device, name: str) -> Iterator[None]:
    """An NVTX range, for profilers."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU numpy's, whose memory the system hands out when it is first written, not all at once."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, f"i{dtype.itemsize}")).view(dtype)
    return torch.zeros(shape, dtype=dtype, device=device)
