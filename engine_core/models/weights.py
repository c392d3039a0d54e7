"""Checkpoint tensors into parameters: where each goes by its name, names strict both ways, each tensor copied once.

Separate q, k, v (and gate, up) tensors land in one fused parameter each, so that a layer has four matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wavecore.engine_core.models.families import FAMILIES
from wavecore.engine_core.models.files import Progress, weight_files
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.transport.errors import ModelError, WavecoreError

Parameters = dict[str, torch.Tensor]

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor of a checkpoint goes: to rows [row, row + shape[0]) of `param`."""

    param: str
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not read yet."""

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Callable[[], torch.Tensor]


Placed = list[tuple[Stored, Part]]


@contextmanager
def open_folder(folder: Path, spec: ModelSpec, device: torch.device) -> Iterator[Placed]:
    """Every tensor in the safetensors files of a folder, to be read straight to the device, and where it goes.

    Raises:
        ModelError: naming the file: truncated, a tensor missing, unknown, or of another shape than config.json says.
            Also where reading fails before the context ends.
    """
    path = folder
    try:
        with ExitStack() as stack:
            stored: list[Stored] = []
            for path in weight_files(folder):
                stored += _tensors(path, stack.enter_context(safe_open(path, "pt", device=str(device))), spec)
            yield placed(stored, hf_parts(spec), spec, folder)
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, WavecoreError):
            raise
        raise ModelError(f"{path} cannot be read as safetensors: {error}; download it again") from error


def _tensors(path: Path, file: Any, spec: ModelSpec) -> Iterator[Stored]:
    for name in file.keys():  # noqa: SIM118  (not a dict)
        if name.endswith(".rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight"):
            continue  # old exports repeat what config.json says
        header = file.get_slice(name)
        if header.get_dtype() not in FLOATS:
            kinds = ", ".join(FLOATS)
            raise ModelError(f"{path}: tensor {name!r:.80} is {header.get_dtype()}; supported are {kinds}")
        yield Stored(name, tuple(header.get_shape()), path, partial(file.get_tensor, name))


def placed(stored: Iterable[Stored], parts: Mapping[str, Part], spec: ModelSpec, source: Path) -> Placed:
    """Each tensor with its place.

    Raises:
        ModelError: a tensor that is missing, unknown, or of another shape.
    """
    missing, found = dict(parts), []
    for tensor in stored:
        if tensor.name not in parts:
            raise ModelError(f"{tensor.file}: tensor {tensor.name!r:.80} has no place in this {spec.architecture}")
        part = missing.pop(tensor.name, None)
        if part is None:
            raise ModelError(f"{tensor.file}: tensor {tensor.name!r:.80} comes twice")
        if tensor.shape != part.shape:
            raise ModelError(
                f"{tensor.file}: tensor {tensor.name!r:.80} has shape {tensor.shape}, the config says {part.shape}"
            )
        found.append((tensor, part))
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise ModelError(f"{source}: {len(missing)} tensors are missing: {names}{', ...' if len(missing) > 3 else ''}")
    return found


def fill(tensors: Placed, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: Progress) -> Parameters:
    """Allocate the parameters and copy tensor by tensor."""
    parameters = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in spec.shapes().items()}
    for done, (tensor, part) in enumerate(tensors, 1):
        parameters[part.param][part.row : part.row + part.shape[0]].copy_(tensor.read())
        progress("load", done / len(tensors))
    return parameters


def hf_parts(spec: ModelSpec) -> dict[str, Part]:
    """Every tensor name of a Hugging Face checkpoint and where it goes."""
    fused = FAMILIES[spec.architecture].fused
    post, pre = ("post_attention_layernorm", "pre_feedforward_layernorm")
    norms = {"input_norm": "input_layernorm", "mlp_norm": pre if spec.post_norms else post}
    norms |= {"post_attn_norm": post, "post_mlp_norm": "post_feedforward_layernorm"} if spec.post_norms else {}
    norms |= {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"} if spec.qk_norm else {}
    linears = {
        "qkv": ("self_attn.qkv_proj",) if fused else ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o": ("self_attn.o_proj",),
        "gate_up": ("mlp.gate_up_proj",) if fused else ("mlp.gate_proj", "mlp.up_proj"),
        "down": ("mlp.down_proj",),
    }
    outer = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "lm_head": "lm_head.weight"}
    return parts_by_name(spec, outer, "model.layers.{}.", norms, linears)


def parts_by_name(
    spec: ModelSpec,
    outer: Mapping[str, str],
    prefix: str,
    norms: Mapping[str, str],
    linears: Mapping[str, tuple[str, ...]],
) -> dict[str, Part]:
    """Where each tensor goes, by its name in the files.

    Args:
        outer: the name of each parameter outside the layers.
        prefix: of a layer's names, with {} for its number.
        norms, linears: the names of a layer's parameters; those of a linear one are several where it is fused of them.
    """
    shapes = spec.shapes()
    parts = {name: Part(param, 0, shapes[param]) for param, name in outer.items() if param in shapes}
    kv = spec.num_kv_heads * spec.head_dim
    cuts = {"qkv": (spec.num_heads * spec.head_dim, kv, kv), "gate_up": (spec.intermediate_size,) * 2}
    for i in range(spec.num_layers):
        layer, own = prefix.format(i), f"layers.{i}."
        for param, name in norms.items():
            parts[f"{layer}{name}.weight"] = Part(own + param, 0, shapes[own + param])
        for param, names in linears.items():
            for kind, suffix in (("", ".weight"), ("_bias", ".bias")):
                shape = shapes.get(f"{own}{param}{kind}")
                if shape is None:
                    continue
                rows = cuts[param] if len(names) > 1 else (shape[0],)
                for at, name in enumerate(names):
                    part = Part(f"{own}{param}{kind}", sum(rows[:at]), (rows[at], *shape[1:]))
                    parts[f"{layer}{name}{suffix}"] = part
    return parts
