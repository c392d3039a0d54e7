"""Addresses, the options of every socket, endpoints, wakers and key files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import zmq

from wavecore.transport import small_files
from wavecore.transport.addresses import parse_address
from wavecore.transport.curve import CurveServer, KeyPair, create_keys
from wavecore.transport.errors import ConfigError, ResourceError, StartError
from wavecore.transport.io.bound_thread import BoundThread
from wavecore.transport.waker import Waker


@pytest.mark.parametrize(
    "text",
    [
        "tcp://*:5555",
        "tcp://0.0.0.0:0",
        "tcp://[::]:0",
        "tcp://0:0",
        "tcp://0x0:0",
        "tcp://:5555",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:*",
        "tcp://127.0.0.1:70000",
        "tcp://127.0.0.1:1;tcp://127.0.0.1:2",
        "tcp://no-such-host.invalid:1",
        "tcp://127..1:80",
        "ipc://relative/path",
        "ipc:///" + "x" * 107,
        "ipc:///" + "ü" * 54,
        "ipc://@abstract",
        "ipc://*",
        "inproc://x",
        "udp://127.0.0.1:1",
        "http://127.0.0.1:80",
        "",
    ],
)
def test_bad_addresses_are_refused(text: str) -> None:
    """No wildcard, no silent truncation, nothing but ipc and tcp."""
    with pytest.raises(ConfigError):
        parse_address(text)


def test_good_addresses() -> None:
    assert parse_address("ipc:///" + "x" * 106) == "ipc"
    assert parse_address("tcp://127.0.0.1:0") == "tcp"
    assert parse_address("tcp://localhost:65535") == "tcp"


def test_tcp_without_keys_is_refused(raw_socket: Any) -> None:
    with pytest.raises(ConfigError, match="CURVE"):
        raw_socket(zmq.PULL, "tcp://127.0.0.1:0")


@pytest.mark.parametrize("kind", [zmq.PULL, zmq.ROUTER, zmq.PUSH, zmq.DEALER])
def test_every_socket_is_bounded(raw_socket: Any, ipc: tuple[str, str], kind: int) -> None:
    socket = raw_socket(kind, ipc[0])
    for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.MAXMSGSIZE, zmq.LINGER, zmq.HANDSHAKE_IVL):
        assert socket.getsockopt(option) > 0
    assert socket.getsockopt(zmq.IMMEDIATE) == (kind == zmq.PUSH)
    socket.close()


def test_address_that_cannot_be_bound(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="missing"):
        BoundThread("test", zmq.PULL, f"ipc://{tmp_path}/missing/x", None, print)
    create_keys(tmp_path)
    server = CurveServer.load(tmp_path)
    first = BoundThread("test", zmq.PULL, "tcp://127.0.0.1:0", server, print)
    with pytest.raises(ResourceError, match="cannot use"):
        BoundThread("test", zmq.ROUTER, first.endpoint, server, print)
    first.close()


def test_port_is_chosen_once_and_bound_again(tmp_path: Path) -> None:
    create_keys(tmp_path)
    server = CurveServer.load(tmp_path)
    first = BoundThread("test", zmq.PULL, "tcp://127.0.0.1:0", server, print)
    assert not first.endpoint.endswith(":0")
    first.close()
    again = BoundThread("test", zmq.PULL, first.endpoint, server, print)
    assert again.endpoint == first.endpoint
    again.close()


def test_bound_thread_gives_everything_back(tmp_path: Path) -> None:
    create_keys(tmp_path)
    server = CurveServer.load(tmp_path)
    BoundThread(
        "test", zmq.PULL, "tcp://127.0.0.1:0", server, print
    ).close()  # libraries open their own descriptors once
    before = _descriptors()
    for _ in range(3):
        BoundThread("test", zmq.ROUTER, "tcp://127.0.0.1:0", server, print).close()
        with pytest.raises(StartError):
            BoundThread("test", zmq.PULL, f"ipc://{tmp_path}/missing/x", server, print)
    assert _descriptors() == before


def _descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_waker_counts_many_as_one() -> None:
    waker = Waker()
    for _ in range(3):
        waker.wake()
    waker.clear()
    waker.clear()  # nothing there: no block
    waker.close()
    waker.wake()  # a late one hits nobody
    waker.close()


def test_key_files_are_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    public = create_keys(folder)
    assert create_keys(folder) == public  # a restart keeps them
    assert folder.stat().st_mode & 0o777 == 0o700
    for name in ("server.key", "client.key"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    (folder / "client.key").chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        CurveServer.load(folder).allowed()
    (folder / "server.key").write_text("damaged")
    with pytest.raises(ConfigError, match="damaged"):
        CurveServer.load(folder)
    with pytest.raises(ConfigError, match="No such file"):
        KeyPair.load(folder / "none.key")
    (folder / "large.key").write_bytes(bytes(1 << 20))
    with pytest.raises(ConfigError, match="larger than"):
        KeyPair.load(folder / "large.key")
    os.mkfifo(folder / "fifo.key")
    with pytest.raises(ConfigError, match="not a regular file"):
        KeyPair.load(folder / "fifo.key")


def test_a_full_disk_leaves_no_damaged_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, mode: str) -> Any:
        os.close(fd)
        return Path("/dev/full").open(mode, buffering=0)

    with monkeypatch.context() as patched:
        patched.setattr(small_files.os, "fdopen", full)
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/server.key'"):
            create_keys(tmp_path)
    assert create_keys(tmp_path)


def test_secrets_do_not_show(tmp_path: Path) -> None:
    pair = KeyPair.generate()
    assert pair.secret.decode() not in repr(pair)
