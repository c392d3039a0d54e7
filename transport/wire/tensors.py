"""Tensors on the wire: names of dtypes, numpy arrays to and from `TensorFrame`, and where their bytes go in a message.

numpy has no bfloat16 and no float8: such tensors appear as unsigned integers of the same width that hold the bits, and
the layer that knows torch views them.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire.messages import TensorFrame

MAX_DIMS = 8
ZERO_COPY_BYTES = 65_536  # pyzmq copies smaller frames anyway

DTYPES: dict[str, np.dtype[Any]] = {
    **{name: np.dtype(name).newbyteorder("<") for name in ("float64", "float32", "float16")},
    **{name: np.dtype(name).newbyteorder("<") for name in ("int64", "int32", "int16", "int8")},
    **{name: np.dtype(name).newbyteorder("<") for name in ("uint64", "uint32", "uint16", "uint8")},
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3fn": np.dtype("u1"),
    "float8_e5m2": np.dtype("u1"),
}


def from_numpy(array: npt.NDArray[Any], dtype: str | None = None) -> TensorFrame:
    """A frame over the array's memory; copies only what is strided or big-endian.

    The array must not be written to afterwards: the bytes leave later, without a copy.

    Args:
        dtype: a name from `DTYPES` when the array holds bits of a type that numpy lacks (uint16 for "bfloat16").

    Raises:
        ProtocolError: a dtype that does not travel, or more than 8 dimensions.
    """
    name = dtype or array.dtype.name
    wire = DTYPES.get(name)
    if wire is None or wire.itemsize != array.dtype.itemsize:
        raise ProtocolError(f"a tensor of {array.dtype} cannot travel as {name!r}; known: {', '.join(DTYPES)}")
    if array.ndim > MAX_DIMS:
        raise ProtocolError(f"a tensor of {array.ndim} dimensions cannot travel, {MAX_DIMS} at most: reshape it")
    contiguous = np.require(array.astype(array.dtype.newbyteorder("<"), copy=False), requirements="C")
    return TensorFrame(name, array.shape, contiguous.reshape(-1).view(np.uint8).data)


def to_numpy(frame: TensorFrame) -> npt.NDArray[Any]:
    """A read-only array over the frame's memory, without a copy."""
    array = np.frombuffer(frame.buffer, dtype=DTYPES[frame.dtype]).reshape(frame.shape)
    array.flags.writeable = False
    return array


def byte_length(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor; `dtype` must be known."""
    return math.prod(shape) * DTYPES[dtype].itemsize


def tensor_frames(tensors: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The frames that carry the bytes of one message's tensors; `TensorReader` takes them apart."""
    small = [tensor for tensor in tensors if len(tensor) < ZERO_COPY_BYTES]
    large = [tensor for tensor in tensors if len(tensor) >= ZERO_COPY_BYTES]
    return [*large, b"".join(small)] if small else large


class TensorReader:
    """Hands out the bytes of one message's tensors, each once and in order."""

    def __init__(self, frames: Sequence[bytes | memoryview]) -> None:
        self._frames = frames
        self._large = 0
        self._offset = 0
        self._has_small = False

    def take(self, length: int) -> bytes | memoryview:
        if length < ZERO_COPY_BYTES:
            return self._take_small(length)
        if self._large >= len(self._frames) or len(self._frames[self._large]) != length:
            raise ProtocolError(f"no frame of {length} bytes for this tensor")
        frame = memoryview(self._frames[self._large]).toreadonly()
        self._large += 1
        # libzmq aligns large frames; a copy saves whoever computes on the bytes if one day it does not.
        return frame if np.frombuffer(frame, np.uint8).ctypes.data % 8 == 0 else bytes(frame)

    def _take_small(self, length: int) -> bytes:
        self._has_small = True
        if not self._frames or self._offset + length > len(self._frames[-1]):
            raise ProtocolError(f"no {length} bytes left for this tensor")
        start, self._offset = self._offset, self._offset + length
        return bytes(self._frames[-1][start : self._offset])

    def finish(self) -> None:
        """Raise unless every byte of every frame was used."""
        used = self._large + self._has_small
        if used != len(self._frames) or (self._has_small and self._offset != len(self._frames[-1])):
            raise ProtocolError(f"{len(self._frames)} tensor frames, {used} named by the message")
