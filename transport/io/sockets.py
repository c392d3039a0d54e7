"""Every socket of the project is made here, with the same bounded options.

A socket is used by one thread, its owner (that of `host_link.py` by who holds its lock); a context is shared. The
thread that starts the owner may create the socket.
"""

import sys

import zmq

from wavecore.transport.addresses import parse_address
from wavecore.transport.curve import CurveClient, CurveServer
from wavecore.transport.errors import RESOURCE_ERRNOS, ConfigError, ResourceError, StartError
from wavecore.transport.headroom import check_headroom
from wavecore.transport.wire.codec import MAX_PACKET_BYTES

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]
Curve = CurveServer | CurveClient
HIGH_WATER_MARK = 1000
MAX_SOCKETS = 1 << 13  # a client has four for each engine, with those that watch its connection
LINGER_MS = 2000
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks whether a CURVE key may enter
ZAP_DOMAIN = b"wavecore"

if zmq.zmq_version_info() < (4, 3, 5):
    raise ImportError(f"libzmq {zmq.zmq_version()} has known holes; 4.3.5 is the least: pip install 'pyzmq>=27'")


def check_address(address: str, curve: Curve | None) -> str:
    """`parse_address`, and refuse tcp without keys."""
    kind = parse_address(address)
    if kind == "tcp" and curve is None:
        raise ConfigError(f"address {address!r}: tcp needs CURVE keys; without them anyone on the network is a client")
    return kind


def make_context() -> Context:
    """A private context, so that ending it cannot wait for sockets of anyone else in the process.

    One io thread moves several GB/s.

    Raises:
        ResourceError: too few descriptors or threads for it, its owner's thread and some sockets.
    """
    check_headroom("a connection", 20, 3)
    context = Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
    return context


def make_socket(
    context: Context, kind: int, address: str, *, identity: bytes | None = None, curve: Curve | None = None
) -> Socket:
    """A bound PULL, ROUTER or REP, or a connected PUSH or DEALER.

    Raises:
        ConfigError: a bad address, or tcp without CURVE.
        ResourceError: the port is taken, or the process has no descriptor left.
        StartError: the address cannot be bound for another reason.
    """
    address_kind = "inproc" if address == ZAP_ENDPOINT else check_address(address, curve)
    check_headroom(f"a socket for {address}", 4, 0)
    socket = context.socket(kind)
    try:
        _bound(socket)
        if address_kind == "tcp":
            _keep_alive(socket)
        if identity is not None:
            socket.setsockopt(zmq.IDENTITY, identity)
        if isinstance(curve, CurveServer):
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, curve.pair.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            # By default libzmq admits every key while nobody answers for the domain.
            socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
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
        kind_of_error = ResourceError if error.errno in RESOURCE_ERRNOS else StartError
        raise kind_of_error(f"cannot use {address}: {error.strerror}; is another engine there?") from error
    return socket


def endpoint_of(socket: Socket) -> str:
    """The address that was bound, with the port that the system chose."""
    name = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    return name.rstrip(b"\0").decode()


def _bound(socket: Socket) -> None:
    """Options that every socket has: nothing in libzmq may grow, block or linger without a limit."""
    socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)  # a stopped peer costs at most this many messages
    socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_PACKET_BYTES)  # default: unlimited
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


def _keep_alive(socket: Socket) -> None:
    """A host that vanishes without a FIN is noticed; on ipc the system tells at once."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    socket.setsockopt(zmq.HEARTBEAT_IVL, 2000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10_000)


class Monitor:
    """Connection events of one socket; used by the socket's own thread."""

    _EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self.channel = socket.get_monitor_socket(self._EVENTS)
        self.channel.setsockopt(zmq.LINGER, 0)

    def next(self) -> int | None:
        """The next event (a zmq.EVENT_ number), or None."""
        try:
            event, _ = self.channel.recv_multipart(zmq.NOBLOCK)  # 16 bits, then a value; and whose (zmq_socket_monitor)
        except zmq.Again:
            return None
        return int.from_bytes(event[:2], sys.byteorder)

    def close(self) -> None:
        self._socket.disable_monitor()
        self.channel.close(0)
