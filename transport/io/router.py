"""The engine's ROUTER: messages in, frames out, and who is there. Used by the output thread."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto

import zmq

from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import ProtocolError
from wavecore.transport.io.authenticator import Endpoint
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.wire.codec import Frames, decode
from wavecore.transport.wire.messages import Bye, Hello, Ping

BATCH = 1000  # messages before the outputs get their turn


class Sent(Enum):
    """What became of a message."""

    YES = auto()
    NO_ROOM = auto()  # the pipe to that client is full
    NO_PEER = auto()  # it is not connected


class Router:
    """Must be read from regularly: a ROUTER that only sends never takes a reconnected client back."""

    def __init__(self, address: str, curve: CurveServer | None, complaints: Complaints) -> None:
        self.endpoint = Endpoint(zmq.ROUTER, address, curve)
        self.socket = self.endpoint.socket
        self._complaints = complaints

    def receive(self) -> Iterator[tuple[bytes, Hello | Ping | Bye]]:
        """What has arrived, with the identity of its sender; whatever breaks the protocol is dropped."""
        for _ in range(BATCH):
            try:
                identity, *frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            try:
                message = decode([frame.buffer for frame in frames])
                if len(identity.bytes) != 16:
                    raise ProtocolError("a client's identity must be 16 bytes")
                if not isinstance(message, Hello | Ping | Bye):
                    raise ProtocolError(f"{type(message).__name__} on the output socket")
            except ProtocolError as error:
                self._complaints.add("bad frame on the output socket", error)
            else:
                yield identity.bytes, message

    def send(self, identity: bytes, frames: Frames) -> Sent:
        """Hand a message to the client's pipe; never blocks, so that no client can stop another."""
        try:
            self.socket.send_multipart([identity, *frames], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            if error.errno == zmq.EAGAIN:
                return Sent.NO_ROOM
            if error.errno == zmq.EHOSTUNREACH:
                return Sent.NO_PEER
            raise
        return Sent.YES
