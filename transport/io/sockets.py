"""Every socket of the project is made here, with the same bounded options. Knows no message.

Addresses are `ipc:///absolute/path` (in a directory that only the owner can enter) or `tcp://HOST:PORT` with CURVE.
A socket is used by one thread only; a context is shared. The thread that starts the owner may create the socket.
"""

from __future__ import annotations

import errno
import os
import re
import socket as net
import threading
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from wavecore.transport.errors import ConfigError, ResourceError, StartError
from wavecore.transport.io.curve import CurveClient, CurveServer
from wavecore.transport.wire.codec import MAX_FRAME_BYTES

HIGH_WATER_MARK = 1000
LINGER_MS = 2000
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks whether a CURVE key may enter
ZAP_DOMAIN = b"wavecore"
_OUT_OF_RESOURCES = (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
MAX_IPC_PATH = 107  # sizeof(sockaddr_un.sun_path) - 1

if zmq.zmq_version_info() < (4, 3, 5):
    raise ImportError(f"libzmq {zmq.zmq_version()} has known holes; 4.3.5 is the least: pip install 'pyzmq>=27'")


@dataclass(frozen=True, slots=True)
class Address:
    """A checked endpoint: `ipc` with a path, or `tcp` with a host and a port (0 = the kernel chooses)."""

    text: str
    is_tcp: bool


def parse_address(text: str) -> Address:
    """Check an endpoint.

    Raises:
        ConfigError: another transport, a relative or too long path, a wildcard or unknown host, no port.
    """
    if text == ZAP_ENDPOINT:
        return Address(text, is_tcp=False)
    if text.startswith("ipc://"):
        path = text.removeprefix("ipc://")
        if not path.startswith("/"):
            raise ConfigError(f"address {text!r}: an ipc path must be absolute")
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ConfigError(
                f"address {text!r}: the path has {len(os.fsencode(path))} bytes, the system allows {MAX_IPC_PATH}: "
                "choose a shorter runtime directory"
            )
        return Address(text, is_tcp=False)
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})", text)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"address {text!r}: expected ipc:///path or tcp://HOST:PORT with one named interface")
    try:
        found = net.getaddrinfo(match[1].strip("[]"), None, type=net.SOCK_STREAM)
    except (net.gaierror, UnicodeError) as error:
        raise ConfigError(f"address {text!r}: {error}") from None
    if any(info[4][0] in ("0.0.0.0", "::") for info in found):
        raise ConfigError(f"address {text!r} means every interface: name the one that the clients use")
    return Address(text, is_tcp=True)


def check_address(text: str, curve: CurveServer | CurveClient | None) -> Address:
    """`parse_address`, and refuse tcp without keys."""
    address = parse_address(text)
    if address.is_tcp and curve is None:
        raise ConfigError(f"address {text!r}: tcp needs CURVE keys; without them anyone on the network is a client")
    return address


def make_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A private context, so that ending it cannot wait for sockets of anyone else in the process.

    One io thread moves several GB/s; MAX_SOCKETS stays at 1023, far above what one process opens.
    """
    return zmq.Context(io_threads=1)


def make_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    address: str,
    *,
    identity: bytes | None = None,
    curve: CurveServer | CurveClient | None = None,
) -> zmq.Socket[bytes]:
    """A bound PULL, ROUTER or REP, or a connected PUSH or DEALER.

    Raises:
        ConfigError: a bad address, or tcp without CURVE.
        ResourceError: the port is taken, or the process has no descriptor left.
        StartError: the address cannot be bound for another reason.
    """
    parsed = check_address(address, curve)
    socket = context.socket(kind)
    try:
        _bound(socket)
        if parsed.is_tcp:
            _keep_alive(socket)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        if isinstance(curve, CurveServer):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, curve.pair.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)  # without a domain ZAP may be skipped
        elif curve is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, curve.server_key)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, curve.pair.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, curve.pair.secret)
        if kind in (zmq.PULL, zmq.ROUTER, zmq.REP):
            socket.bind(address)
        else:
            socket.connect(address)
    except zmq.ZMQError as error:
        socket.close(0)
        kind_of_error = ResourceError if error.errno in _OUT_OF_RESOURCES else StartError
        raise kind_of_error(f"cannot use {address}: {error.strerror}; is another engine there?") from error
    return socket


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """The address that was bound, with the port that the kernel chose."""
    name = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    return name.rstrip(b"\0").decode()


def _bound(socket: zmq.Socket[bytes]) -> None:
    """Options that every socket has: nothing in libzmq may grow, block or linger without a limit."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)  # a stopped peer costs at most this many messages
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # default: unlimited
    socket.setsockopt(zmq.LINGER, LINGER_MS)  # last words leave, but an absent peer cannot hold up an exit for ever
    socket.setsockopt(zmq.HANDSHAKE_IVL, 10_000)  # a half-open connection gives its descriptor back
    socket.setsockopt(zmq.RECONNECT_IVL, 100)  # a restarted engine is found soon,
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)  # a missing one is not hammered
    if socket.type == zmq.PUSH:
        # Nothing is queued for a peer that is not there. Not for a DEALER: with IMMEDIATE, libzmq throws away what it
        # received and we have not read yet when the peer closes, and so an engine's last words.
        socket.setsockopt(zmq.IMMEDIATE, 1)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a vanished peer is an error, not silence
        # After a connection breaks, the client comes back under its identity, maybe before this side noticed; without
        # handover it would be ignored for ever. An identity is 128 random bits that only its owner and we know, so
        # nobody can take over another's.
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)


def _keep_alive(socket: zmq.Socket[bytes]) -> None:
    """A host that vanishes without a FIN is noticed; on ipc the kernel tells at once."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)


class Monitor:
    """Connection events of one socket; used by the socket's own thread."""

    _EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self.channel = socket.get_monitor_socket(self._EVENTS)
        self.channel.setsockopt(zmq.LINGER, 0)

    def next(self) -> int | None:
        """The next event (a zmq.EVENT_ number), or None."""
        try:
            return int(recv_monitor_message(self.channel, zmq.NOBLOCK)["event"])
        except zmq.Again:
            return None

    def close(self) -> None:
        self._socket.disable_monitor()
        self.channel.close(0)


class Waker:
    """Wakes a thread that polls `fd` (an eventfd). Safe from any thread; after `close` it does nothing."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()  # a late wake must not hit a descriptor that was closed and given to another
        self._open = True

    def wake(self) -> None:
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return

    def close(self) -> None:
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)
