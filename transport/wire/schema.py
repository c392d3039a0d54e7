"""How each field of each message is written and checked. `codec` walks these tables; nothing else uses them.

A field kind has `write` (value -> something msgpack takes) and `read` (what msgpack gave -> value). Both raise
ProtocolError on a value out of its bounds, so that a sender finds its mistake and a receiver believes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass
from functools import partial
from typing import Any

import numpy as np

from wavecore.transport.errors import ProtocolError
from wavecore.transport.wire import messages
from wavecore.transport.wire.checks import FINITE, ON_WIRE, bytes16, plain, table, text
from wavecore.transport.wire.messages import StepTokens, TensorFrame
from wavecore.transport.wire.step_tokens import check_step_tokens
from wavecore.transport.wire.tensors import DTYPES, MAX_DIMS, TensorReader, TensorWriter, byte_length

MAX_TENSORS = 1 << 16
MAX_DIM = 1 << 40
MAX_COUNT = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Kind:
    write: Callable[[Any, TensorWriter], Any]
    read: Callable[[Any, TensorReader], Any]


def _scalar(check: Callable[[Any], Any]) -> Kind:
    """A kind that looks the same in the message and on the wire."""
    return Kind(lambda value, _: check(value), lambda value, _: check(value))


def _whole(low: int, high: int) -> Kind:
    whole = ON_WIRE.whole
    return Kind(lambda value, _: whole("", value, low, high), lambda value, _: whole("", value, low, high))


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
        ON_WIRE.whole("", dim, 0, MAX_DIM)
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


def _write_step_tokens(value: StepTokens, tensors: TensorWriter) -> list[Any]:
    check_step_tokens(value)
    row = [_write_array(getattr(value, name), dtype) for name, dtype in _COLUMN_DTYPES.items()]
    return [*row, value.extras, _write_tensors(value.frames, tensors)]


def _read_step_tokens(raw: Any, tensors: TensorReader) -> StepTokens:
    if type(raw) is not list or len(raw) != len(_COLUMN_DTYPES) + 2:
        raise ProtocolError("must be the output of a step")
    arrays = {name: _read_array(item, dtype) for item, (name, dtype) in zip(raw, _COLUMN_DTYPES.items(), strict=False)}
    output = StepTokens(**arrays, extras=raw[-2], frames=_read_tensors(raw[-1], tensors))
    check_step_tokens(output)
    return output


def _load(value: Any) -> tuple[int, int, int]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ProtocolError("must be three whole numbers")
    whole = ON_WIRE.whole
    return (whole("", value[0], 0, MAX_COUNT), whole("", value[1], 0, MAX_COUNT), whole("", value[2], 0, MAX_COUNT))


_COLUMN_DTYPES: dict[str, np.dtype[Any]] = {
    "handles": np.dtype("<u4"),
    "counts": np.dtype("<u4"),
    "tokens": np.dtype("<i4"),
    "finish": np.dtype("u1"),
}

_TOKEN = _scalar(bytes16)
_NUMBER = _whole(0, (1 << 63) - 1)
_COUNT = _whole(0, MAX_COUNT)
_TEXT = _scalar(text)
_FLAG = _scalar(partial(ON_WIRE.flag, ""))
_TABLE = _scalar(table)
_TENSOR = Kind(_write_tensor, _read_tensor)
_TENSORS = Kind(_write_tensors, _read_tensors)
_MAYBE_TENSOR = Kind(
    lambda value, tensors: None if value is None else _write_tensor(value, tensors),
    lambda raw, tensors: None if raw is None else _read_tensor(raw, tensors),
)

# In the order of the kinds on the wire, fields in the order of the dataclass: new ones last.
FIELDS: dict[type, dict[str, Kind]] = {
    messages.Add: {
        "epoch": _TOKEN,
        "client_id": _TOKEN,
        "number": _NUMBER,
        "handle": _whole(0, (1 << 32) - 1),
        "prompt": _TENSOR,
        "params": _TABLE,
        "options": _TABLE,
        "prompt_embeds": _MAYBE_TENSOR,
    },
    messages.Abort: {"epoch": _TOKEN, "client_id": _TOKEN, "number": _NUMBER, "handles": _array("<u4")},
    messages.Utility: {
        "epoch": _TOKEN,
        "client_id": _TOKEN,
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
        "output": Kind(_write_step_tokens, _read_step_tokens),
        "load": _scalar(_load),
    },
    messages.Result: {
        "epoch": _TOKEN,
        "number": _NUMBER,
        "call": _COUNT,
        "last": _FLAG,
        "error_code": _TEXT,
        "error": _TEXT,
        "value": _scalar(plain),
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
        "monotonic": _scalar(lambda value: ON_WIRE.real("", value, *FINITE)),
        "gap": _FLAG,
    },
    messages.UnknownClient: {"epoch": _TOKEN},
    messages.Dead: {
        "epoch": _TOKEN,
        "code": _TEXT,
        "message": _TEXT,
        "phase": _TEXT,
        "rank": _whole(-1, 1 << 20),
        "traceback": _TEXT,
    },
    messages.Bye: {"epoch": _TOKEN, "sent": _NUMBER},
}


def has_default(field: Field[Any]) -> bool:
    return field.default is not MISSING or field.default_factory is not MISSING
