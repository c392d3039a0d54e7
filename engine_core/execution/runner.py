"""Runs step plans on one device: one vector in, the model, sampling, one vector out; block copies and uploads beside.

On CUDA `launch` queues the step's work and returns, whatever the device does meanwhile; `wait` waits for an event
behind the copy of its tokens. On a CPU `launch` only notes the plan and `wait` computes it, so that two steps in flight
delay no token.

The rows of a step run in two parts, each from a CUDA graph where there is one (`graphs`): `forward`, from the tables to
the hidden state of each row's last token, and `sample`, from there to the tokens. Each is a function of its arguments
alone; all else that it reads and writes has one address for the engine's life. So between the two the host may still
bring what sampling needs. Rows that want what no graph yields make their part run as it is called.
"""

import timeit
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.execution.block_copies import BlockCopies
from wavecore.engine_core.execution.device_state import EDITS, EMBEDS, POOLS, PROMPT_LOGPROBS, TRUNCATES, DeviceState
from wavecore.engine_core.execution.graphs import Part, StepGraphs
from wavecore.engine_core.execution.inspection import Profiler, attention_map
from wavecore.engine_core.execution.out_of_memory import first_line, is_out_of_memory
from wavecore.engine_core.execution.pending_step import Deferred, Launched
from wavecore.engine_core.execution.pinned_copies import CopyOut, pinned_zeros, zeros
from wavecore.engine_core.execution.step_extras import NO_ROWS, Extras, room_for_extras
from wavecore.engine_core.execution.step_shape import Bucket, Buckets, StepShape
from wavecore.engine_core.models.decoder import Decoder
from wavecore.engine_core.models.shard import Shard
from wavecore.engine_core.models.weights import open_folder, refill
from wavecore.engine_core.plan import F32, LeastSize, OutOfMemory, PendingStep, RunnerInfo, StepPlan
from wavecore.kernels import ops
from wavecore.kernels.batch import BatchBuffers, StepRows
from wavecore.kernels.sampling.rows import SamplingRows
from wavecore.parallel.collectives import Collective
from wavecore.parallel.sampler import collectives, sample
from wavecore.transport.errors import NotSupportedError, ResourceError

PAID = "the other ranks wait for nothing"
EAGER = EMBEDS | PROMPT_LOGPROBS | POOLS  # what no graph of `forward` yields


class ModelRunner:
    """The runner of one device. Begins with no KV cache; `allocate` gives it one.

    Args:
        model: on its device.
        info: what the loader resolved so far.
        max_num_seqs, max_num_batched_tokens: bounds of a plan.
        sizes: of steps; see `Buckets`.
        shard: this rank's share; None is all of the model.

    Attributes:
        hidden: [max_num_seqs, hidden]; `forward` writes the normalised hidden state of each row's last token.
        buckets: of steps; None pads nothing.
        unmet: sizes and rare steps that have not run, and will in idle turns.
        marks: whether profilers see the parts of a step, as NVTX ranges.
    """

    def __init__(
        self,
        model: Decoder,
        info: RunnerInfo,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        sizes: Sequence[int] | None = None,
        shard: Shard | None = None,
    ) -> None:
        self.info = info
        self.model = model
        self.shard = shard or Shard(model.spec)
        self.device = model.embedding.device
        self.state = DeviceState(max_num_seqs, info, self.device, model.columns)
        self.buffers = BatchBuffers.allocate(max_num_batched_tokens, max_num_seqs, self.state.max_blocks, self.device)
        room = room_for_extras(max_num_batched_tokens, max_num_seqs, info)
        self.out = CopyOut(max_num_seqs, room, self.device)
        self.copies = BlockCopies(self.device, self.state.uploads)
        self.hidden = zeros(max_num_seqs, info.hidden_size, dtype=model.embedding.dtype, device=self.device)
        self.graphs = StepGraphs(self.device)
        self.buckets = None if self.device.type == "cpu" else Buckets(max_num_batched_tokens, max_num_seqs, sizes)
        self.unmet: deque[Bucket | StepPlan] = deque()
        self.marks = False
        self.kv_cache = self.host_kv_cache = torch.empty(0)
        self.profiler = Profiler(self.device, None)

    def allocate(self, num_blocks: int) -> None:
        """(Re)allocate the KV cache on the device. Graphs are captured anew.

        Raises:
            torch.OutOfMemoryError, MemoryError, RuntimeError: there is no room for it.
        """
        dtype = self.model.embedding.dtype
        self.graphs.clear()
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

    def launch(self, plan: StepPlan | None, least: LeastSize | None = None) -> PendingStep:
        """Begin a step, see `plan.Runner`. Steps are waited for in launch order; at most two are in flight.

        Raises:
            OutOfMemory: the device cannot hold the step.
        """
        found = StepPlan.empty() if plan is None else plan
        if self.device.type == "cpu":
            return Deferred(lambda: self.start(found, least).wait())
        return self.start(found, least)

    @torch.inference_mode()
    def start(self, plan: StepPlan, least: LeastSize | None = None) -> Launched:
        """Begin the plan's block copies, apply its events, run its rows, and begin to fetch what they produce."""
        with self._out_of_memory(plan):
            if plan.captures and self.unmet and not self.graphs.wanted(1):
                self.meet()
            self.copies.join(plan.after)
            self.copies.start(plan, self.kv_cache, self.host_kv_cache)
            shape = StepShape(plan, self.buckets, least, self.model.exchange.size > 1)
            state, eager = self.state, least is not None and least.eager
            state.begin(plan.new_requests)
            extras = Extras(shape, state, self.out)
            more_changes = state.input.bring(shape, extras.logprob_rows, state.sampling.host_columns)
            if more_changes is not None:
                ops.update_block_table(state.block_table, more_changes)
            self.copies.join_copies()
            if plan.captures:
                self.graphs.capture(self.model.least, self.forward if self.model.exchange.size > 1 else None)
            if not shape.bucket.rows:
                ops.update_block_table(state.block_table, state.input.changes)
                return Launched(shape, None, extras, self.copies)
            self.out.clear()
            with self._paying(lambda: self._of_forward(shape, extras) + self._of_sample(shape, extras)):
                with self._marked("forward"):
                    self._forward(shape, extras, eager)
                if shape.num_samples:
                    with self._marked("sample"):
                        self._sample(shape, extras)
            return Launched(shape, self.out.send(), extras, self.copies)

    def _forward(self, shape: StepShape, extras: Extras, eager: bool) -> None:
        """Queue a step's first part."""
        options = extras.options
        if shape.has_graph and not (eager or options & EAGER):
            self.graphs.run(self.forward, shape.bucket)
            return
        x, residual = self.forward(shape.bucket, shape if options & EMBEDS else None)
        if options & PROMPT_LOGPROBS:
            extras.report_prompts(self.model, x, residual)
        if options & POOLS:
            extras.pool(self.model, x, residual)

    def _of_forward(self, shape: StepShape, extras: Extras) -> list[Collective]:
        """What a step's first part does with other ranks."""
        model = self.model
        owed = model.sums(shape.bucket.tokens)
        for rows in extras.prompt_logits(padded=self.device.type == "cuda"):
            owed += model.gather(rows)
        return owed

    def _of_sample(self, shape: StepShape, extras: Extras) -> list[Collective]:
        """What a step's second part does with other ranks."""
        model, owed = self.model, list[Collective]()
        for part, reported in extras.chunks(shape.bucket.rows) if shape.num_samples else ():
            if reported.stop > reported.start:
                owed += model.gather(reported.stop - reported.start)
            owed += collectives(part.stop - part.start, len(model.columns), bool(extras.options & TRUNCATES))
        return owed

    @contextmanager
    def _paying(self, collectives_of: Callable[[], list[Collective]]) -> Iterator[None]:
        """If memory runs out, still do with the other ranks what they wait for: the rest of these.

        Raises:
            ResourceError: memory ran out, and other engines compute with what this rank should have computed.
        """
        group = self.model.group
        calls = group.calls
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            if self.model.exchange.size > 1 and is_out_of_memory(error):
                raise ResourceError(f"no memory for a step that engines share: {first_line(error)}") from error
            if group.size > 1 and is_out_of_memory(error):
                for name, size, dtype in collectives_of()[group.calls - calls :]:
                    getattr(group, name)(torch.zeros(size, dtype=dtype, device=self.device))
                error.add_note(PAID)
            raise

    def _sample(self, shape: StepShape, extras: Extras) -> None:
        """Queue a step's second part."""
        rows, options = shape.bucket.rows, extras.options
        truncates, edits = bool(options & TRUNCATES), bool(options & EDITS)
        if len(extras.logprob_rows):
            sampled, reported = self.sampling_rows(rows, truncates, edits), self.state.input.rows(rows).logprob_rows
            extras.draw(self.model, self.hidden[:rows], sampled, reported)
        elif shape.has_graph:
            self.graphs.run(self.sample, rows, truncates, edits)
        else:
            self.sample(rows, truncates, edits)

    def forward(self, bucket: Bucket, embeds_of: StepShape | None = None) -> tuple[Tensor, Tensor]:
        """Change the block table, prepare the batch, run all layers over it, and write the hidden state of its rows.

        Args:
            embeds_of: the shape of a step where prompt embeddings stand in for tokens.

        Returns:
            x and residual [T, hidden] as from `Decoder.forward`.
        """
        state, model, views = self.state, self.model, self.state.input.rows(bucket.rows)
        sizes = bucket.num_decode_rows, bucket.max_query_len, bucket.tokens
        rows = StepRows(views.slots, views.starts, views.query_start, *sizes)
        ops.update_block_table(state.block_table, state.input.changes)
        batch = ops.prepare_batch(rows, state.token_table, state.block_table, self.info.block_size, self.buffers)
        x = model.embed(batch.token_ids)
        if embeds_of is not None:
            state.insert_embeds(x, embeds_of)
        x, residual = model.forward(x, batch, self.kv_cache)
        model.final_at(batch.sample_index, x, residual, self.hidden[: bucket.rows])
        return x, residual

    def sample(self, rows: int, truncates: bool, edits: bool) -> None:
        """Draw a token of each of so many rows, from the hidden states that `forward` left."""
        model, sampled = self.model, self.sampling_rows(rows, truncates, edits)
        sample(model.own_logits(self.hidden[:rows]), sampled, model.spec.vocab_size, model.group)

    def sampling_rows(self, rows: int, truncates: bool, edits: bool) -> SamplingRows:
        """What sampling reads and writes of a step of so many rows; the same tensors for each."""
        views = self.state.input.rows(rows)
        written = {"tokens": self.out.tokens[:rows], "faults": self.out.faults[:rows]}
        read = {"slots": views.sample_slots, "positions": views.positions}
        return self.state.sampling.rows(truncates, edits, **read, **written)

    def wants_capture(self, uses: int) -> bool:
        return self.graphs.wanted(uses) or (uses == 1 and bool(self.unmet))

    @torch.inference_mode()
    def meet(self) -> None:
        """Run the first step that has not run, which loads its kernels, and wait for it: padding where it is a size,
        for which a later turn makes a graph. No request runs: a plan may have all slots, and the null block for what it
        writes."""
        bucket = self.unmet.popleft()
        if isinstance(bucket, StepPlan):
            self.state.block_table.zero_()
            with self.graphs.uncounted():
                self.start(bucket).wait()
            return
        self._pad()
        self.forward(bucket)
        self.sample(bucket.rows, False, False)
        self.out.send().wait()
        if self.buckets and bucket in self.buckets.graphs:
            self.graphs.want((self.forward, (bucket,)), (self.sample, (bucket.rows, False, False)))

    def _pad(self) -> None:
        """Fill the step's vector with padding, whatever size is run from it."""
        rows = self.state.input.width - 1
        columns = np.full(rows, -1), np.zeros(rows, np.int32), np.ones(rows, np.int32), np.ones(rows, np.bool_)
        self.state.input.bring(StepShape(StepPlan(-1, *columns), None), NO_ROWS, self.state.sampling.host_columns)

    def is_eager(self, plan: StepPlan) -> bool:
        for new in plan.new_requests:
            if new.prompt_embeds is not None or new.pooling or new.params.prompt_logprobs is not None:
                return True
        return bool(np.any(self.state.options[plan.slots] & EAGER))

    @torch.inference_mode()
    def reserve_graphs(self) -> int:
        """Let steps have CUDA graphs from now on.

        Returns:
            Bytes that the graphs of all sizes take. What they share of that is taken, and stays.

        Raises:
            torch.OutOfMemoryError, RuntimeError: it does not fit.
        """
        assert self.buckets is not None
        buckets = sorted(self.buckets.graphs, reverse=True)
        if not buckets:
            return 0
        rows = [size for size in reversed(self.buckets.rows) if size <= max(bucket.rows for bucket in buckets)]
        forward: list[Part] = [(self.forward, (bucket,)) for bucket in buckets]
        sample: list[Part] = [
            (self.sample, (n, *options)) for n in rows for options in product((True, False), repeat=2)
        ]
        self._pad()
        return self.graphs.reserve(forward, sample)

    def memory_stats(self) -> dict[str, int]:
        """Bytes by use: weights, KV cache, tables and vectors of steps and slots, pools of sampling options, the
        host's KV cache; on CUDA also what torch's allocator holds."""
        weights = {t.data_ptr(): t.nbytes for t in self.model.tensors()}
        stats = {
            "weights_bytes": sum(weights.values()),
            "kv_cache_bytes": self.kv_cache.nbytes,
            "host_kv_cache_bytes": self.host_kv_cache.nbytes,
            "tables_bytes": sum(t.nbytes for t in (*self.buffers, *self.state.tensors(), self.out.vector, self.hidden)),
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
            NotSupportedError: other engines have experts of this model.
            ResourceError: this rank has no memory for it, or another one.
        """
        model, found = self.model, None
        if model.exchange.size > 1:
            raise NotSupportedError("an attention map of engines that share experts: ask an engine that has them all")
        try:
            with self._paying(lambda: [*model.sums(len(prompt)), ("all_gather", (len(prompt),) * 2, torch.float32)]):
                found = attention_map(model, self.info, prompt, layer, head)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
        if not model.group.least(found is not None) or found is None:
            raise ResourceError("no memory for this attention map; a part of the prompt needs less")
        return found

    def _marked(self, name: str) -> AbstractContextManager[None]:
        return torch.cuda.nvtx.range(name) if self.marks else nullcontext()

    def check_weights(self, folder: str) -> None:
        with open_folder(Path(folder), self.shard.whole):
            pass

    def update_weights(self, folder: str) -> None:
        with open_folder(Path(folder), self.shard.whole) as tensors:
            refill(tensors, self.shard, self.model.parameters, lambda _phase, _fraction: None)
        self.model.group.least(0)  # on all ranks of this engine

    def profile(self, on: bool) -> None:
        """Start tracing, or stop it."""
        self.profiler.switch(on)

    def _time_swap(self) -> float:
        """Seconds to copy one block to the host: the best of three, the first being slow."""
        return min(timeit.repeat(lambda: self.host_kv_cache[0].copy_(self.kv_cache[0]), number=1, repeat=3))

    @contextmanager
    def _out_of_memory(self, plan: StepPlan) -> Iterator[None]:
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            alone = self.model.group.size == 1 or PAID in getattr(error, "__notes__", ())
            if not is_out_of_memory(error) or not alone:  # other ranks wait for this one, for ever
                raise
            if self.device.type == "cuda":
                # The engine drops the steps in flight and gives their slots away: uploads, which wait for no step,
                # must find them done.
                torch.cuda.synchronize(self.device)
            raise OutOfMemory(
                f"a step of {plan.num_rows} rows and {plan.num_tokens} tokens does not fit: {first_line(error)}"
            ) from error
