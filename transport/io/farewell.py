"""The goodbye of a client that died without one."""

import zmq

from wavecore.transport.curve import CurveClient
from wavecore.transport.io.sockets import make_context, make_socket
from wavecore.transport.wire.codec import encode
from wavecore.transport.wire.messages import Bye


def say_bye(address: str, client_id: bytes, epoch: bytes, curve: CurveClient | None = None) -> None:
    """End a dead client's session: its engine ends its requests now, and not when it misses the client.

    Waits up to two seconds for an engine that does not listen.

    Args:
        address: the engine's ROUTER, which gives an identity to whoever connects under it last.
        client_id, epoch: of the session.

    Raises:
        ResourceError, StartError: no socket could be made.
    """
    with (
        make_context() as context,
        make_socket(context, zmq.DEALER, address, identity=client_id, curve=curve) as dealer,
    ):
        dealer.send_multipart(encode(Bye(epoch)))
