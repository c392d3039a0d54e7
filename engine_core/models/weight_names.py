"""What checkpoints call the decoder's parameters, and where each of their tensors goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from wavecore.engine_core.models.families import FAMILIES
from wavecore.engine_core.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor of a checkpoint goes: to rows [row, row + shape[0]) of `param`."""

    param: str
    row: int
    shape: tuple[int, ...]


def hf_parts(spec: ModelSpec) -> dict[str, Part]:
    """Every tensor name of a Hugging Face checkpoint and where it goes."""
    fused = FAMILIES[spec.architecture].fused
    post, pre = ("post_attention_layernorm", "pre_feedforward_layernorm")
    norms = {"input_norm": "input_layernorm", "mlp_norm": pre if spec.post_norms else post}
    norms |= {"post_attn_norm": post, "post_mlp_norm": "post_feedforward_layernorm"} if spec.post_norms else {}
    linears = {
        "qkv": ("self_attn.qkv_proj",) if fused else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"} if spec.qk_norm else {}
    outer = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    return dict(_parts(spec, outer, "model.layers.{}.", norms, linears))


def gguf_parts(spec: ModelSpec) -> dict[str, Part]:
    """Every tensor name of a GGUF file and where it goes."""
    norms = {"input_norm": "attn_norm", "mlp_norm": "ffn_norm"}
    norms |= {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"} if spec.qk_norm else {}
    linears = {
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "o": ("attn_output",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
    }
    outer = {"embed": "token_embd.weight", "norm": "output_norm.weight", "lm_head": "output.weight"}
    return dict(_parts(spec, outer, "blk.{}.", norms, linears))


def _parts(
    spec: ModelSpec,
    outer: Mapping[str, str],
    prefix: str,
    norms: Mapping[str, str],
    linears: Mapping[str, tuple[str, ...]],
) -> Iterator[tuple[str, Part]]:
    shapes = spec.shapes()
    for param, name in outer.items():
        if param in shapes:
            yield name, Part(param, 0, shapes[param])
    kv = spec.num_kv_heads * spec.head_dim
    cuts = {"qkv": (spec.num_heads * spec.head_dim, kv, kv), "gate_up": (spec.intermediate_size,) * 2}
    for i in range(spec.num_layers):
        layer = prefix.format(i)
        for param, name in norms.items():
            yield f"{layer}{name}.weight", Part(f"layers.{i}.{param}", 0, shapes[f"layers.{i}.{param}"])
        for param, names in linears.items():
            for kind, suffix in (("", ".weight"), ("_bias", ".bias")):
                shape = shapes.get(f"layers.{i}.{param}{kind}")
                if shape is None:
                    continue
                rows = cuts[param] if len(names) > 1 else (shape[0],)
                for at, name in enumerate(names):
                    part = Part(f"layers.{i}.{param}{kind}", sum(rows[:at]), (rows[at], *shape[1:]))
                    yield f"{layer}{name}{suffix}", part
