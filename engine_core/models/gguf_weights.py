"""Tensors of a GGUF file into parameters. Quantised blocks become floating point by `gguf`'s own dequantisation.

llama.cpp turns interleaved pairs of a head, transformers and our kernels turn its two halves; so converters permute the
q and k rows of llama-arch files, and `_unpermute` puts them back.
"""

from __future__ import annotations

from functools import partial

import torch

from wavecore.engine_core.api.gguf_file import GgufFile, GgufTensor
from wavecore.engine_core.models.gguf import ROPE_FACTORS
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.engine_core.models.weights import Part, Placed, Stored, parts_by_name, placed


def open_gguf(file: GgufFile, spec: ModelSpec) -> Placed:
    """Every tensor of a GGUF file, dequantised when it is read, and where it goes.

    Raises:
        ModelError: naming the file and the tensor that is missing, unknown or of a wrong shape.
    """
    stored = (
        Stored(name, tensor.shape, file.path, partial(_read, file, tensor, spec))
        for name, tensor in file.tensors.items()
        if name != ROPE_FACTORS
    )
    return placed(stored, gguf_parts(spec), spec, file.path)


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
    return parts_by_name(spec, outer, "blk.{}.", norms, linears)


def _read(file: GgufFile, tensor: GgufTensor, spec: ModelSpec) -> torch.Tensor:
    values = torch.from_numpy(file.floats(tensor))
    heads = {"attn_q.weight": spec.num_heads, "attn_k.weight": spec.num_kv_heads}
    kind = tensor.name.split(".", 2)[-1]  # blk.N.attn_q.weight
    if spec.architecture == "LlamaForCausalLM" and kind in heads:
        return _unpermute(values, heads[kind])
    return values


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * dim, hidden] with each head's rows as (pair, half) back to (half, pair)."""
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)
