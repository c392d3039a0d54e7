"""The decoder: one transformer for every family, written against `kernels.ops`. Knows tensors, no request and no slot.

    x = embed(ids)
    each layer:  x, r = add_norm(x, r);  qkv = x Wqkv;  q = norm, rotate, write k v;  x = attention(q) Wo
                 x, r = add_norm(x, r);  x = act(x Wgate_up) Wdown
    logits = norm(x + r) Wlm_head                      for the rows that sample

The residual r is added inside the norm, so a layer has two fused norms, four matrix products and three other kernels.
Where ranks share the model, each has a part of x behind a Wo or Wdown, and the next norm is of the sum over ranks.
In a mixture of experts the MLP is a router's product and `ops.moe`, on the ranks that have the experts, and perhaps an
expert that all tokens share.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from wavecore.engine_core.models.rope import cos_sin_table
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.engine_core.models.weights import Parameters
from wavecore.kernels import ops
from wavecore.kernels.batch import Batch
from wavecore.parallel.collectives import ALONE, Collective, Collectives
from wavecore.parallel.experts import Exchange, spread_experts
from wavecore.parallel.layers import embedding, gathered, partial_linear

Observer = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer's parameters; shapes in `ModelSpec.shapes`."""

    input_norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor | None = None
    down: Tensor | None = None
    qkv_bias: Tensor | None = None
    o_bias: Tensor | None = None
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    post_attn_norm: Tensor | None = None
    post_mlp_norm: Tensor | None = None
    router: Tensor | None = None
    experts_gate_up: Tensor | None = None
    experts_down: Tensor | None = None
    shared_gate: Tensor | None = None


class Decoder:
    """A model on one device, or one rank's share of it.

    Args:
        spec: the architecture; of a share, the rank's own.
        parameters: as `ModelSpec.shapes` names them, all of one dtype on one device.
        length: positions that the rotary tables cover.
        group: the ranks that share the model; all call the same methods with the same arguments.
        exchange: between engines that share the experts; all run `forward` with as many tokens.

    Attributes:
        lm_head: [columns of this rank, hidden].
        columns: their vocabulary ids; what is not below the vocabulary's size is padding.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parameters: Parameters,
        length: int,
        group: Collectives = ALONE,
        exchange: Exchange | None = None,
    ) -> None:
        self.spec, self.group, self.exchange = spec, group, exchange or Exchange()
        self.parameters = parameters
        self.embedding = parameters["embed"]
        self.norm = parameters["norm"]
        self.lm_head = parameters["embed" if spec.tied else "lm_head"]
        self.columns = range(group.rank * len(self.lm_head), (group.rank + 1) * len(self.lm_head))
        self.layers = [
            Layer(**{k.rsplit(".", 1)[1]: v for k, v in parameters.items() if k.startswith(f"layers.{i}.")})
            for i in range(spec.num_layers)
        ]
        device = self.embedding.device
        self.tables = [cos_sin_table(rope, length, device) for rope in spec.ropes]
        # Rounded to the weights' dtype, as transformers does: in bfloat16 the factor itself is rounded.
        self.embed_scale = torch.tensor(spec.embed_scale, dtype=self.embedding.dtype).item()

    def tensors(self) -> Iterator[Tensor]:
        """Every weight and table; a tied one comes twice."""
        yield from (self.embedding, self.norm, self.lm_head, *self.tables)
        for layer in self.layers:
            yield from (getattr(layer, f.name) for f in fields(layer) if getattr(layer, f.name) is not None)

    def embed(self, token_ids: Tensor) -> Tensor:
        """[T] int32 to [T, hidden]."""
        x = embedding(token_ids, self.embedding, self.group)
        return x if self.embed_scale == 1.0 else x * self.embed_scale

    def forward(
        self, x: Tensor, batch: Batch, kv_cache: Tensor, observe: Observer | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run all layers.

        Args:
            x: [T, hidden] from `embed`.
            kv_cache: the KV cache; keys and values of this step are written at `batch.kv_slots`.
            observe: called with (layer, rotated queries [T, heads, dim]) once the layer's keys are in the cache.

        Returns:
            (x, residual), both [T, hidden]; their sum, normalised by `final`, is the hidden state.
        """
        spec, eps, offset = self.spec, self.spec.rms_norm_eps, self.spec.norm_offset
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        kv_slots = self.exchange.gather(batch.kv_slots)
        residual: Tensor | None = None
        for i, layer in enumerate(self.layers):
            if residual is None:
                x, residual = ops.add_rms_norm(x, None, layer.input_norm, eps, offset)
            else:
                x, residual = self._summed_norm(x, residual, self.layers[i - 1].post_mlp_norm, layer.input_norm)
            qkv = ops.linear(x, layer.qkv, layer.qkv_bias)
            table = self.tables[spec.rope_of_layer[i]]
            q = ops.qk_norm_rope_kv_write(
                qkv, layer.q_norm, layer.k_norm, eps, table, batch, kv_cache, i, heads, kv_heads, offset
            )
            if observe is not None:
                observe(i, q)
            x = ops.paged_attention(q, kv_cache, i, batch, spec.scale, spec.attn_soft_cap, spec.windows[i])
            x = partial_linear(x, layer.o, layer.o_bias, self.group)
            x, residual = self._summed_norm(x, residual, layer.post_attn_norm, layer.mlp_norm)
            x = self._mlp(layer, x) if layer.router is None else self._experts(layer, x, kv_slots)
        assert residual is not None
        last_norm = self.layers[-1].post_mlp_norm
        if last_norm is None:
            return self.group.all_reduce(x), residual
        return self.group.add_rms_norm(x, None, last_norm, eps, offset)[0], residual

    def _summed_norm(
        self, x: Tensor, residual: Tensor, post_norm: Tensor | None, norm: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Normalised sum of the residual and all ranks' x, and the sum; the ranks' sum is normalised, too, in Gemma."""
        eps, offset = self.spec.rms_norm_eps, self.spec.norm_offset
        if post_norm is None:
            return self.group.add_rms_norm(x, residual, norm, eps, offset)
        x, _ = self.group.add_rms_norm(x, None, post_norm, eps, offset)
        return ops.add_rms_norm(x, residual, norm, eps, offset)

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        """This rank's part of the MLP."""
        inner, down = self._inner(layer, x)
        return partial_linear(inner, down, layer.down_bias, self.group)

    def _inner(self, layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, inner width], and what it is to be multiplied with."""
        assert layer.gate_up is not None and layer.down is not None
        activation = ops.gelu_tanh_mul if self.spec.gelu else ops.silu_mul
        return activation(ops.linear(x, layer.gate_up, layer.gate_up_bias)), layer.down

    def _experts(self, layer: Layer, x: Tensor, kv_slots: Tensor) -> Tensor:
        """This rank's part of a mixture of experts; padding goes to none."""
        gate_up, down, spec = layer.experts_gate_up, layer.experts_down, self.spec
        assert layer.router is not None and gate_up is not None and down is not None
        choice = spec.experts_per_token, spec.norm_experts, spec.first_expert
        out = spread_experts(x, layer.router, gate_up, down, kv_slots, *choice, self.exchange)
        if layer.shared_gate is not None:
            out += ops.linear(x, layer.shared_gate).sigmoid_() * ops.linear(*self._inner(layer, x))
        return out

    def least(self, value: int) -> int:
        """The least of the numbers of all ranks that compute together; see `Collectives.least`."""
        return self.exchange.least(self.group.least(value))

    def sums(self, num_tokens: int) -> list[Collective]:
        """What `embed` and `forward` of so many tokens do with the other ranks."""
        shape = num_tokens, self.spec.hidden_size
        return [("all_reduce", shape, self.embedding.dtype)] * (1 + 2 * self.spec.num_layers)

    def gather(self, num_rows: int) -> list[Collective]:
        """What `whole` of so many rows does with the other ranks."""
        dtype = torch.float32 if self.spec.final_soft_cap else self.embedding.dtype
        return [("all_gather", (num_rows, len(self.lm_head)), dtype)]

    def final(self, x: Tensor, residual: Tensor) -> Tensor:
        """The normalised hidden state [n, hidden] of some tokens of `forward`."""
        return ops.add_rms_norm(x, residual, self.norm, self.spec.rms_norm_eps, self.spec.norm_offset)[0]

    def final_at(self, index: Tensor, x: Tensor, residual: Tensor, out: Tensor) -> None:
        """The same of the tokens int64 [n], written to `out` [n, hidden]."""
        spec = self.spec
        ops.gather_add_rms_norm(x, residual, index, self.norm, spec.rms_norm_eps, spec.norm_offset, out)

    def own_logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] from `final` to [n, columns of this rank]; float32 where they are capped, which rounds nothing
        then."""
        logits, cap = ops.linear(hidden, self.lm_head), self.spec.final_soft_cap
        if cap:
            logits = logits.float().div_(cap).tanh_().mul_(cap)
        if self.columns.stop > self.spec.vocab_size:
            logits[:, max(self.spec.vocab_size - self.columns.start, 0) :] = -torch.inf
        return logits

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] from `final` to [n, vocab]."""
        return self.whole(self.own_logits(hidden))

    def whole(self, logits: Tensor) -> Tensor:
        """[n, vocab], from each rank's own."""
        return gathered(logits, self.spec.vocab_size, self.group)
