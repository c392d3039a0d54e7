"""Tensors of a GGUF file into parameters. Quantised blocks become floating point by `gguf`'s own dequantisation.

llama.cpp turns interleaved pairs of a head, transformers and our kernels turn its two halves; so converters permute the
q and k rows of llama-arch files, and `_unpermute` puts them back.
"""

from __future__ import annotations

from functools import partial

import torch

from wavecore.engine_core.api.gguf_file import GgufFile, GgufTensor
from wavecore.engine_core.models.files import Progress
from wavecore.engine_core.models.gguf import ROPE_FACTORS
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.engine_core.models.weight_names import gguf_parts
from wavecore.engine_core.models.weights import Parameters, Stored, fill


def load_gguf(
    file: GgufFile, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Parameters:
    """Every parameter of `spec`, dequantised tensor by tensor.

    Raises:
        ModelError: naming the file and the tensor that is missing, unknown or of a wrong shape.
        ResourceError, ConfigError: the device has no room for them.
    """
    stored = [
        Stored(name, tensor.shape, file.path, partial(_read, file, tensor, spec))
        for name, tensor in file.tensors.items()
        if name != ROPE_FACTORS
    ]
    return fill(stored, gguf_parts(spec), spec, dtype, device, file.path, progress)


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
