"""One model's architecture in numbers: what a config.json or a GGUF header comes down to. Knows no file format.

parameter           shape                                   present
embed               [vocab, hidden]                         always
lm_head             [vocab, hidden]                         unless tied to embed
norm                [hidden]                                always
layers.N.*          input_norm, qkv(_bias), q_norm, k_norm, o(_bias), post_attn_norm,
                    mlp_norm, gate_up(_bias), down(_bias), post_mlp_norm
... of experts      router [experts, hidden], experts_gate_up [own experts * 2 * expert_size, hidden],
                    experts_down [own experts * hidden, expert_size]; with a shared expert shared_gate [1, hidden], and
                    gate_up and down are the shared expert's
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ModelError
from wavecore.transport.wire.checks import Checker

MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 10
MAX_VOCAB = 1 << 24  # token ids up to it are exact in float32, as which ranks exchange them


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary embedding of some layers.

    Attributes:
        dim: rotated dimensions of a head.
        kind: "default", "linear", "dynamic", "llama3", "yarn", "longrope" or "factors" (a divisor per frequency).
        settings: the numbers that the kind needs, as config.json names them.
        path: of the file that gives them, for messages.
    """

    theta: float
    dim: int
    kind: str = "default"
    settings: Mapping[str, Any]
    path: Path = field(default=Path(), repr=False)  # hosts compare the rest

    @property
    def reach(self) -> int:
        """The most positions: some kinds stretch a length by a factor, the others name what they reach."""
        stretched = "original_max_position_embeddings" if self.kind == "yarn" else "max_position_embeddings"
        factor = self.settings["factor"] if self.kind in ("yarn", "linear", "dynamic") else 1
        return int(self.settings[stretched] * factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model's architecture in numbers.

    Attributes:
        windows: per layer, tokens a query sees, itself included; 0 = all.
        ropes: the distinct rotary tables; `rope_of_layer` says which one a layer uses.
        norm_offset: added to every norm weight (Gemma stores weight - 1).
        post_norms: norms after attention and after the MLP as well (Gemma).
        scale: factor of the attention scores.
        moe_layers: the layers whose MLP is a mixture of `num_experts` experts of inner width `expert_size`, of which a
            token goes to `experts_per_token`; their weights add up to 1 where `norm_experts`. A shared expert of inner
            width `shared_size` sees every token, if that is above 0.
        num_shards: ranks that share the rows of the vocabulary. Of a rank's share of a model (`shard.Shard`), heads and
            intermediate_size are the rank's own; vocab_size and num_experts are always the model's.
        first_expert, own_experts: those that a rank has; 0 and 0 for all.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    tied: bool
    windows: tuple[int, ...]
    ropes: tuple[Rope, ...]
    rope_of_layer: tuple[int, ...]
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gelu: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0
    attn_soft_cap: float = 0.0
    final_soft_cap: float = 0.0
    dtype: str = "float32"
    moe_layers: frozenset[int] = frozenset()
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    norm_experts: bool = False
    num_shards: int = 1
    first_expert: int = 0
    own_experts: int = 0

    @property
    def kv_values_per_token(self) -> int:
        """Numbers in the keys and values of one token, all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        """Numbers in all weights."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    @property
    def qkv_rows(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape."""
        hidden, heads = self.hidden_size, self.num_heads * self.head_dim
        vocab = -(-self.vocab_size // self.num_shards)
        shapes: dict[str, tuple[int, ...]] = {"embed": (vocab, hidden), "norm": (hidden,)}
        if not self.tied:
            shapes["lm_head"] = (vocab, hidden)
        layer: dict[str, tuple[int, ...]] = {
            "input_norm": (hidden,),
            "qkv": (self.qkv_rows, hidden),
            "o": (hidden, heads),
            "mlp_norm": (hidden,),
        }
        if self.qkv_bias:
            layer["qkv_bias"] = (self.qkv_rows,)
        if self.o_bias:
            layer["o_bias"] = (hidden,)
        if self.qk_norm:
            layer |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
        if self.post_norms:
            layer |= {"post_attn_norm": (hidden,), "post_mlp_norm": (hidden,)}
        for i in range(self.num_layers):
            shapes |= {f"layers.{i}.{name}": shape for name, shape in (layer | self._mlp(i)).items()}
        return shapes

    def mlp_size(self, layer: int) -> int:
        """The inner width of a layer's MLP, or of its shared expert; 0 without one."""
        return self.shared_size if layer in self.moe_layers else self.intermediate_size

    def _mlp(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, size, shapes = self.hidden_size, self.mlp_size(layer), dict[str, tuple[int, ...]]()
        if size:
            shapes |= {"gate_up": (2 * size, hidden), "down": (hidden, size)}
        if self.mlp_bias:
            shapes |= {"gate_up_bias": (2 * size,), "down_bias": (hidden,)}
        if layer in self.moe_layers:
            experts, inner = self.own_experts or self.num_experts, self.expert_size
            shapes |= {
                "router": (self.num_experts, hidden),
                "experts_gate_up": (experts * 2 * inner, hidden),
                "experts_down": (experts * hidden, inner),
            }
            if size:
                shapes["shared_gate"] = (1, hidden)
        return shapes


@dataclass(frozen=True, slots=True)
class Fields:
    """Typed, bounded reads from a config that may lie. A field that is null counts as left out."""

    values: Mapping[str, Any]
    path: Path

    def whole(self, name: str, default: int | None = None, low: int = 1, high: int = 1 << 28) -> int:
        return self._check.whole(name, self._value(name, default), low, high)

    def real(self, name: str, default: float | None = None, above_zero: bool = False) -> float:
        return self._check.real(name, self._value(name, default), 0.0, 1e12, above=above_zero)

    def _value(self, name: str, default: float | None) -> Any:
        value = self.values.get(name)
        return default if value is None else value

    @property
    def _check(self) -> Checker:
        return Checker(lambda name, reason: ModelError(f"{self.path}: {name} {reason}"))


def checked(spec: ModelSpec, path: Path) -> ModelSpec:
    """Refuse sizes that contradict each other before anything is allocated by them."""
    if spec.num_heads % spec.num_kv_heads:
        raise ModelError(f"{path}: {spec.num_heads} heads do not divide into {spec.num_kv_heads} KV heads")
    if spec.vocab_size > MAX_VOCAB:
        raise ModelError(f"{path}: a vocabulary of {spec.vocab_size} tokens; {MAX_VOCAB} is the most")
    if spec.experts_per_token > spec.num_experts:
        raise ModelError(f"{path}: a token goes to {spec.experts_per_token} of {spec.num_experts} experts")
    if spec.head_dim % 2 or any(rope.dim % 2 or not 0 < rope.dim <= spec.head_dim for rope in spec.ropes):
        raise ModelError(f"{path}: head_dim {spec.head_dim} and its rotated part must be even")
    return spec
