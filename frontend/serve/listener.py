"""The socket of a server, bound before anything slow is done: an address that is taken is told at once."""

import errno
import socket
from contextlib import suppress
from pathlib import Path

import psutil

from wavecore.transport.errors import ConfigError, ResourceError

BACKLOG = 4096  # connections that nobody has taken yet


def listen(host: str, port: int) -> socket.socket:
    """Listen at a host's port; 0 takes one that is free.

    Raises:
        ConfigError: no such host.
        ResourceError: taken, with who holds it, or not allowed.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"--host {host} --port {port}: no such address ({error})") from error
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ResourceError(f"cannot listen at {host}:{port}: {error.strerror}; name another --port") from error
        raise ResourceError(f"port {port} of {host} is taken{_holder(port)}; end it, or name another --port") from error


def listen_at_file(path: str) -> socket.socket:
    """Listen at a unix socket. What a dead server left behind is replaced.

    Raises:
        ResourceError: another server listens there, or the file cannot be made.
    """
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).is_socket():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(ConnectionRefusedError):
                probe.connect(path)
                raise ResourceError(f"--uds {path}: another server listens there; end it, or name another file")
            Path(path).unlink()
        found.bind(path)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise ResourceError(f"--uds {path}: {error.strerror or error}; name another file") from error
    except BaseException:
        found.close()
        raise
    return found


def url_of(listener: socket.socket, tls: bool) -> str:
    """What clients connect to."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_reachable_from_outside(listener: socket.socket) -> bool:
    return listener.family != socket.AF_UNIX and not listener.getsockname()[0].startswith(("127.", "::1"))


def _holder(port: int) -> str:
    """Who listens there, as far as this user may know."""
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("inet"):
            if found.status == psutil.CONN_LISTEN and found.laddr and found.laddr[1] == port and found.pid:
                return f" by {psutil.Process(found.pid).name()} (pid {found.pid})"
    return ""
