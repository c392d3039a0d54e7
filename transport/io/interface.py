"""The network interface that a deployment binds: a real one, and one only."""

from __future__ import annotations

import socket

from wavecore.transport.errors import ConfigError, ResourceError
from wavecore.transport.io.sockets import parse_address


def check_interface(address: str) -> None:
    """Whether this machine has the interface "tcp://HOST", before minutes are spent on loading a model.

    Raises:
        ConfigError: not of that form, or it means every interface.
        ResourceError: the machine has no such interface.
    """
    if not address.startswith("tcp://"):
        raise ConfigError(f"address {address!r}: expected tcp://HOST (one interface), or nothing for ipc")
    parse_address(f"{address}:0")
    host = address.removeprefix("tcp://").strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ResourceError(
            f"address {address}: {error}; name an interface of this machine (see `ip address`) as tcp://HOST"
        ) from error
