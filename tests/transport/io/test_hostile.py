"""Frames that break the protocol, on the real sockets: dropped, counted or answered; the pumps go on for everyone."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.waiting import until
from tests.transport.wire.strategies import messages

from wavecore.transport.io.client_stream import ClientLimits
from wavecore.transport.wire import messages as m
from wavecore.transport.wire.codec import decode, encode
from wavecore.transport.wire.tensors import from_numpy


class Raw:
    """A client that speaks frames, with a session of its own."""

    def __init__(self, engine: Any, raw_socket: Callable[..., zmq.Socket[bytes]]) -> None:
        self.client_id = b"raw client 16 by"
        self.epoch = engine.epoch
        self.push = raw_socket(zmq.PUSH, engine.addresses[0])
        self.dealer = raw_socket(zmq.DEALER, engine.addresses[1], self.client_id)
        self.dealer.send_multipart(encode(m.Hello()))
        self.wait(m.Ready)

    def wait(self, kind: type) -> Any:
        while not isinstance(message := decode(self.dealer.recv_multipart()), kind):
            continue
        return message


@pytest.fixture
def hostile(make_engine: Any, raw_socket: Any) -> Callable[..., tuple[Any, Raw]]:
    def start(**options: Any) -> tuple[Any, Raw]:
        engine = make_engine(**options)
        return engine, Raw(engine, raw_socket)

    return start


def test_random_and_mutated_frames_on_both_sockets(hostile: Any, make_client: Any) -> None:
    engine, raw = hostile()
    client = make_client()
    client.connect(engine.addresses)

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.binary(max_size=100), min_size=1, max_size=4) | messages.map(encode), st.booleans())
    def attack(frames: list[bytes], up: bool) -> None:
        (raw.push if up else raw.dealer).send_multipart(frames)

    attack()
    client.wait_ends(*[client.add(count=5) for _ in range(5)])
    assert len(engine.added) == 5
    assert not engine.failed
    assert all(thread.is_alive() for thread in (engine.input._thread, engine.output._thread, engine.loop))


def test_pickles_make_no_file(hostile: Any, make_client: Any, tmp_path: Path) -> None:
    engine, raw = hostile()
    witness = tmp_path / "witness"

    class Payload:
        def __reduce__(self) -> Any:
            return Path.touch, (witness,)

    evil = pickle.dumps(Payload())
    for frames in ([evil], [msgpack.packb([1, 1, evil])], [msgpack.packb(msgpack.ExtType(1, evil)), evil]):
        raw.push.send_multipart(frames)
        raw.dealer.send_multipart(frames)
    client = make_client()
    client.connect(engine.addresses)
    client.wait_ends(client.add())
    assert not witness.exists()


def test_bad_tensor_ends_that_request_with_the_reason(hostile: Any) -> None:
    """The stream goes on behind it."""
    engine, raw = hostile()
    prompt = from_numpy(np.arange(3, dtype=np.int32))
    main, pack = encode(m.Add(raw.epoch, raw.client_id, 1, 70, prompt, {}))
    raw.push.send_multipart([main, pack[:-1]])
    step = raw.wait(m.Step)
    assert step.output.handles.tolist() == [70]
    assert step.output.finish.tolist() == [m.FinishReason.ERROR]
    assert step.output.extras[0]["code"] == "protocol"
    raw.push.send_multipart(encode(m.Add(raw.epoch, raw.client_id, 2, 71, prompt, {})))
    while raw.wait(m.Step).output.handles.tolist() != [71]:
        continue
    assert [handle for _, handle in engine.added] == [71]


def test_bad_call_is_answered(hostile: Any) -> None:
    _, raw = hostile()
    number = (1).to_bytes(8, "little")
    raw.push.send_multipart(
        [msgpack.packb([m.PROTOCOL_VERSION, 3, number, raw.epoch, raw.client_id, 5, "echo", ["no map"]])]
    )
    result = raw.wait(m.Result)
    assert (result.call, result.error_code) == (5, "protocol")


def test_a_bad_message_of_a_kind_for_clients_is_dropped(hostile: Any) -> None:
    engine, raw = hostile()
    number = (1).to_bytes(8, "little")
    raw.push.send_multipart([msgpack.packb([m.PROTOCOL_VERSION, 7, number, raw.epoch, "no output", 0])])  # Step
    prompt = from_numpy(np.arange(3, dtype=np.int32))
    raw.push.send_multipart(encode(m.Add(raw.epoch, raw.client_id, 1, 3, prompt, {})))
    raw.wait(m.Step)
    assert [handle for _, handle in engine.added] == [3]


def test_other_lives_and_strangers_are_ignored(hostile: Any) -> None:
    engine, raw = hostile()
    prompt = from_numpy(np.arange(3, dtype=np.int32))
    raw.push.send_multipart(encode(m.Add(b"another life 16b", raw.client_id, 1, 1, prompt, {})))
    raw.push.send_multipart(encode(m.Add(raw.epoch, b"stranger 16bytes", 1, 2, prompt, {})))
    raw.push.send_multipart(encode(m.Add(raw.epoch, raw.client_id, 1, 3, prompt, {})))
    raw.wait(m.Step)
    assert [handle for _, handle in engine.added] == [3]


def test_ping_without_a_session_is_told_so(hostile: Any) -> None:
    engine, raw = hostile()
    raw.dealer.send_multipart(encode(m.Ping(b"another life 16b", 0)))
    assert raw.wait(m.UnknownClient).epoch == engine.epoch
    assert raw.client_id in engine.output._streams  # a stale ping is no reason to forget a living session


def test_gap_is_reported_at_once_and_the_hole_is_filled(hostile: Any) -> None:
    engine, raw = hostile()
    prompt = from_numpy(np.arange(3, dtype=np.int32))
    adds = {n: encode(m.Add(raw.epoch, raw.client_id, n, n, prompt, {})) for n in range(1, 5)}
    for number in (1, 3, 4):
        raw.push.send_multipart(adds[number])
    while not (beat := raw.wait(m.Heartbeat)).gap:
        continue
    assert beat.seen == 1
    for number in (2, 3, 4, 4, 1):
        raw.push.send_multipart(adds[number])
    while raw.wait(m.Step).output.handles.tolist()[-1] != 4:
        continue
    assert [handle for _, handle in engine.added] == [1, 2, 3, 4]


def in_pieces(raw: Raw, first: int, frames: list[Any]) -> int:
    """Send a message in pieces from this number on; returns the next number."""
    sizes = np.array(list(map(len, frames)), np.uint32)
    for number, frame in enumerate(frames, first):
        data = m.TensorFrame("uint8", (len(frame),), bytes(frame))
        raw.push.send_multipart(encode(m.Piece(raw.epoch, raw.client_id, number, 1, sizes, data)))
        sizes = sizes[:0]
    return first + len(frames)


def test_bad_pieces_cost_their_sender_that_message(hostile: Any) -> None:
    engine, raw = hostile()
    prompt = from_numpy(np.arange(30_000, dtype=np.int32))
    stranger = m.Add(raw.epoch, b"stranger 16bytes", 0, 1, prompt, {})
    number = in_pieces(raw, 1, encode(stranger))
    number = in_pieces(raw, number, encode(m.Hello()))
    number = in_pieces(raw, number, [bytes((0x93, m.PROTOCOL_VERSION, 1)), b"rubbish"])
    main, pack = encode(m.Add(raw.epoch, raw.client_id, 0, 70, prompt, {}))
    number = in_pieces(raw, number, [main, pack[:-4]])
    assert raw.wait(m.Step).output.handles.tolist() == [70]
    too_much = m.Piece(
        raw.epoch, raw.client_id, number, 1, np.array([2], np.uint32), m.TensorFrame("uint8", (3,), b"abc")
    )
    raw.push.send_multipart(encode(too_much))
    in_pieces(raw, number + 1, encode(m.Add(raw.epoch, raw.client_id, 0, 71, prompt, {})))
    while raw.wait(m.Step).output.handles.tolist() != [71]:
        continue
    assert [handle for _, handle in engine.added] == [71]
    assert engine.input._complaints.counts["bad frame on the input socket"] == 5


def test_lying_acknowledgement_is_dropped(hostile: Any, make_client: Any) -> None:
    engine, raw = hostile()
    raw.dealer.send_multipart(encode(m.Ping(raw.epoch, 1 << 40)))
    client = make_client()
    client.connect(engine.addresses)
    client.wait_ends(client.add())


def test_unread_results_are_bounded(hostile: Any) -> None:
    """Values count, not only tensors: who calls and never acknowledges is dropped before it is silent for long."""
    engine, raw = hostile(limits=ClientLimits(held_bytes=10 << 20, silent_ticks=3600, stalled_ticks=3600))
    for number in range(1, 301):
        text = {"text": "x" * 60_000}
        raw.push.send_multipart(encode(m.Utility(raw.epoch, raw.client_id, number, number, "echo", text)))
    until(lambda: raw.client_id in engine.gone, "the drop")


def test_identity_of_another_length_gets_no_session(hostile: Any, make_client: Any, raw_socket: Any) -> None:
    engine, _ = hostile()
    short = raw_socket(zmq.DEALER, engine.addresses[1], b"short")
    short.send_multipart(encode(m.Hello()))
    client = make_client()
    client.connect(engine.addresses)
    client.wait_ends(client.add())
    assert len(engine.output._streams) == 2  # the raw client's and the good one's


def test_failure_of_a_pump_reaches_the_engine(make_engine: Any) -> None:
    """A deaf or mute engine must end; this is how it hears."""
    engine = make_engine()

    def bug() -> None:
        raise RuntimeError("a bug")

    engine.output._call_soon(bug)
    until(lambda: bool(engine.failed), "the news")
    assert engine.failed[0].thread == "output thread"
