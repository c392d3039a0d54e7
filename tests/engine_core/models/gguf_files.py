"""Writes tiny GGUF models, of any supported tensor type."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter

HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, VOCAB = 256, 512, 4, 2, 2, 96


def head_dim(arch: str) -> int:
    return (
        128 if arch == "qwen3" else HIDDEN // HEADS
    )  # transformers' GGUF load takes 128 for qwen3, whatever is written


def shapes(arch: str) -> dict[str, tuple[int, ...]]:
    dim = head_dim(arch)
    kv, inner = KV_HEADS * dim, HEADS * dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (inner, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, inner),
        "ffn_norm.weight": (HIDDEN,),
        "ffn_gate.weight": (INNER, HIDDEN),
        "ffn_up.weight": (INNER, HIDDEN),
        "ffn_down.weight": (HIDDEN, INNER),
    }
    if arch == "qwen2":
        layer |= {"attn_q.bias": (inner,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch == "qwen3":
        layer |= {"attn_q_norm.weight": (dim,), "attn_k_norm.weight": (dim,)}
    out: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        out |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    return out


def write_gguf(
    path: Path,
    arch: str,
    kind: GGMLQuantizationType,
    *,
    rope_factors: Any = None,
    linear_scaling: float = 0.0,
    vocabulary: tuple[list[str], list[int]] | None = None,
    token_ids: Mapping[str, int] = MappingProxyType({"eos": 2}),
    split_count: int = 0,
) -> Path:
    """Matrices of type `kind`, norms and biases float32.

    Args:
        rope_factors: float32 [head_dim / 2] divisors of the rotary frequencies, as Llama 3 files carry them.
        linear_scaling: factor of linear rope scaling, 0 for none.
        vocabulary: the tokens' texts and types.
        token_ids: of special tokens, by the names that keys have for them.
        split_count: of how many parts the file says to be one.
    """
    draw = np.random.default_rng(0)
    writer = GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head_dim(arch))
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(head_dim(arch))
    writer.add_vocab_size(VOCAB)
    for name, index in token_ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
    if vocabulary is not None:
        writer.add_token_list(vocabulary[0])
        writer.add_token_types(vocabulary[1])
    if split_count:
        writer.add_uint16("split.count", split_count)
    if linear_scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(linear_scaling)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors)
    for name, shape in shapes(arch).items():
        values = draw.normal(0, 0.15, shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values + (0 if name.endswith("bias") else 1))
        else:
            data = quantise(values, kind, draw)
            writer.add_tensor(name, data, raw_shape=None if kind.name == "F32" else data.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantise(values: np.ndarray[Any, Any], kind: GGMLQuantizationType, draw: np.random.Generator) -> Any:
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(values, kind)
    # gguf reads K-quants but does not write them: random blocks with small half-precision scales.
    block, size = GGML_QUANT_SIZES[kind]
    rows, width = values.shape
    data = draw.integers(0, 256, (rows, width // block, size), dtype=np.uint8)
    if kind.name == "Q6_K":
        data[..., -2:] = np.full((rows, width // block, 1), 1e-4, np.float16).view(np.uint8)
    else:
        quants = 15 if kind.name == "Q4_K" else 31
        scales = np.array([1.2e-2 / quants, 0.6e-2], np.float16)
        data[..., :4] = np.broadcast_to(scales, (rows, width // block, 2)).copy().view(np.uint8)
    return data.reshape(rows, -1)
