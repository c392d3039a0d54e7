"""Checkpoint tensors into parameters: where each goes by its name, names strict both ways, each tensor copied once.

Separate q, k, v (and gate, up) tensors land in one fused parameter each, so that a layer has four matrix products. Of
several ranks each reads what it holds (`Shard`).
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from wavecore.engine_core.api.model_files import unreadable
from wavecore.engine_core.models.families import FAMILIES
from wavecore.engine_core.models.files import Progress, weight_files
from wavecore.engine_core.models.shard import Cut, Shard
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.transport.errors import ModelError, WavecoreError

Parameters = dict[str, torch.Tensor]
Index = tuple[slice, ...]
Read = Callable[[Index], torch.Tensor]
Copy = Callable[[torch.Tensor, torch.Tensor], object]  # to the first from the second, of its shape

TENSOR_NAMES = json.loads(Path(__file__).with_name("tensor_names.json").read_text("utf-8"))
FLOATS = ("F32", "F16", "BF16")
PIECE, PIECES = 16 << 20, 4  # bytes, and how many
MOST_THREADS = 16  # that fill a piece, whatever OMP_NUM_THREADS says


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor of a checkpoint goes: to rows [row, row + shape[0]) of `param`."""

    param: str
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, not read yet; `read` takes a slice for each dimension."""

    name: str
    shape: tuple[int, ...]
    file: Path
    read: Read


Placed = list[tuple[Stored, Part]]


@contextmanager
def open_folder(folder: Path, spec: ModelSpec) -> Iterator[Placed]:
    """Every tensor in the safetensors files of a folder, read as a view of its file's pages, and where it goes.

    Raises:
        ModelError: naming the file: truncated, a tensor missing, unknown, or of another shape than config.json says.
            Also where reading fails before the context ends.
    """
    path = folder
    try:
        with ExitStack() as stack:
            stored: list[Stored] = []
            for path in weight_files(folder):
                stored += _tensors(path, stack.enter_context(safe_open(path, "pt")), spec)
            yield placed(stored, parts_of(spec, "hf"), spec, folder)
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, WavecoreError):
            raise
        raise unreadable(path, error) from error


def _tensors(path: Path, file: Any, spec: ModelSpec) -> Iterator[Stored]:
    for name in file.keys():  # noqa: SIM118  (not a dict)
        if name.endswith(".rotary_emb.inv_freq") or (spec.tied and name == "lm_head.weight"):
            continue  # old exports repeat what config.json says
        header = file.get_slice(name)
        if header.get_dtype() not in FLOATS:
            kinds = ", ".join(FLOATS)
            raise ModelError(f"{path}: tensor {name!r:.80} is {header.get_dtype()}; supported are {kinds}")
        shape = tuple(header.get_shape())
        yield Stored(name, shape, path, partial(_read, file, name))


def _read(file: Any, name: str, index: Index) -> torch.Tensor:
    return file.get_tensor(name)[index]  # type: ignore[no-any-return]


def placed(stored: Iterable[Stored], places: Mapping[str, Part], spec: ModelSpec, source: Path) -> Placed:
    """Each tensor with its place.

    Raises:
        ModelError: a tensor that is missing, unknown, or of another shape.
    """
    missing, found = dict(places), []
    for tensor in stored:
        if tensor.name not in places:
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


def fill(tensors: Placed, shard: Shard, dtype: torch.dtype, device: torch.device, progress: Progress) -> Parameters:
    """Allocate the parameters of a rank and copy tensor by tensor."""
    parameters = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape in shard.spec.shapes().items()}
    refill(tensors, shard, parameters, progress)
    return parameters


def refill(tensors: Placed, shard: Shard, parameters: Parameters, progress: Progress) -> None:
    """Copy tensor by tensor into the parameters of a rank."""
    copy: Copy = torch.Tensor.copy_
    threads = torch.get_num_threads()
    if parameters["embed"].is_cuda:
        copy = Staging().copy
        torch.set_num_threads(min(MOST_THREADS, len(os.sched_getaffinity(0))))
    for done, (tensor, part) in enumerate(tensors, 1):
        for cut in shard.cuts(part.param):
            _copy(cut, part, tensor.read, parameters[part.param], copy)
        progress("load", done / len(tensors))
    torch.set_num_threads(threads)


class Staging:
    """The way of tensors to a GPU: a ring of pinned pieces. torch's threads fill one while the bus empties the others;
    pageable memory is copied by the driver, with one thread."""

    def __init__(self) -> None:
        memory = torch.empty(PIECES, PIECE, dtype=torch.uint8, pin_memory=True)
        self._ring = deque((piece, torch.cuda.Event()) for piece in memory)  # type: ignore[no-untyped-call]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy of a tensor of the host to one of its shape; the source may be changed again at once.

        Args:
            target: of any dtype. A row of it fits into a piece.
        """
        rows = PIECE // max(target[:1].nbytes, 1)
        for part, values in zip(torch.split(target, rows), torch.split(source, rows), strict=True):
            piece, copied = self._ring[0]
            self._ring.rotate()
            copied.synchronize()
            staged = piece[: part.nbytes].view(part.dtype).view(part.shape)
            part.copy_(staged.copy_(values), non_blocking=True)
            copied.record()


def draw(shard: Shard, dtype: torch.dtype, device: torch.device) -> Parameters:
    """Random weights, small and the same at every start, however many ranks share them."""
    dice = torch.Generator(device).manual_seed(0)
    parameters: Parameters = {}
    for name, shape in shard.whole.shapes().items():
        whole = torch.empty(shape, dtype=dtype, device=device).uniform_(-0.05, 0.05, generator=dice)
        parameters[name] = whole
        if shard.size * shard.expert_ranks > 1:
            parameters[name] = torch.empty(shard.spec.shapes()[name], dtype=dtype, device=device)
            for cut in shard.cuts(name):
                _copy(cut, Part(name, 0, shape), whole.__getitem__, parameters[name])
    return parameters


def _copy(cut: Cut, part: Part, read: Read, parameter: torch.Tensor, copy: Copy = torch.Tensor.copy_) -> None:
    """Copy what a cut takes of a part."""
    begin, end = max(cut.begin, part.row), min(cut.end, part.row + part.shape[0])
    if begin < end:
        index = (slice(begin - part.row, end - part.row), cut.columns)[: len(part.shape)]
        row = cut.row + begin - cut.begin
        copy(parameter[row : row + end - begin], read(index))


def parts_of(spec: ModelSpec, form: str) -> dict[str, Part]:
    """Every tensor name of a checkpoint and where it goes.

    Args:
        form: "hf" or "gguf", whose names for the parameters stand in `tensor_names.json`. A linear parameter has
            several where it is fused of them.
    """
    table, shapes, family = TENSOR_NAMES[form], spec.shapes(), FAMILIES[spec.architecture]
    norms = {**table["norms"], **(table["norms around"] if spec.post_norms else {})}
    linears = {**table["linears"], **(table["fused"] if family.fused else {})}
    found = {name: Part(param, 0, shapes[param]) for param, name in table["outer"].items() if param in shapes}
    kv = spec.num_kv_heads * spec.head_dim
    for i in range(spec.num_layers):
        layer, own = table["layer"].format(i), f"layers.{i}."
        cuts = {"qkv": (spec.num_heads * spec.head_dim, kv, kv), "gate_up": (spec.mlp_size(i),) * 2}
        plain, fused = norms, linears
        if i in spec.moe_layers:
            plain, fused = norms | table[f"routers{family.experts}"], linears | table["shared expert"]
            found |= _experts(spec, table[f"experts{family.experts}"], layer, own)
        for param, name in plain.items():
            if own + param in shapes:
                found[f"{layer}{name}.weight"] = Part(own + param, 0, shapes[own + param])
        for param, names in fused.items():
            for kind, suffix in (("", ".weight"), ("_bias", ".bias")):
                shape = shapes.get(f"{own}{param}{kind}")
                if shape is None:
                    continue
                rows = cuts[param] if len(names) > 1 else (shape[0],)
                for at, name in enumerate(names):
                    part = Part(f"{own}{param}{kind}", sum(rows[:at]), (rows[at], *shape[1:]))
                    found[f"{layer}{name}{suffix}"] = part
    return found


def _experts(spec: ModelSpec, names: Mapping[str, Any], layer: str, own: str) -> dict[str, Part]:
    """The tensors of a layer's experts, which lie one behind the other in two parameters."""
    shapes = {
        "experts_gate_up": (spec.expert_size, spec.hidden_size),
        "experts_down": (spec.hidden_size, spec.expert_size),
    }
    found: dict[str, Part] = {}
    for expert in range(spec.num_experts):
        prefix = layer + names["layer"].format(expert)
        for param, shape in shapes.items():
            for at, name in enumerate(names[param]):
                row = (expert * len(names[param]) + at) * shape[0]
                found[f"{prefix}{name}.weight"] = Part(own + param, row, shape)
    return found
