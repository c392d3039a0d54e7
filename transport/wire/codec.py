"""Messages to frames and back. Checks everything, keeps no state, so any thread may use it at any time.

    frame 0        msgpack [PROTOCOL_VERSION, kind, field, ...]; in kinds with a `number` that is the first field, as 8
                   bytes, so that it can be written in when the message leaves (`numbered`)
    frame 1..n     one tensor each, of 64 KiB or more, never copied on either side
    last frame     all smaller tensors, back to back (only if there are any); copied on arrival, so they are aligned

In the fields a tensor is `[dtype, shape]`. Tensors take their bytes in the order in which they stand in the fields and
must use up all of them, so there is no index or offset on the wire that could lie.

`decode` yields the message that was encoded or raises ProtocolError, whatever the bytes; nothing on the wire can name
code or a type to import.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import partial
from typing import Any, get_args

import msgpack
import numpy as np

from wavecore.transport.errors import MessageTooLarge, ProtocolError
from wavecore.transport.wire import messages
from wavecore.transport.wire.checks import ON_WIRE, bytes16, plain, table, text
from wavecore.transport.wire.messages import Load, StepTokens, TensorFrame
from wavecore.transport.wire.step_tokens import check_step_tokens
from wavecore.transport.wire.tensors import DTYPES, MAX_DIMS, TensorReader, byte_length, tensor_frames

Buffer = bytes | memoryview  # a view is one of bytes: its length is their number
Frames = list[Buffer]

MAX_FRAME_BYTES = 104_857_600
MAX_MESSAGE_BYTES = 2 * MAX_FRAME_BYTES
MAX_PACKET_BYTES = 1 << 20  # of what a socket carries as one frame (ZMQ_MAXMSGSIZE); what is larger leaves in pieces
# msgpack blows up in memory, empty lists 64-fold: the structured part is bounded by kind, and so are its containers.
MAIN_BYTES = {
    **dict.fromkeys((messages.Step, messages.Result), 4 << 20),
    **dict.fromkeys((messages.Add, messages.Abort, messages.Ready, messages.Dead), 1 << 20),
}
OTHER_MAIN_BYTES = 64 << 10
BYTES_A_CONTAINER = 32  # of the structured part, at least, on average
MAX_ITEMS = 1 << 17  # of one array or map
MAX_DIM = 1 << 40
MAX_COUNT = (1 << 64) - 1
MAX_RANKS = 1 << 16


def encode(message: messages.Message) -> Frames:
    """The message as frames, ready for `send_multipart(copy=False)`.

    Raises:
        MessageTooLarge: over one of the bounds above.
        ProtocolError: a value that the peer would refuse (type, range, depth).
    """
    cls = type(message)
    tensors: list[Buffer] = []
    row: list[Any] = [messages.PROTOCOL_VERSION, _CODES[cls]]
    for name, kind in FIELDS[cls].items():
        try:
            row.append(kind.write(getattr(message, name), tensors))
        except ProtocolError as error:
            raise type(error)(f"{cls.__name__}.{name}: {error}") from None
    frames: Frames = [msgpack.packb(row), *tensor_frames(tensors)]
    if len(frames[0]) > (most := MAIN_BYTES.get(cls, OTHER_MAIN_BYTES)):
        raise MessageTooLarge(f"{cls.__name__}: {len(frames[0])} bytes outside of tensors, {most} at most")
    largest = max(map(len, frames))
    if largest > MAX_FRAME_BYTES or total_bytes(frames) > MAX_MESSAGE_BYTES:
        raise MessageTooLarge(
            f"{cls.__name__}: {total_bytes(frames)} bytes, its largest tensor {largest}; "
            f"at most {MAX_MESSAGE_BYTES} and {MAX_FRAME_BYTES}: split it"
        )
    return frames


def decode(frames: Sequence[Buffer]) -> messages.Message:
    """The message in these frames; its tensors of 64 KiB or more alias them.

    Raises:
        ProtocolError: and never anything else, whatever the frames hold.
    """
    if not frames or total_bytes(frames) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frames)} frames, {total_bytes(frames)} bytes")
    main = frames[0]
    if len(main) < 3 or main[0] & 0xF0 != 0x90:  # an array of at most 15 fields
        raise ProtocolError("the first frame is not a message")
    if main[1] != messages.PROTOCOL_VERSION:
        raise ProtocolError(
            f"peer speaks protocol {main[1]}, this version {messages.PROTOCOL_VERSION}: use the same version of "
            "wavecore on both sides"
        )
    if not 1 <= main[2] <= len(_CLASSES):
        raise ProtocolError(f"unknown kind of message {main[2]}")
    cls = _CLASSES[main[2] - 1]
    row = _unpack(main, MAIN_BYTES.get(cls, OTHER_MAIN_BYTES))
    kinds = FIELDS[cls]
    if not _REQUIRED[cls] <= len(row) - 2 <= len(kinds):
        raise ProtocolError(f"{cls.__name__} with {len(row) - 2} fields, it has {len(kinds)}")
    tensors = TensorReader(frames[1:])
    values: dict[str, Any] = {}
    try:
        for (place, kind), raw in zip(kinds.items(), row[2:], strict=False):
            values[place] = kind.read(raw, tensors)
        place = "frames"
        tensors.finish()
    except ProtocolError as error:
        fault = type(error)(f"{cls.__name__}.{place}: {error}")
        fault.partial = (cls, values)
        raise fault from None
    message: messages.Message = cls(**values)
    return message


def numbered(frames: Frames, number: int) -> Frames:
    """The same message of a numbered kind under another number."""
    head = bytes(frames[0])
    return [head[: _NUMBER_AT.start] + _write_number(number) + head[_NUMBER_AT.stop :], *frames[1:]]


def total_bytes(frames: Sequence[Buffer]) -> int:
    return sum(map(len, frames))


def _unpack(frame: Buffer, most: int) -> list[Any]:
    if len(frame) > most:
        raise ProtocolError(f"first frame of {len(frame)} bytes, {most} at most")
    made = itertools.count(1)

    def counted(container: Any) -> Any:
        if next(made) * BYTES_A_CONTAINER > most:
            raise ValueError("too many lists and maps")
        return container

    try:
        row: list[Any] = msgpack.unpackb(
            frame,
            strict_map_key=False,  # extras are keyed by index; `check_step_tokens` checks every key
            list_hook=counted,
            object_hook=counted,
            ext_hook=_refuse_ext,
            max_ext_len=0,
            max_array_len=min(MAX_ITEMS, len(frame)),
            max_map_len=min(MAX_ITEMS, len(frame)),
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the first frame is not msgpack: {type(error).__name__} {error!s:.80}") from None
    return row


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} of {len(data)} bytes")


# --- how each field is written and checked ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kind:
    """How fields of one kind are written (a value -> something msgpack takes) and read (what msgpack gave -> a value).

    Both raise ProtocolError on a value out of its bounds, so that a sender finds its mistake and a receiver believes
    nothing.
    """

    write: Callable[[Any, list[Buffer]], Any]
    read: Callable[[Any, TensorReader], Any]


def _scalar(check: Callable[[Any], Any]) -> Kind:
    """A kind that looks the same in the message and on the wire."""
    return Kind(lambda value, _: check(value), lambda value, _: check(value))


def _whole(low: int, high: int) -> Kind:
    return _scalar(lambda value: ON_WIRE.whole("", value, low, high))


def _write_tensor(value: TensorFrame, tensors: list[Buffer]) -> list[Any]:
    size = _tensor_bytes(value.dtype, value.shape)
    buffer = value.buffer if isinstance(value.buffer, bytes) else value.buffer.cast("B")
    if size != len(buffer):
        raise ProtocolError(f"{value.dtype}{list(value.shape)} is {size} bytes, its buffer {len(buffer)}")
    tensors.append(buffer)
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


def _read_tensors(raw: Any, tensors: TensorReader) -> tuple[TensorFrame, ...]:
    if type(raw) is not list:
        raise ProtocolError("must be a list of tensors")
    return tuple(_read_tensor(item, tensors) for item in raw)


def _write_array(value: Any, dtype: np.dtype[Any]) -> bytes:
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        raise ProtocolError(f"must be an array of {dtype} with one dimension")
    return value.tobytes()


def _read_array(raw: Any, dtype: np.dtype[Any]) -> Any:
    if type(raw) is not bytes or len(raw) % dtype.itemsize:
        raise ProtocolError(f"must be bytes of {dtype}")
    return np.frombuffer(raw, dtype)


def _write_step_tokens(value: StepTokens, tensors: list[Buffer]) -> list[Any]:
    check_step_tokens(value)
    row = [_write_array(getattr(value, name), dtype) for name, dtype in _COLUMN_DTYPES.items()]
    return [*row, value.extras, [_write_tensor(frame, tensors) for frame in value.frames]]


def _read_step_tokens(raw: Any, tensors: TensorReader) -> StepTokens:
    if type(raw) is not list or len(raw) != len(_COLUMN_DTYPES) + 2:
        raise ProtocolError("must be the output of a step")
    arrays = {name: _read_array(item, dtype) for item, (name, dtype) in zip(raw, _COLUMN_DTYPES.items(), strict=False)}
    output = StepTokens(**arrays, extras=raw[-2], frames=_read_tensors(raw[-1], tensors))
    check_step_tokens(output)
    return output


def _counts(raw: Any) -> list[int]:
    if type(raw) is not list or len(raw) != len(Load._fields):
        raise ProtocolError("must be the load of an engine")
    return [ON_WIRE.whole("", count, 0, MAX_COUNT) for count in raw]


def _write_number(value: Any) -> bytes:
    return ON_WIRE.whole("", value, 0, MAX_COUNT).to_bytes(8, "little")


def _read_number(raw: Any) -> int:
    if type(raw) is not bytes or len(raw) != 8:
        raise ProtocolError("must be 8 bytes")
    return int.from_bytes(raw, "little")


def _votes(raw: Any) -> dict[int, tuple[int, ...]]:
    if type(raw) is not dict or any(type(vote) not in (list, tuple) for vote in raw.values()):
        raise ProtocolError("must be votes by rank")
    votes = {ON_WIRE.whole("", rank, 0, MAX_RANKS): tuple(vote) for rank, vote in raw.items()}
    for vote in votes.values():
        ON_WIRE.whole("", len(vote), messages.VOTE_NUMBERS, messages.VOTE_NUMBERS)
        ON_WIRE.numbers("", vote, 0, MAX_COUNT)
    return votes


_U32 = np.dtype("<u4")
_COLUMN_DTYPES: dict[str, np.dtype[Any]] = {
    "handles": _U32,
    "counts": _U32,
    "tokens": np.dtype("<i4"),
    "finish": np.dtype("u1"),
}

# A field means the same in every message that has it.
KINDS: dict[str, Kind] = {
    **dict.fromkeys(("epoch", "client_id"), _scalar(bytes16)),
    **dict.fromkeys(("sent", "seen", "attempt", "call", "agreement"), _whole(0, MAX_COUNT)),
    **dict.fromkeys(("method", "error_code", "error", "code", "message", "phase", "host", "kind"), _scalar(text)),
    **dict.fromkeys(("gap", "again", "last"), _scalar(partial(ON_WIRE.flag, ""))),
    **dict.fromkeys(("rank", "record"), _whole(0, MAX_RANKS)),
    "words": _scalar(lambda value: ON_WIRE.numbers("", value, 0, MAX_COUNT)),
    "votes": _scalar(_votes),
    **dict.fromkeys(("params", "options", "args", "resolved"), _scalar(table)),
    "handle": _whole(0, (1 << 32) - 1),
    **dict.fromkeys(
        ("handles", "sizes"), Kind(lambda value, _: _write_array(value, _U32), lambda raw, _: _read_array(raw, _U32))
    ),
    "lane": _whole(0, 1),
    "number": Kind(lambda value, _: _write_number(value), lambda raw, _: _read_number(raw)),
    **dict.fromkeys(("prompt", "data"), Kind(_write_tensor, _read_tensor)),
    "prompt_embeds": Kind(
        lambda value, tensors: None if value is None else _write_tensor(value, tensors),
        lambda raw, tensors: None if raw is None else _read_tensor(raw, tensors),
    ),
    "frames": Kind(lambda value, tensors: [_write_tensor(frame, tensors) for frame in value], _read_tensors),
    "output": Kind(_write_step_tokens, _read_step_tokens),
    "load": Kind(lambda value, _: _counts(list(value)), lambda raw, _: Load(*_counts(raw))),
    "value": _scalar(plain),
}
# Message n on the wire is the n-th of the union, from 1. Fields come in the order of the dataclass: new ones last.
FIELDS = {
    cls: {
        name: KINDS[name] for name in sorted((field.name for field in fields(cls)), key=lambda name: name != "number")
    }
    for cls in get_args(messages.Message)
}
_CLASSES = tuple(FIELDS)
_CODES = {cls: code for code, cls in enumerate(_CLASSES, start=1)}
_NUMBER_AT = slice(5, 13)  # behind a byte each for the array, the version and the kind, and two for the bytes' length
_REQUIRED = {
    cls: sum(field.default is MISSING and field.default_factory is MISSING for field in fields(cls)) for cls in _CLASSES
}
