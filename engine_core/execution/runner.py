"""Runs step plans on one device: one vector in, the model, sampling, one vector out; block copies and uploads beside.

On CUDA `launch` queues the step's work and returns, whatever the device does meanwhile; `wait` waits for an event
behind the copy of its tokens. On a CPU `launch` only notes the plan and `wait` computes it, so that two steps in flight
delay no token. Everything that the forward pass and sampling read and write between steps has one address for the
engine's life: captured graphs may keep it.
"""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace

import torch
from torch import Tensor

from wavecore.engine_core.execution.attention_map import attention_map
from wavecore.engine_core.execution.block_copies import BlockCopies
from wavecore.engine_core.execution.device_state import EDITS, EMBEDS, POOLS, PROMPT_LOGPROBS, TRUNCATES, DeviceState
from wavecore.engine_core.execution.out_of_memory import first_line, is_out_of_memory
from wavecore.engine_core.execution.pending_step import Deferred, Launched
from wavecore.engine_core.execution.pinned_copies import CopyOut, pinned_zeros, zeros
from wavecore.engine_core.execution.step_extras import Extras, room_for_extras
from wavecore.engine_core.execution.step_shape import StepShape
from wavecore.engine_core.models.decoder import Decoder
from wavecore.engine_core.plan import F32, OutOfMemory, PendingStep, RunnerInfo, StepPlan
from wavecore.kernels import ops
from wavecore.kernels.batch import Batch, BatchBuffers, StepRows
from wavecore.kernels.sampling.rows import SamplingRows


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
        self.state = DeviceState(max_num_seqs, info, self.device)
        self.buffers = BatchBuffers.allocate(max_num_batched_tokens, max_num_seqs, self.state.max_blocks, self.device)
        room = room_for_extras(max_num_batched_tokens, max_num_seqs, info.hidden_size)
        self.out = CopyOut(max_num_seqs, room, self.device)
        self.copies = BlockCopies(self.device, self.state.uploads)
        self.bucket_limits = None if self.device.type == "cpu" else (max_num_batched_tokens, max_num_seqs)
        self.kv_cache = self.host_kv_cache = torch.empty(0)

    def allocate(self, num_blocks: int) -> None:
        """(Re)allocate the KV cache on the device.

        Raises:
            torch.OutOfMemoryError, MemoryError, RuntimeError: there is no room for it.
        """
        dtype = self.model.embedding.dtype
        self.kv_cache = torch.empty(0)  # the old one goes before the new one comes
        self.kv_cache = zeros(num_blocks, *self._block_shape, dtype=dtype, device=self.device)
        self.info = replace(self.info, num_blocks=num_blocks)

    def allocate_swap_space(self, num_blocks: int) -> None:
        """(Re)allocate blocks on the host to swap to, pinned for a GPU; behind `allocate`, as a copy is timed.

        Raises:
            MemoryError, RuntimeError: the host has no room for them.
        """
        dtype = self.model.embedding.dtype
        self.host_kv_cache = torch.empty(0)
        if self.device.type == "cuda":
            self.host_kv_cache = pinned_zeros((num_blocks, *self._block_shape), dtype)
        else:
            self.host_kv_cache = zeros(num_blocks, *self._block_shape, dtype=dtype, device=self.device)
        self.info = replace(self.info, num_host_blocks=num_blocks)
        if num_blocks:
            self.info = replace(self.info, swap_block_seconds=self._time_swap())

    @property
    def _block_shape(self) -> tuple[int, int, int, int, int]:
        spec = self.model.spec
        return spec.num_layers, 2, spec.num_kv_heads, self.info.block_size, spec.head_dim

    @property
    def block_bytes(self) -> int:
        return self.model.spec.kv_values_per_token * self.info.block_size * self.model.embedding.dtype.itemsize

    def launch(self, plan: StepPlan) -> PendingStep:
        """Begin a step. Steps are waited for in launch order; at most two are in flight.

        Raises:
            OutOfMemory: the device cannot hold the step.
        """
        if self.device.type == "cpu":
            return Deferred(lambda: self.start(plan).wait())
        return self.start(plan)

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> Launched:
        """Begin the plan's block copies, apply its events, run its rows, and begin to fetch what they produce."""
        with self._out_of_memory(plan):
            self.copies.join(plan.after)
            self.copies.start(plan, self.kv_cache, self.host_kv_cache)
            shape = StepShape(plan, self.bucket_limits)
            self.state.begin(plan.new_requests)
            extras = Extras(shape, self.state, self.out)
            columns = self.state.sampling.host_columns
            self.state.apply(self.state.input.bring(shape, extras.logprob_rows, columns))
            self.copies.join_copies()
            if not plan.num_rows:
                return Launched(shape, None, extras, self.copies)
            self.out.clear()
            self._run(shape, extras)
            return Launched(shape, self.out.send(), extras, self.copies)

    def _run(self, shape: StepShape, extras: Extras) -> None:
        """Queue a step's rows."""
        options = extras.options
        with _range(self.device, "forward"):
            batch, x, residual = self.forward(self.rows(shape), shape if options & EMBEDS else None)
        if options & PROMPT_LOGPROBS:
            extras.report_prompts(self.model, x, residual)
        if options & POOLS:
            extras.pool(self.model, x, residual)
        if shape.num_samples:
            with _range(self.device, "sample"):
                logits = self.logits(batch, x, residual)
                rows = self.sampling_rows(shape, truncates=bool(options & TRUNCATES), edits=bool(options & EDITS))
                extras.draw(logits, rows, self.state.input.rows(shape.bucket_rows).logprob_rows)

    def rows(self, shape: StepShape) -> StepRows:
        """What `forward` reads of a step; the same tensors for all steps of a bucket."""
        views = self.state.input.rows(shape.bucket_rows)
        return StepRows(
            slots=views.slots,
            starts=views.starts,
            query_start=views.query_start,
            num_decode_rows=shape.num_decode_rows,
            max_query_len=shape.max_query_len,
            bucket_tokens=shape.bucket_tokens,
        )

    def sampling_rows(self, shape: StepShape, *, truncates: bool, edits: bool) -> SamplingRows:
        """What sampling reads of a step; likewise."""
        views = self.state.input.rows(shape.bucket_rows)
        return self.state.sampling.rows(views.sample_slots, views.positions, truncates=truncates, edits=edits)

    def forward(self, rows: StepRows, embeds_of: StepShape | None = None) -> tuple[Batch, Tensor, Tensor]:
        """Prepare the batch and run all layers over it.

        Args:
            embeds_of: the shape of a step where prompt embeddings stand in for tokens.

        Returns:
            The batch, and x and residual [T, hidden] as from `Decoder.forward`.
        """
        state, model = self.state, self.model
        batch = ops.prepare_batch(rows, state.token_table, state.block_table, self.info.block_size, self.buffers)
        x = model.embed(batch.token_ids)
        if embeds_of is not None:
            state.insert_embeds(x, embeds_of)
        return batch, *model.forward(x, batch, self.kv_cache)

    def logits(self, batch: Batch, x: Tensor, residual: Tensor) -> Tensor:
        """[R, vocab] at the last token of each row."""
        last = batch.sample_index
        return self.model.logits(self.model.final(x[last], residual[last]))

    def memory_stats(self) -> dict[str, int]:
        """Bytes by use: weights, KV cache, tables and vectors of steps and slots, pools of sampling options, the
        host's KV cache; on CUDA also what torch's allocator holds."""
        weights = {t.data_ptr(): t.nbytes for t in self.model.tensors()}
        buffers = [getattr(self.buffers, field.name) for field in fields(self.buffers)]
        stats = {
            "weights_bytes": sum(weights.values()),
            "kv_cache_bytes": self.kv_cache.nbytes,
            "host_kv_cache_bytes": self.host_kv_cache.nbytes,
            "tables_bytes": sum(t.nbytes for t in (*buffers, *self.state.tensors(), self.out.vector)),
            "sampling_bytes": sum(t.nbytes for t in self.state.sampling.tensors()),
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
        return attention_map(self.model, self.info, prompt, layer, head)

    def _time_swap(self) -> float:
        """Seconds to copy one block to the host: the best of three, the first being slow."""
        return min(timeit.repeat(lambda: self.host_kv_cache[0].copy_(self.kv_cache[0]), number=1, repeat=3))

    @contextmanager
    def _out_of_memory(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if self.device.type == "cuda":
                # The engine drops the steps in flight and gives their slots away: uploads, which wait for no step,
                # must find them done.
                torch.cuda.synchronize(self.device)
            raise OutOfMemory(
                f"a step of {plan.num_rows} rows and {plan.num_tokens} tokens does not fit: {first_line(error)}"
            ) from error


def _range(device: torch.device, name: str) -> AbstractContextManager[None]:
    """An NVTX range, for profilers."""
    return torch.cuda.nvtx.range(name) if device.type == "cuda" else nullcontext()
