"""Checkpoint tensors into parameters: names strict both ways, shapes checked, each tensor copied once to its place.

Separate q, k, v (and gate, up) tensors land in one fused parameter each, so that a layer has four matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wavecore.engine_core.models.files import Progress, weight_files
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.engine_core.models.weight_names import Part, hf_parts
from wavecore.engine_core.startup.free_memory import check_weights
from wavecore.transport.errors import ModelError, WavecoreError

Parameters = dict[str, torch.Tensor]

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not read yet."""

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Callable[[], torch.Tensor]


def load_folder(
    folder: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device, progress: Progress
) -> Parameters:
    """Every parameter of `spec` from the safetensors files of a folder, straight to the device.

    Raises:
        ModelError: naming the file: truncated, a tensor missing, unknown, or of another shape than config.json says.
        ResourceError, ConfigError: the device has no room for them.
    """
    path = folder
    try:
        with ExitStack() as stack:
            stored: list[Stored] = []
            for path in weight_files(folder):
                stored += _tensors(path, stack.enter_context(safe_open(path, "pt", device=str(device))), spec)
            return fill(stored, hf_parts(spec), spec, dtype, device, folder, progress)
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


def fill(
    stored: Sequence[Stored],
    parts: Mapping[str, Part],
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    source: Path,
    progress: Progress,
) -> Parameters:
    """Check all names and shapes, then allocate the parameters and copy tensor by tensor.

    The check comes first, so that a config that lies about sizes allocates nothing.

    Raises:
        ModelError: a tensor that is missing, unknown, or of another shape.
        ResourceError, ConfigError: the device has no room for them all.
    """
    missing = set(parts)
    for tensor in stored:
        part = parts.get(tensor.name)
        if part is None:
            raise ModelError(f"{tensor.file}: tensor {tensor.name!r:.80} has no place in this {spec.architecture}")
        if tensor.name not in missing:
            raise ModelError(f"{tensor.file}: tensor {tensor.name!r:.80} comes twice")
        if tensor.shape != part.shape:
            raise ModelError(
                f"{tensor.file}: tensor {tensor.name!r:.80} has shape {tensor.shape}, the config says {part.shape}"
            )
        missing.remove(tensor.name)
    if missing:
        names = ", ".join(sorted(missing)[:3])
        raise ModelError(f"{source}: {len(missing)} tensors are missing: {names}{', ...' if len(missing) > 3 else ''}")
    check_weights(spec, source, dtype, device)
    parameters = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in spec.shapes().items()}
    for done, tensor in enumerate(stored, 1):
        part = parts[tensor.name]
        parameters[part.param][part.row : part.row + part.shape[0]].copy_(tensor.read())
        progress("load", done / len(stored))
    return parameters
