"""Looks into a running engine: calls to all engines, the table of its memory, the attention map as a PNG."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.frontend.client.client import EngineClient

F32 = npt.NDArray[np.float32]
LEAST_PIXELS = 512
# Dark to bright at even steps, near viridis
COLOURS = np.array([[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]], np.float32)


def call_all(client: EngineClient, method: str, **args: Any) -> list[Any]:
    """The answers of every engine, in order of index.

    Raises:
        EngineDead, RequestTimeout: an engine did not answer.
        ValidationError: no such method, or wrong arguments.
    """
    futures = [client.call(method, args, engine=index) for index in client.engines]
    return [future.result().value for future in futures]


def memory_table(index: int, stats: Mapping[str, Any]) -> str:
    """One line an entry; numbers of bytes as MiB."""
    lines = [f"engine {index}"]
    for name, value in stats.items():
        size = f"{value / 2**20:12.1f} MiB" if name.endswith("bytes") and isinstance(value, int) else f"{value!s:>16}"
        lines.append(f"  {name.removesuffix('_bytes').replace('_', ' '):<28}{size}")
    return "\n".join(lines)


def heat_map(values: F32) -> npt.NDArray[np.uint8]:
    """RGB pixels uint8 [height, width, 3] of `values` [rows, columns]: the largest brightest, small ones magnified."""
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / ((high - low) or 1.0) * (len(COLOURS) - 1)
    mixed = np.stack([np.interp(scaled, np.arange(len(COLOURS)), channel) for channel in COLOURS.T], axis=-1)
    pixels: npt.NDArray[np.uint8] = mixed.round().astype(np.uint8)
    zoom = -(-LEAST_PIXELS // max(values.shape))
    return np.repeat(np.repeat(pixels, zoom, axis=0), zoom, axis=1)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """A file's bytes (https://www.w3.org/TR/png-3/: 8-bit RGB, one IDAT chunk); nobody needs a plotting library."""
    height, width, _ = pixels.shape
    lines = np.zeros((height, 1 + 3 * width), np.uint8)  # each line starts with its filter type, 0
    lines[:, 1:] = pixels.reshape(height, 3 * width)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines.tobytes())), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(name, data) for name, data in chunks)


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
