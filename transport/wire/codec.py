"""Messages to frames and back. Checks everything, keeps no state, so any thread may use it at any time.

    frame 0        msgpack [PROTOCOL_VERSION, kind, field, ...]
    frame 1..n     one tensor each, of 64 KiB or more, never copied on either side
    last frame     all smaller tensors, back to back (only if there are any); copied on arrival, so they are aligned

In the fields a tensor is `[dtype, shape]`. Tensors take their bytes in the order in which they stand in the fields and
must use up all of them, so there is no index or offset on the wire that could lie.

`decode` yields the message that was encoded or raises ProtocolError, whatever the bytes; nothing on the wire can name
code or a type to import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgpack

from wavecore.transport.errors import MessageTooLarge, ProtocolError
from wavecore.transport.wire import messages
from wavecore.transport.wire.schema import FIELDS, has_default
from wavecore.transport.wire.tensors import ZERO_COPY_BYTES, TensorReader, TensorWriter

Buffer = bytes | memoryview
Frames = list[Buffer]

MAX_FRAME_BYTES = 104_857_600  # also ZMQ_MAXMSGSIZE: an over-size frame would cut the connection without a word
MAX_MESSAGE_BYTES = 2 * MAX_FRAME_BYTES  # ZMQ bounds a frame only
MAX_MAIN_BYTES = 4 << 20  # msgpack can blow up 64-fold in memory (empty lists), so the structured part stays small
MAX_FRAMES = 2 + MAX_MESSAGE_BYTES // ZERO_COPY_BYTES
MAX_ITEMS = 1 << 17  # of one array or map

_CLASSES = tuple(FIELDS)  # kind n on the wire is the n-th of them, from 1
_NUMBERS = {cls: number for number, cls in enumerate(_CLASSES, start=1)}
_REQUIRED = {cls: sum(not has_default(field) for field in fields(cls)) for cls in _CLASSES}


def encode(message: messages.Message) -> Frames:
    """The message as frames, ready for `send_multipart(copy=False)`.

    Raises:
        MessageTooLarge: over one of the bounds above.
        ProtocolError: a value that the peer would refuse (type, range, depth).
    """
    cls = type(message)
    tensors = TensorWriter()
    row: list[Any] = [messages.PROTOCOL_VERSION, _NUMBERS[cls]]
    for name, kind in FIELDS[cls].items():
        try:
            row.append(kind.write(getattr(message, name), tensors))
        except ProtocolError as error:
            raise type(error)(f"{cls.__name__}.{name}: {error}") from None
    frames: Frames = [msgpack.packb(row), *tensors.frames()]
    if len(frames[0]) > MAX_MAIN_BYTES:
        raise MessageTooLarge(f"{cls.__name__}: {len(frames[0])} bytes outside of tensors, {MAX_MAIN_BYTES} at most")
    largest = max(map(len, frames))
    if largest > MAX_FRAME_BYTES or total_bytes(frames) > MAX_MESSAGE_BYTES or len(frames) > MAX_FRAMES:
        raise MessageTooLarge(
            f"{cls.__name__}: {total_bytes(frames)} bytes in {len(frames)} frames, the largest {largest}; "
            f"at most {MAX_MESSAGE_BYTES}, {MAX_FRAMES} and {MAX_FRAME_BYTES}: split it"
        )
    return frames


def decode(frames: Sequence[Buffer]) -> messages.Message:
    """The message in these frames; its tensors of 64 KiB or more alias them.

    Raises:
        ProtocolError: and never anything else, whatever the frames hold.
    """
    if not frames or len(frames) > MAX_FRAMES or total_bytes(frames) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(frames)} frames, {total_bytes(frames)} bytes")
    row = _unpack(frames[0])
    if not isinstance(row, list) or len(row) < 2:
        raise ProtocolError("the first frame is not a message")
    if type(row[0]) is not int or row[0] != messages.PROTOCOL_VERSION:
        raise ProtocolError(
            f"peer speaks protocol {row[0]!r:.20}, this version {messages.PROTOCOL_VERSION}: use the same version of "
            "wavecore on both sides"
        )
    if type(row[1]) is not int or not 1 <= row[1] <= len(_CLASSES):
        raise ProtocolError(f"unknown kind of message {row[1]!r:.20}")
    cls = _CLASSES[row[1] - 1]
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


def total_bytes(frames: Sequence[Buffer]) -> int:
    return sum(frame.nbytes if isinstance(frame, memoryview) else len(frame) for frame in frames)


def _unpack(frame: Buffer) -> Any:
    if len(frame) > MAX_MAIN_BYTES:
        raise ProtocolError(f"first frame of {len(frame)} bytes, {MAX_MAIN_BYTES} at most")
    try:
        return msgpack.unpackb(
            frame,
            strict_map_key=False,  # extras are keyed by index; the schema checks every key
            ext_hook=_refuse_ext,
            max_ext_len=0,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"the first frame is not msgpack: {type(error).__name__} {error!s:.80}") from None


def _refuse_ext(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code} of {len(data)} bytes")
