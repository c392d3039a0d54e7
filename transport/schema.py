"""How each field of each message is written and checked. `codec` walks these tables; nothing else uses them.

A field kind has `write` (value -> something msgpack takes) and `read` (what msgpack gave -> value). Both raise
ProtocolError on a value out of its bounds, so that a sender finds its mistake and a receiver believes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, Field, dataclass
from typing import Any

import numpy as np

from wavecore.transport import messages
from wavecore.transport.errors import ProtocolError
from wavecore.transport.messages import Columns, FinishReason, TensorFrame
from wavecore.transport.tensors import DTYPES, MAX_DIMS, byte_length

ZERO_COPY_BYTES = 65_536  # pyzmq copies smaller frames anyway
MAX_DEPTH = 16
MAX_TEXT = 1 << 20
MAX_TENSORS = 1 << 16
MAX_DIM = 1 << 40
FRAME_LISTS = ("logprobs", "prompt_logprobs", "pooled")  # extras that are positions in Columns.frames


class TensorWriter:
    """Collects the bytes of one message's tensors."""

    def __init__(self) -> None:
        self._large: list[bytes | memoryview] = []
        self._small: list[bytes | memoryview] = []

    def add(self, buffer: bytes | memoryview) -> None:
        (self._large if len(buffer) >= ZERO_COPY_BYTES else self._small).append(buffer)

    def frames(self) -> list[bytes | memoryview]:
        return [*self._large, b"".join(self._small)] if self._small else self._large


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


@dataclass(frozen=True, slots=True)
class Kind:
    write: Callable[[Any, TensorWriter], Any]
    read: Callable[[Any, TensorReader], Any]


def _scalar(check: Callable[[Any], Any]) -> Kind:
    """A kind that looks the same in the message and on the wire."""
    return Kind(lambda value, _: check(value), lambda value, _: check(value))


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"must be a whole number from {low} to {high}, not {value!r:.40}")
        return value

    return check


def _bytes16(value: Any) -> bytes:
    if type(value) is not bytes or len(value) != 16:
        raise ProtocolError(f"must be 16 bytes, not {value!r:.40}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        raise ProtocolError(f"must be text of at most {MAX_TEXT} characters, not {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ProtocolError("must be text without lone surrogates") from None
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise ProtocolError(f"must be true or false, not {value!r:.40}")
    return value


def _real(value: Any) -> float:
    if type(value) is not float or not math.isfinite(value):
        raise ProtocolError(f"must be a finite float, not {value!r:.40}")
    return value


def _plain(value: Any, depth: int = 0) -> Any:
    """Any tree of None, bool, int, float, str, bytes, list, tuple (arrives as list) and dict with str or int keys."""
    kind = type(value)
    if depth > MAX_DEPTH:
        raise ProtocolError(f"nested deeper than {MAX_DEPTH}")
    if kind is dict:
        for key, item in value.items():
            if type(key) is str:
                _text(key)
            else:
                _INT64(key)
            _plain(item, depth + 1)
    elif kind is list or kind is tuple:
        for item in value:
            _plain(item, depth + 1)
    elif kind is int:
        _INT64(value)
    elif kind is str:
        _text(value)
    elif not (kind in (bool, float, bytes) or value is None):
        raise ProtocolError(f"a value of {kind.__module__}.{kind.__qualname__} cannot travel: make it a plain one")
    return value


def _table(value: Any) -> dict[str, Any]:
    if type(value) is not dict or not all(type(key) is str for key in value):
        raise ProtocolError(f"must be a map with text keys, not {type(value).__name__}")
    _plain(value)
    return value


def _write_tensor(value: TensorFrame, tensors: TensorWriter) -> list[Any]:
    size = _tensor_bytes(value.dtype, value.shape)
    buffer = value.buffer if isinstance(value.buffer, bytes) else value.buffer.cast("B")
    if size != len(buffer):
        raise ProtocolError(f"{value.dtype}{list(value.shape)} is {size} bytes, its buffer {len(buffer)}")
    tensors.add(buffer)
    return [value.dtype, value.shape]


def _read_tensor(raw: Any, tensors: TensorReader) -> TensorFrame:
    if type(raw) is not list or len(raw) != 2 or type(raw[1]) is not list:
        raise ProtocolError("must be a tensor [dtype, shape]")
    shape = tuple(raw[1])
    return TensorFrame(raw[0], shape, tensors.take(_tensor_bytes(raw[0], shape)))


def _tensor_bytes(dtype: Any, shape: tuple[Any, ...]) -> int:
    if type(dtype) is not str or dtype not in DTYPES:
        raise ProtocolError(f"unknown dtype {dtype!r:.40}")
    if len(shape) > MAX_DIMS:
        raise ProtocolError(f"{len(shape)} dimensions, {MAX_DIMS} at most")
    for dim in shape:
        _DIM(dim)
    return byte_length(dtype, shape)


def _write_tensors(value: tuple[TensorFrame, ...], tensors: TensorWriter) -> list[Any]:
    return [_write_tensor(frame, tensors) for frame in value]


def _read_tensors(raw: Any, tensors: TensorReader) -> tuple[TensorFrame, ...]:
    if type(raw) is not list or len(raw) > MAX_TENSORS:
        raise ProtocolError(f"must be a list of at most {MAX_TENSORS} tensors")
    return tuple(_read_tensor(item, tensors) for item in raw)


def _write_array(value: Any, dtype: np.dtype[Any]) -> bytes:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        raise ProtocolError(f"must be an array of {dtype} with one dimension")
    return value.tobytes()


def _read_array(raw: Any, dtype: np.dtype[Any]) -> Any:
    if type(raw) is not bytes or len(raw) % dtype.itemsize:
        raise ProtocolError(f"must be bytes of {dtype}")
    return np.frombuffer(raw, dtype)


def _array(name: str) -> Kind:
    dtype = np.dtype(name)
    return Kind(lambda value, _: _write_array(value, dtype), lambda raw, _: _read_array(raw, dtype))


def _write_columns(value: Columns, tensors: TensorWriter) -> list[Any]:
    _check_columns(value)
    row = [_write_array(getattr(value, name), dtype) for name, dtype in _COLUMN_DTYPES.items()]
    return [*row, value.extras, _write_tensors(value.frames, tensors)]


def _read_columns(raw: Any, tensors: TensorReader) -> Columns:
    if type(raw) is not list or len(raw) != len(_COLUMN_DTYPES) + 2:
        raise ProtocolError("must be columns")
    arrays = {name: _read_array(item, dtype) for item, (name, dtype) in zip(raw, _COLUMN_DTYPES.items(), strict=False)}
    columns = Columns(**arrays, extras=raw[-2], frames=_read_tensors(raw[-1], tensors))
    _check_columns(columns)
    return columns


def _check_columns(value: Columns) -> None:
    rows = len(value.handles)
    if len(value.counts) != rows or len(value.finish) != rows or int(value.counts.sum()) != len(value.tokens):
        raise ProtocolError(
            f"columns of {rows} handles, {len(value.counts)} counts, {len(value.finish)} finish codes, "
            f"{len(value.tokens)} tokens for a sum of {int(value.counts.sum())}"
        )
    if rows and int(value.finish.max()) > max(FinishReason):
        raise ProtocolError(f"unknown finish code {int(value.finish.max())}")
    if type(value.extras) is not dict:
        raise ProtocolError("extras must be a map")
    for index, extra in value.extras.items():
        if type(index) is not int or not 0 <= index < rows:
            raise ProtocolError(f"extras for row {index!r:.20} of {rows}")
        _table(extra)
        for name in FRAME_LISTS:
            positions = extra.get(name, ())
            if type(positions) not in (list, tuple):
                raise ProtocolError(f"{name} must be a list of frames")
            for position in positions:
                if type(position) is not int or not 0 <= position < len(value.frames):
                    raise ProtocolError(f"{name} names frame {position!r:.20} of {len(value.frames)}")


def _load(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ProtocolError("must be three whole numbers")
    return (_UINT64(value[0]), _UINT64(value[1]), _UINT64(value[2]))


_INT64 = _whole(-(1 << 63), (1 << 64) - 1)  # what msgpack can carry
_UINT64 = _whole(0, (1 << 64) - 1)
_DIM = _whole(0, MAX_DIM)
_COLUMN_DTYPES: dict[str, np.dtype[Any]] = {
    "handles": np.dtype("<u4"),
    "counts": np.dtype("<u4"),
    "tokens": np.dtype("<i4"),
    "finish": np.dtype("u1"),
}

_TOKEN = _scalar(_bytes16)
_NUMBER = _scalar(_whole(0, (1 << 63) - 1))
_COUNT = _scalar(_UINT64)
_TEXT = _scalar(_text)
_FLAG = _scalar(_flag)
_TABLE = _scalar(_table)
_TENSOR = Kind(_write_tensor, _read_tensor)
_TENSORS = Kind(_write_tensors, _read_tensors)
_MAYBE_TENSOR = Kind(
    lambda value, tensors: None if value is None else _write_tensor(value, tensors),
    lambda raw, tensors: None if raw is None else _read_tensor(raw, tensors),
)

FIELDS: dict[type, dict[str, Kind]] = {
    messages.Add: {
        "epoch": _TOKEN,
        "client": _TOKEN,
        "number": _NUMBER,
        "handle": _scalar(_whole(0, (1 << 32) - 1)),
        "prompt": _TENSOR,
        "params": _TABLE,
        "options": _TABLE,
        "prompt_embeds": _MAYBE_TENSOR,
    },
    messages.Abort: {"epoch": _TOKEN, "client": _TOKEN, "number": _NUMBER, "handles": _array("<u4")},
    messages.Utility: {
        "epoch": _TOKEN,
        "client": _TOKEN,
        "number": _NUMBER,
        "call": _COUNT,
        "method": _TEXT,
        "args": _TABLE,
    },
    messages.Hello: {"version": _TEXT},
    messages.Ping: {"epoch": _TOKEN, "seen": _NUMBER, "gap": _FLAG},
    messages.Ready: {"epoch": _TOKEN, "version": _TEXT, "engine": _COUNT, "resolved": _TABLE},
    messages.Step: {
        "epoch": _TOKEN,
        "number": _NUMBER,
        "columns": Kind(_write_columns, _read_columns),
        "load": _scalar(_load),
    },
    messages.Result: {
        "epoch": _TOKEN,
        "number": _NUMBER,
        "call": _COUNT,
        "last": _FLAG,
        "error_code": _TEXT,
        "error": _TEXT,
        "value": _scalar(_plain),
        "frames": _TENSORS,
    },
    messages.Heartbeat: {
        "epoch": _TOKEN,
        "sent": _NUMBER,
        "seen": _NUMBER,
        "steps": _COUNT,
        "running": _COUNT,
        "waiting": _COUNT,
        "tokens": _COUNT,
        "monotonic": _scalar(_real),
        "gap": _FLAG,
    },
    messages.Gone: {"epoch": _TOKEN},
    messages.Dead: {
        "epoch": _TOKEN,
        "code": _TEXT,
        "message": _TEXT,
        "phase": _TEXT,
        "rank": _scalar(_whole(-1, 1 << 20)),
        "traceback": _TEXT,
    },
}


def has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
