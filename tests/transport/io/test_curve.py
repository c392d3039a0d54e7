"""Who may talk to an engine over tcp."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.support.proxy import Proxy
from tests.support.waiting import until

from wavecore.transport.curve import CurveClient, CurveServer, KeyPair, create_keys
from wavecore.transport.errors import ConfigError
from wavecore.transport.io.authenticator import Authenticator
from wavecore.transport.io.connection import Disconnected
from wavecore.transport.io.sockets import Monitor, endpoint_of, make_context, make_socket
from wavecore.transport.wire.messages import Ready

ADDRESS = "tcp://127.0.0.1:0"


def first_event(address: str, client: CurveClient | None, kind: int = zmq.DEALER) -> int:
    """The first event of a socket that connects."""
    context = make_context()
    if client is None:
        socket = context.socket(kind)  # make_socket would refuse
        socket.connect(address)
    else:
        socket = make_socket(context, kind, address, curve=client)
    monitor = Monitor(socket)
    try:
        assert monitor.channel.poll(30_000)
        event = monitor.next()
        assert event is not None
        return event
    finally:
        monitor.close()
        socket.close(0)
        context.term()


def test_only_listed_keys_enter(tmp_path: Path, make_engine: Any, make_client: Any) -> None:
    public = create_keys(tmp_path)
    engine = make_engine((ADDRESS, ADDRESS), curve=CurveServer.load(tmp_path))
    client = make_client()
    client.connect(engine.addresses, CurveClient.load(tmp_path / "client.key", public))
    client.wait_ends(client.add(count=3))

    wrong_key = KeyPair.generate()
    ends = tuple(zip(engine.addresses, (zmq.PUSH, zmq.DEALER), strict=True))
    for address, kind in ends:
        assert first_event(address, CurveClient(public.encode(), wrong_key), kind) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        assert first_event(address, None, kind) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert len(engine.output._streams) == 1

    (tmp_path / "authorized_clients" / "friend.pub").write_bytes(wrong_key.public + b"\n")
    for address, kind in ends:
        assert first_event(address, CurveClient(public.encode(), wrong_key), kind) == zmq.EVENT_HANDSHAKE_SUCCEEDED


@pytest.mark.usefixtures("quick_clocks")
def test_a_key_that_is_listed_later_enters_then(tmp_path: Path, make_engine: Any, make_client: Any) -> None:
    """libzmq gives up on an engine that refuses its key; the client does not."""
    public, late = create_keys(tmp_path), KeyPair.generate()
    engine = make_engine((ADDRESS, ADDRESS), curve=CurveServer.load(tmp_path))
    client = make_client()
    client.pump.connect(0, *engine.addresses, CurveClient(public.encode(), late))
    until(lambda: 0 in client.pump._connections and client.pump._connections[0]._complaints.counts, "the refusal")
    (tmp_path / "authorized_clients" / "late.pub").write_bytes(late.public)
    client.wait_for(lambda: client.saw(Ready), "READY")
    client.wait_ends(client.add(count=3))


@pytest.mark.usefixtures("quick_clocks")
def test_a_stranger_at_the_engines_port_is_survived(make_engine: Any, make_client: Any, tmp_path: Path) -> None:
    """libzmq never connects again after bytes that break its protocol; the client does, and its session goes on."""
    public = create_keys(tmp_path)
    engine = make_engine((ADDRESS, ADDRESS), curve=CurveServer.load(tmp_path), pace=0.001)
    ways = [Proxy(int(address.rpartition(":")[2])) for address in engine.addresses]
    client = make_client()
    client.connect(
        tuple(f"tcp://127.0.0.1:{way.port}" for way in ways), CurveClient.load(tmp_path / "client.key", public)
    )
    handle = client.add(count=1000)
    client.wait_for(lambda: client.received.get(handle, 0) > 3, "tokens")
    ways[1].change = lambda data: [b"HTTP/1.1 400 Bad Request\r\n\r\n" * 10]
    client.wait_for(lambda: client.saw(Disconnected), "the break")
    ways[1].change = lambda data: [data]
    client.wait_ends(handle)
    assert not client.saw(Ready, 2)
    for way in ways:
        way.close()


def test_client_refuses_another_server(tmp_path: Path, make_engine: Any) -> None:
    create_keys(tmp_path)
    engine = make_engine((ADDRESS, ADDRESS), curve=CurveServer.load(tmp_path))
    wrong = CurveClient(KeyPair.generate().public, KeyPair.load(tmp_path / "client.key"))
    assert first_event(engine.addresses[1], wrong) != zmq.EVENT_HANDSHAKE_SUCCEEDED


def test_no_key_enters_while_nobody_checks_them(tmp_path: Path) -> None:
    public = create_keys(tmp_path)
    context = make_context()
    socket = make_socket(context, zmq.PULL, ADDRESS, curve=CurveServer.load(tmp_path))
    try:
        client = CurveClient.load(tmp_path / "client.key", public)
        assert first_event(endpoint_of(socket), client, zmq.PUSH) != zmq.EVENT_HANDSHAKE_SUCCEEDED
        authenticator = Authenticator(context, CurveServer.load(tmp_path), print)
        assert first_event(endpoint_of(socket), client, zmq.PUSH) == zmq.EVENT_HANDSHAKE_SUCCEEDED
        authenticator.close()
        assert first_event(endpoint_of(socket), client, zmq.PUSH) != zmq.EVENT_HANDSHAKE_SUCCEEDED
    finally:
        socket.close(0)
        context.term()


def test_damaged_allow_list_admits_nobody(tmp_path: Path, make_engine: Any) -> None:
    public = create_keys(tmp_path)
    engine = make_engine((ADDRESS, ADDRESS), curve=CurveServer.load(tmp_path))
    client = CurveClient.load(tmp_path / "client.key", public)
    (tmp_path / "client.key").chmod(0o640)
    assert first_event(engine.addresses[1], client) == zmq.EVENT_HANDSHAKE_FAILED_AUTH


def test_a_file_that_would_be_waited_for_in_the_allow_list_admits_nobody_and_stops_nothing(
    tmp_path: Path, make_engine: Any
) -> None:
    public = create_keys(tmp_path)
    engine = make_engine((ADDRESS, ADDRESS), curve=CurveServer.load(tmp_path))
    client = CurveClient.load(tmp_path / "client.key", public)
    for strange in ("a FIFO", "a device"):
        path = tmp_path / "authorized_clients" / "strange.pub"
        os.mkfifo(path) if strange == "a FIFO" else path.symlink_to("/dev/zero")
        assert first_event(engine.addresses[1], client) == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        path.unlink()
        assert first_event(engine.addresses[1], client) == zmq.EVENT_HANDSHAKE_SUCCEEDED


OTHER = KeyPair.generate()


@pytest.mark.parametrize(
    "lines",
    [
        (),
        (OTHER.secret,),
        (OTHER.secret, b"x" * 40),
        (b"\"'" * 20, OTHER.public),
        (b"\xff" * 40, b"\xfe" * 40),
        (OTHER.secret, OTHER.public, b"\0" * 40),
        (OTHER.secret, OTHER.public, OTHER.public, OTHER.public),
    ],
)
def test_a_key_file_without_keys_is_named(tmp_path: Path, lines: tuple[bytes, ...]) -> None:
    path = tmp_path / "server.key"
    path.write_bytes(b"\n".join(lines))
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"server\.key is damaged: delete it"):
        create_keys(tmp_path)


@pytest.mark.parametrize("key", ["", "x" * 39, "\"'" * 20, "é" * 20, "#" * 40])
def test_a_server_key_that_is_none_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="40 characters of z85"):
        CurveClient(key.encode(), OTHER)


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.write_bytes(b"x" * 5000)],
    ids=["a FIFO", "a folder", "a device", "too large"],
)
def test_an_allow_list_that_cannot_be_read_is_told_at_the_start(tmp_path: Path, make: Callable[[Path], Any]) -> None:
    create_keys(tmp_path)
    make(tmp_path / "authorized_clients" / "strange.pub")
    with pytest.raises(ConfigError, match=r"strange\.pub of the allow-list cannot be read: "):
        create_keys(tmp_path)
