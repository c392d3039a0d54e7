"""Where an engine listens: `ipc:///absolute/path` or `tcp://HOST:PORT`, checked before anything is bound or loaded.

An ipc path lies in a folder that only its owner can enter; tcp is for engines with CURVE keys.
"""

import os
import re
import socket
from ipaddress import ip_address

import psutil

from wavecore.transport.errors import ConfigError, ResourceError

MAX_IPC_PATH = 107  # bytes: sizeof(sockaddr_un.sun_path) - 1


def parse_address(address: str) -> str:
    """Check an address and say what it is: "ipc" or "tcp" (port 0: the kernel chooses).

    Raises:
        ConfigError: another transport, a relative or too long path, a wildcard or unknown host, no port.
    """
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            raise ConfigError(f"address {address!r}: an ipc path must be absolute")
        if (size := len(os.fsencode(path))) > MAX_IPC_PATH:
            reason = f"the path has {size} bytes, the system allows {MAX_IPC_PATH}: choose a shorter runtime directory"
            raise ConfigError(f"address {address!r}: {reason}")
        return "ipc"
    match = re.fullmatch(r"tcp://(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):(\d{1,5})", address)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(f"address {address!r}: expected ipc:///path or tcp://HOST:PORT with one named interface")
    try:
        found = socket.getaddrinfo(match[1].strip("[]"), None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"address {address!r}: {error}") from None
    if any(info[4][0] in ("0.0.0.0", "::") for info in found):
        raise ConfigError(f"address {address!r} means every interface: name the one that the clients use")
    return "tcp"


def host_of(address: str) -> str:
    """HOST of "tcp://HOST" and "tcp://HOST:PORT"."""
    return re.sub(r"^tcp://(\[.*?\]|[^:]*).*$", r"\1", address).strip("[]")


def engine_ports(address: str, index: int = 0) -> tuple[str, str]:
    """Where an engine of a deployment at "tcp://HOST:PORT" has its input and its output: two ports each, from PORT on.

    At "tcp://HOST" the kernel chooses both.

    Raises:
        ConfigError: not of that form, or it means every interface.
    """
    match = re.fullmatch(r"(tcp://(?:\[[^]]*\]|[^:]+))(?::([1-9]\d{0,4}))?", address)
    if match is None:
        raise ConfigError(f"address {address!r}: expected tcp://HOST or tcp://HOST:PORT, or nothing for ipc")
    ports = [int(match[2]) + 2 * index + i if match[2] else 0 for i in range(2)]
    first, second = (f"{match[1]}:{port}" for port in ports)
    for own in (first, second):
        parse_address(own)
    return first, second


def interface_of(host: str) -> str:
    """The name of this machine's network interface with this address: "eth0".

    Raises:
        ResourceError: there is none.
    """
    own = ip_address(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if own.is_loopback:  # Linux has all of 127.0.0.0/8 there
        return "lo"
    for name, addresses in psutil.net_if_addrs().items():
        if str(own) in (each.address.partition("%")[0] for each in addresses):
            return name
    raise ResourceError(f"{host}: no interface of this machine has this address; see `ip address`")


def check_interface(address: str) -> None:
    """Whether this machine has the interface of "tcp://HOST", before minutes are spent on loading a model.

    Raises:
        ConfigError: as `engine_ports`.
        ResourceError: the machine has no such interface.
    """
    host = host_of(engine_ports(address)[0])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family) as probe:
            probe.bind((host, 0))
    except OSError as error:
        way_out = "name an interface of this machine (see `ip address`) as tcp://HOST"
        raise ResourceError(f"address {address}: {error}; {way_out}") from error
