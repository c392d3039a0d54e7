"""Looking into a model: the attention weights of one head over a prompt, and traces of what its steps run."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wavecore.engine_core.models.decoder import Decoder
from wavecore.engine_core.plan import F32, RunnerInfo
from wavecore.kernels.batch import Batch
from wavecore.transport.errors import NotSupportedError, ValidationError

MAX_SHOWN = 2048  # tokens; the map has their square


def attention_map(model: Decoder, info: RunnerInfo, prompt: list[int], layer: int, head: int) -> F32:
    """float32 [n, n]: how much query token i looks at key token j. Runs the model over blocks of its own.

    Of several ranks all run the model, and one has the head; its map is gathered behind the model's own collectives.

    Args:
        head: counted over all ranks.

    Raises:
        ValidationError: no such layer, head or token, or a prompt too long to show.
    """
    spec, group = model.spec, model.group
    for name, value, limit in (("layer", layer, spec.num_layers), ("head", head, spec.num_heads * group.size)):
        if type(value) is not int or not 0 <= value < limit:
            raise ValidationError(name, f"{value!r:.40} is not from 0 to {limit - 1}")
    limit = min(MAX_SHOWN, info.max_model_len)
    if not isinstance(prompt, list) or not 0 < len(prompt) <= limit:
        raise ValidationError(
            "prompt",
            f"must be a list of 1 to {limit} token ids, as the map has their square; give the part that you look at",
        )
    if not all(type(i) is int and 0 <= i < spec.vocab_size for i in prompt):
        raise ValidationError("prompt", f"holds something that is no token id below {spec.vocab_size}")
    device, size = model.embedding.device, info.block_size
    blocks = -(-len(prompt) // size) + 1
    kv_cache = torch.zeros(
        (blocks, spec.num_layers, 2, spec.num_kv_heads, size, spec.head_dim), dtype=model.embedding.dtype, device=device
    )
    batch = _single(prompt, size, blocks, device)
    found = torch.empty(len(prompt), len(prompt), device=device)
    rank, own_head = divmod(head, spec.num_heads)
    kv_head = own_head // (spec.num_heads // spec.num_kv_heads)

    def observe(at: int, q: Tensor) -> None:
        if (at, group.rank) == (layer, rank):
            keys = kv_cache[1:, layer, 0, kv_head].flatten(0, 1)[: len(prompt)]
            found.copy_(_weights(q[:, own_head].float(), keys.float(), model, layer))

    model.forward(model.embed(batch.token_ids), batch, kv_cache, observe)
    weights: F32 = group.all_gather(found)[rank].cpu().numpy()
    return weights


class Profiler:
    """Traces steps, as vLLM's does.

    Args:
        folder: for the traces of torch's profiler. None leaves tracing to Nsight Systems, and only tells it when.
    """

    def __init__(self, device: torch.device, folder: str | None) -> None:
        self._folder, self._cuda = folder, device.type == "cuda"
        self._running: Any = None  # torch's profiler, or the module that talks to Nsight Systems

    def switch(self, on: bool) -> None:
        """Start tracing, or stop and write the trace.

        Raises:
            NotSupportedError: no folder, and no GPU.
            ValidationError: it is on already, or off.
        """
        if on != (self._running is None):
            raise ValidationError("profile", "runs already; stop_profile() first" if on else "start_profile() first")
        if not on:
            running, self._running = self._running, None  # also where the trace cannot be written
            running.stop()
            return
        if self._folder is None and not self._cuda:
            raise NotSupportedError("profiles: give torch_profiler_dir=FOLDER at start; without it they need a GPU")
        write = torch.profiler.tensorboard_trace_handler(self._folder) if self._folder else None
        # acc_events only keeps torch from warning that each cycle clears events: a profile here is one cycle.
        self._running = torch.profiler.profile(on_trace_ready=write, acc_events=True) if write else torch.cuda.profiler
        self._running.start()


def _weights(q: Tensor, k: Tensor, model: Decoder, layer: int) -> Tensor:
    spec = model.spec
    scores = q @ k.T * spec.scale
    if spec.attn_soft_cap:
        scores = spec.attn_soft_cap * torch.tanh(scores / spec.attn_soft_cap)
    at = torch.arange(len(q), device=q.device)
    distance = at[:, None] - at
    hidden = distance < 0
    if spec.windows[layer]:
        hidden |= distance >= spec.windows[layer]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def _single(prompt: list[int], size: int, blocks: int, device: torch.device) -> Batch:
    """One row over blocks 1, 2, ...; block 0 stays empty."""
    n = len(prompt)

    def ints(values: object, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.from_numpy(np.asarray(values, np.int64)).to(device, dtype)

    return Batch(
        token_ids=ints(prompt),
        positions=ints(range(n)),
        kv_slots=ints(np.arange(n) + size, torch.int64),
        query_start=ints([0, n]),
        seq_lens=ints([n]),
        block_tables=ints([range(1, blocks)]),
        sample_index=ints([n - 1], torch.int64),
        num_decode_rows=int(n == 1),
        max_query_len=n,
    )
