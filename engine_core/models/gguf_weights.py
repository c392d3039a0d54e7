"""Tensors of a GGUF file into parameters. Quantised blocks become floating point by `gguf`'s own dequantisation.

llama.cpp turns interleaved pairs of a head, transformers and our kernels turn its two halves; so converters permute the
q and k rows of llama-arch files, and `_unpermute` puts them back.
"""

from functools import partial

import torch

from wavecore.engine_core.api.gguf_file import GgufFile, GgufTensor
from wavecore.engine_core.models.gguf import ROPE_FACTORS
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.engine_core.models.weights import Index, Placed, Stored, parts_of, placed


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
    return placed(stored, parts_of(spec, "gguf"), spec, file.path)


def _read(file: GgufFile, tensor: GgufTensor, spec: ModelSpec, index: Index) -> torch.Tensor:
    values = torch.from_numpy(file.floats(tensor))
    heads = {"attn_q.weight": spec.num_heads, "attn_k.weight": spec.num_kv_heads}
    kind = tensor.name.split(".", 2)[-1]  # blk.N.attn_q.weight
    if spec.architecture == "LlamaForCausalLM" and kind in heads:
        values = _unpermute(values, heads[kind])
    return values[index]


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * dim, hidden] with each head's rows as (pair, half) back to (half, pair)."""
    rows, hidden = weight.shape
    return weight.view(heads, rows // heads // 2, 2, hidden).transpose(1, 2).reshape(rows, hidden)
