"""Messages survive the wire exactly; whatever else comes is a ProtocolError."""

from __future__ import annotations

import dataclasses
import pickle
import struct
import threading
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transport.wire.strategies import messages, same, tensors

from wavecore.transport.errors import MessageTooLarge, ProtocolError
from wavecore.transport.wire import codec
from wavecore.transport.wire import messages as m
from wavecore.transport.wire.codec import FIELDS, decode, encode
from wavecore.transport.wire.tensors import DTYPES, ZERO_COPY_BYTES, from_numpy, to_numpy

EPOCH = b"e" * 16
CLIENT = b"c" * 16


def result(*frames: m.TensorFrame, value: Any = None) -> m.Result:
    return m.Result(EPOCH, 1, 2, "", "", value, frames)


@given(messages)
def test_every_message_round_trips(message: m.Message) -> None:
    assert same(decode([bytes(frame) for frame in encode(message)]), message)


def test_the_schema_names_every_message_and_field() -> None:
    assert set(FIELDS) == set(get_args(m.Message))
    for cls, kinds in FIELDS.items():
        names = [field.name for field in dataclasses.fields(cls)]
        assert list(kinds) == sorted(names, key=lambda name: name != "number")


def check_hostile(frames: list[bytes]) -> None:
    """The property that the fuzzer (scripts/fuzz_wire.py) checks for hours."""
    try:
        message = decode(frames)
    except ProtocolError:
        return
    assert same(decode(encode(message)), message)


@given(st.lists(st.binary(max_size=200), max_size=4))
def test_random_frames(frames: list[bytes]) -> None:
    check_hostile(frames)


@given(messages, st.data())
def test_mutated_frames(message: m.Message, data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(message)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, len(frames) - 1))]
        action = data.draw(st.sampled_from(["flip", "cut", "grow", "drop", "double"]))
        if action == "flip" and frame:
            frame[data.draw(st.integers(0, min(len(frame), 200) - 1))] = data.draw(st.integers(0, 255))
        elif action == "cut" and frame:
            del frame[data.draw(st.integers(0, len(frame) - 1)) :]
        elif action == "grow":
            frame += data.draw(st.binary(min_size=1, max_size=9))
        elif action == "drop" and len(frames) > 1:
            frames.remove(frame)
        else:
            frames.append(frame)
    check_hostile([bytes(frame) for frame in frames])


values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 300) | st.floats() | st.text(max_size=5) | st.binary(max_size=16),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4) | st.integers(-9, 9), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(st.integers(0, 12), st.lists(values | st.binary(min_size=16, max_size=16), max_size=9), st.lists(st.binary()))
def test_well_formed_msgpack_of_a_wrong_shape(kind: int, row: list[Any], frames: list[bytes]) -> None:
    check_hostile([msgpack.packb([m.PROTOCOL_VERSION, kind, *row]), *frames])


def headers() -> st.SearchStrategy[Any]:
    dims = st.lists(st.integers(-2, 9) | st.sampled_from([1 << 31, 1 << 40, 1 << 62, True, 1.0, None]), max_size=10)
    return st.tuples(st.sampled_from([*DTYPES, "object", "bool", "", 3]), dims)


@given(st.lists(headers() | tensors(large=False).map(lambda t: (t.dtype, list(t.shape))), max_size=4), st.data())
def test_lying_tensor_headers(rows: list[Any], data: st.DataObject) -> None:
    """The exact tensor or ProtocolError, never a byte beyond a frame."""
    frames = data.draw(st.lists(st.binary(max_size=300), max_size=3))
    check_hostile([msgpack.packb([1, 8, EPOCH, 1, 2, True, "", "", None, rows]), *frames])


def test_a_pickle_does_nothing(tmp_path: Path) -> None:
    """A payload that would make a file, in every place where bytes may stand."""
    witness = tmp_path / "witness"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (witness,)

    evil = pickle.dumps(Payload())
    for frames in (
        [evil],
        [msgpack.packb(evil)],
        [msgpack.packb([1, 1, evil])],
        [msgpack.packb(msgpack.ExtType(1, evil))],
    ):
        with pytest.raises(ProtocolError):
            decode(frames)
    message = decode(encode(m.Utility(EPOCH, CLIENT, 1, 1, "echo", {"x": evil})))
    assert isinstance(message, m.Utility) and message.args == {"x": evil}
    assert not witness.exists()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(4, 6).T,
        np.arange(100, dtype=np.int64)[::3],
        np.arange(60, dtype=np.int16).reshape(3, 4, 5)[:, ::-2, 1:4],
        np.float64(3.5).reshape(()),
        np.empty((0, 7), np.uint8),
        np.arange(10, dtype=">i4"),
        np.broadcast_to(np.float16(2.0), (3, 5)),
        np.arange(1 << 18, dtype=np.int32).reshape(512, 512).T,
    ],
    ids=["transposed", "strided", "negative-stride", "0-d", "empty", "big-endian", "broadcast", "large-transposed"],
)
def test_arrays_round_trip(array: np.ndarray[Any, Any]) -> None:
    """Strides, byte order and size do not matter; what arrives cannot be written to."""
    back = decode([bytes(frame) for frame in encode(result(from_numpy(array)))])
    assert isinstance(back, m.Result)
    got = to_numpy(back.frames[0])
    assert got.shape == array.shape
    assert np.array_equal(got, array)
    assert not got.flags.writeable


@pytest.mark.parametrize(
    ("name", "bits"), [("bfloat16", np.uint16), ("float8_e4m3fn", np.uint8), ("float8_e5m2", np.uint8)]
)
def test_types_that_numpy_lacks_travel_as_bits(name: str, bits: type) -> None:
    array = np.arange(200, dtype=bits).reshape(10, 20)
    back = decode(encode(result(from_numpy(array, name))))
    assert isinstance(back, m.Result)
    assert back.frames[0].dtype == name
    assert np.array_equal(to_numpy(back.frames[0]), array)


@pytest.mark.parametrize("array", [np.array([object()]), np.array(["x"]), np.zeros(2, bool), np.zeros(2, complex)])
def test_arrays_that_cannot_travel(array: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ProtocolError, match="cannot travel"):
        from_numpy(array)
    with pytest.raises(ProtocolError, match="cannot travel"):
        from_numpy(np.zeros(2, np.float32), "bfloat16")
    with pytest.raises(ProtocolError, match="dimensions"):
        from_numpy(np.zeros((1,) * 9, np.float32))


def test_large_tensors_are_not_copied_and_small_ones_are_aligned() -> None:
    large = np.zeros(ZERO_COPY_BYTES, np.uint8)
    small = np.arange(3, dtype=np.uint8)
    frames = encode(result(from_numpy(small), from_numpy(large), from_numpy(np.arange(5.0))))
    assert len(frames) == 3
    assert np.shares_memory(np.frombuffer(frames[1], np.uint8), large)
    back = decode(frames)
    assert isinstance(back, m.Result)
    assert np.shares_memory(to_numpy(back.frames[1]), large)
    assert to_numpy(back.frames[2]).flags.aligned  # its bytes lay 3 bytes into the shared frame


def test_a_misaligned_large_frame_is_copied() -> None:
    frames = encode(result(from_numpy(np.arange(1 << 16, dtype=np.float64))))
    shifted = np.empty((1 << 19) + 1, np.uint8)
    shifted[1:] = np.frombuffer(frames[1], np.uint8)
    back = decode([frames[0], memoryview(shifted)[1:]])
    assert isinstance(back, m.Result)
    assert to_numpy(back.frames[0]).flags.aligned


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "message",
    [
        m.Ping(b"short", 1),
        m.Ping(EPOCH, -1),
        m.Ping(EPOCH, True),
        m.Dead(EPOCH, "\ud800", "", ""),
        m.Heartbeat(EPOCH, 0, m.Load(0, 0, -1)),
        m.Heartbeat(EPOCH, 0, (1, 2)),  # type: ignore[arg-type]
        m.Utility(EPOCH, CLIENT, 1, 1, "m", {"x": object()}),
        m.Utility(EPOCH, CLIENT, 1, 1, "m", {"x": np.float32(1)}),
        m.Utility(EPOCH, CLIENT, 1, 1, "m", {"x": 1 << 64}),
        m.Utility(EPOCH, CLIENT, 1, 1, "m", {"x": deep(17)}),
        m.Utility(EPOCH, CLIENT, 1, 1, "m", {3: 1}),  # type: ignore[dict-item]
        m.Abort(EPOCH, CLIENT, 1, np.zeros(2, np.int64)),  # type: ignore[arg-type]
        result(m.TensorFrame("int32", (3,), b"12345678")),
        result(m.TensorFrame("pickle", (3,), b"123")),
        m.Step(EPOCH, 1, m.StepTokens(*(np.zeros(2, t) for t in (np.uint32, np.uint32, np.int32, np.uint8)))),
    ],
)  # fmt: skip
def test_a_sender_learns_what_the_peer_would_refuse(message: m.Message) -> None:
    with pytest.raises(ProtocolError, match=type(message).__name__):
        encode(message)


def test_sizes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MessageTooLarge, match="outside of tensors"):
        encode(m.Utility(EPOCH, CLIENT, 1, 1, "m", {"x": b"x" * (1 << 16)}))
    with pytest.raises(MessageTooLarge, match="split it"):
        encode(result(from_numpy(np.zeros(codec.MAX_FRAME_BYTES + 1, np.uint8))))
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1 << 20)
    with pytest.raises(MessageTooLarge):
        encode(result(*[from_numpy(np.zeros(400_000, np.uint8))] * 3))
    with pytest.raises(ProtocolError):
        decode([b"x" * 400_000] * 4)
    with pytest.raises(ProtocolError, match="at most"):
        decode([bytes((0x92, m.PROTOCOL_VERSION, 3)) + bytes(1 << 16)])


@pytest.mark.parametrize(
    "frame",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G items
        b"\xc6\xff\xff\xff\xff",  # 4 GB of bytes
        b"\x91" * 2000 + b"\xc0",  # nested too deep
        b"\xc1",  # reserved
        msgpack.packb(msgpack.Timestamp(1)),
        msgpack.packb({1: 2}),
        b"\x81\x90\x01",  # a map whose key is a list
        msgpack.packb([1, 2]) + b"x",
        msgpack.packb([m.PROTOCOL_VERSION, 11, EPOCH, b"not text", "", ""]),
        struct.pack("BBB", 0x92, m.PROTOCOL_VERSION, 5),  # too few fields
        msgpack.packb([m.PROTOCOL_VERSION, 4, "v", "one field too many"]),
        msgpack.packb([True, 4, "v"]),
        b"",
    ],
)
def test_hostile_msgpack(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode([frame])


def hostile_values(size: int) -> dict[str, bytes]:
    """msgpack of about `size` bytes that would take many times as much as Python's objects."""
    array = b"\xdd" + struct.pack(">I", 1 << 16)
    many = size >> 16
    return {
        "empty lists": b"\xdd" + struct.pack(">I", many) + (array + b"\x90" * (1 << 16)) * many,
        "empty maps": b"\xdd" + struct.pack(">I", many) + (array + b"\x80" * (1 << 16)) * many,
        "small maps": b"\xdd" + struct.pack(">I", many // 3) + (array + b"\x81\x01\xc0" * (1 << 16)) * (many // 3),
        "long lists that are not there": (b"\xdd" + struct.pack(">I", codec.MAX_ITEMS)) * 500,
        "deep lists": b"\x91" * 900 + b"\xc0",
        "numbers": b"\xdd" + struct.pack(">I", size // 3) + b"\xcd\x7f\xff" * (size // 3),
        "keys": b"\xdf"
        + struct.pack(">I", size // 4)
        + b"".join(struct.pack(">BHB", 0xCD, i, 0xC0) for i in range(size // 4) if i < 65536),
    }


@pytest.mark.parametrize("what", sorted(hostile_values(1 << 16)))
@pytest.mark.parametrize("cls", [m.Utility, m.Add, m.Abort, m.Step, m.Ping])
def test_no_message_becomes_many_times_its_size(cls: type, what: str) -> None:
    """4 MB of empty lists would become 280 MB of objects: the bytes, lists and maps of a message are bounded by its
    kind before anything is made of it."""
    most = codec.MAIN_BYTES.get(cls, codec.OTHER_MAIN_BYTES)
    for size in (most - 300, 4 << 20):
        value = hostile_values(size)[what]
        code = list(codec.FIELDS).index(cls) + 1
        frame = b"\x93" + bytes((m.PROTOCOL_VERSION, code)) + value
        tracemalloc.start()
        with pytest.raises(ProtocolError):
            decode([frame])
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 * most + (1 << 20)


def test_another_protocol_version_says_so() -> None:
    with pytest.raises(ProtocolError, match="protocol 1"):
        decode([msgpack.packb([1, 4, "v"])])


def test_a_fault_after_the_head_says_whose_message_it_is() -> None:
    add = m.Add(EPOCH, CLIENT, 5, 77, from_numpy(np.arange(3, dtype=np.int32)), {})
    main, pack = encode(add)
    with pytest.raises(ProtocolError, match=r"Add\.prompt") as caught:
        decode([main, pack[:-1]])
    assert caught.value.partial == (m.Add, {"epoch": EPOCH, "client_id": CLIENT, "number": 5, "handle": 77})


def test_defaults_may_be_left_out() -> None:
    assert decode([msgpack.packb([m.PROTOCOL_VERSION, 5, EPOCH, 9])]) == m.Ping(EPOCH, 9, gap=False)


@settings(max_examples=1)
@given(st.lists(messages, min_size=20, max_size=20))
def test_encoding_in_two_threads(batch: list[m.Message]) -> None:
    """Nothing is shared, so nothing can be mixed up."""
    expected = [b"".join(encode(message)) for message in batch]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            for index, message in enumerate(batch):
                frames = encode(message)
                if b"".join(frames) != expected[index] or not same(decode(frames), message):
                    wrong.append(index)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
