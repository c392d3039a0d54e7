"""The header of a GGUF file, read without trusting it: every count, offset and size is checked against the file.

`gguf.GGUFReader` maps the file and believes its numbers; a lying count keeps it busy for ever. This reader walks
the same header with bounds and gives plain values; `gguf`, imported late, only turns quantised blocks into numbers.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Knows no torch and no architecture.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.model_files import unreadable
from wavecore.transport.errors import ModelError, NotSupportedError, WavecoreError
from wavecore.transport.small_files import open_regular
from wavecore.transport.wire.checks import shown

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAX_DIMS = 4
MAX_DEPTH = 2
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# What llama.cpp (https://github.com/ggml-org/llama.cpp, llama-vocab.cpp) knows of vocabularies beyond the metadata:
# which tokens end a generation (without the texts of gpt-oss and Gemma 4, which contradict others), by which patterns,
# one after the other, a pre-tokenizer cuts a text, and with which a word that is a whole token needs no merges.
LLAMA_CPP: dict[str, Any] = json.loads(Path(__file__).with_name("llama_cpp.json").read_text("utf-8"))
SUPPORTED = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies.

    Attributes:
        shape: as in torch, rows first (the file lists the row length first).
        offset, size: bytes in the file, inside it.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file's header: metadata as plain values, tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def raw(self, tensor: GgufTensor) -> npt.NDArray[np.uint8]:
        """The tensor's bytes as uint8 [rows, bytes a row], mapped from the file."""
        rows = math.prod(tensor.shape[:-1])
        data = np.memmap(self.path, np.uint8, "r", tensor.offset, (tensor.size,))
        return data.view(np.ndarray).reshape(rows, tensor.size // rows)  # slices of a memmap itself are slow

    def floats(self, tensor: GgufTensor) -> npt.NDArray[np.float32]:
        """The tensor dequantised, of its own shape, writable (float32 values would be a view of the file)."""
        from gguf.quants import dequantize

        values = np.require(dequantize(self.raw(tensor), tensor.kind), np.float32, "W")
        return values.reshape(tensor.shape)


def read_gguf(path: Path) -> GgufFile:
    """Read and check the header.

    Raises:
        ModelError: naming the file: not GGUF, truncated, or a number in it that cannot be true.
        NotSupportedError: one part of a model, a tensor type outside `SUPPORTED`, or another byte order or version.
    """
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _Header(path, data).parse()
    except (OSError, ValueError) as error:
        if isinstance(error, WavecoreError):
            raise
        raise unreadable(path, error) from error
    if (count := found.metadata.get("split.count", 1)) not in (0, 1):
        way_out = "join them first, `llama-gguf-split --merge FIRST_PART OUT.gguf`"
        raise NotSupportedError(f"{path} is one part of {shown(count)}: {way_out}")
    return found


class _Header:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.end = len(data)
        self.at = 0

    def parse(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            raise unreadable(self.path, "it does not begin with GGUF")
        self.at = 4
        version = self.scalar("I")
        if version not in (2, 3):
            raise NotSupportedError(f"{self.path}: GGUF version {version}; 2 and 3 (little-endian) are supported")
        tensor_count, pair_count = self.scalar("Q"), self.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(self.count(pair_count, 13)):
            key = self.string()
            metadata[key] = self.value(self.scalar("I"))
        infos = [self.tensor_info() for _ in range(self.count(tensor_count, 24))]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= 1 << 20 or alignment % 8:
            raise self.broken(f"general.alignment is {alignment!r:.40}")
        base = -(-self.at // alignment) * alignment
        tensors = [self.place(info, base) for info in infos]
        if len({t.name for t in tensors}) != len(tensors):
            raise self.broken("two tensors have the same name")
        return GgufFile(self.path, metadata, {t.name: t for t in tensors})

    def broken(self, what: str) -> ModelError:
        return ModelError(f"{self.path} is not a sound GGUF file: {what}; download it again")

    def take(self, size: int) -> int:
        """Advance over `size` bytes and return where they began."""
        start = self.at
        if size > self.end - start:
            raise self.broken(f"{size} bytes are announced at offset {start}, the file ends at {self.end}")
        self.at = start + size
        return start

    def count(self, announced: int, least_bytes: int) -> int:
        """A count that the rest of the file can hold."""
        if announced * least_bytes > self.end - self.at:
            raise self.broken(f"{announced} entries are announced at offset {self.at}, the file ends at {self.end}")
        return announced

    def scalar(self, code: str) -> Any:
        size = struct.calcsize(f"<{code}")
        return struct.unpack_from(f"<{code}", self.data, self.take(size))[0]

    def string(self) -> str:
        size = self.scalar("Q")
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.string()
        if kind != ARRAY or depth >= MAX_DEPTH:
            raise self.broken(f"value type {kind} at offset {self.at}")
        item, announced = self.scalar("I"), self.scalar("Q")
        if item in SCALARS:
            size = struct.calcsize(f"<{SCALARS[item]}")
            start = self.take(self.count(announced, size) * size)
            return list(struct.unpack_from(f"<{announced}{SCALARS[item]}", self.data, start))
        return [self.value(item, depth + 1) for _ in range(self.count(announced, 8))]

    def tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dims = self.string(), self.scalar("I")
        if not 1 <= dims <= MAX_DIMS:
            raise self.broken(f"tensor {name!r:.80} has {dims} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dims))[::-1]
        return name, shape, self.scalar("I"), self.scalar("Q")

    def place(self, info: tuple[str, tuple[int, ...], int, int], base: int) -> GgufTensor:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        name, shape, number, offset = info
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self.broken(f"tensor {name!r:.80} has unknown type {number}") from None
        if kind.name not in SUPPORTED:
            names = ", ".join(sorted(SUPPORTED))
            raise NotSupportedError(f"{self.path}: tensor {name!r:.80} is {kind.name}; supported types: {names}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if 0 in shape or shape[-1] % block:
            raise self.broken(f"tensor {name!r:.80} of type {kind.name} has shape {shape}")
        size = math.prod(shape) // block * block_bytes
        start = base + offset
        if start + size > self.end:
            raise self.broken(f"tensor {name!r:.80} has bytes {start} to {start + size}, the file ends at {self.end}")
        return GgufTensor(name, shape, kind, start, size)
