"""CURVE keys of a deployment, for tcp: made, kept in files, and read back with care.

keys_dir/server.key                 its secret and its public key, one z85 text a line, mode 0600
keys_dir/client.key                 likewise, then the server's public key: all that a client on another host needs
keys_dir/authorized_clients/*.pub   public keys of more clients, one a file; read again at every handshake
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import zmq

from wavecore.transport.errors import ConfigError
from wavecore.transport.small_files import read_small, write_new

KEY_FILES = ("server.key", "client.key")
ALLOW_LIST = "authorized_clients"
GUEST = f"{ALLOW_LIST}/deployment.pub"  # clients of another deployment
MAX_KEY_FILE = 4096  # bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """z85 texts of 40 bytes each; `server` is the other side's public key, in a client's file."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes = b""

    @classmethod
    def generate(cls) -> Self:
        return cls(*zmq.curve_keypair())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key file.

        Raises:
            ConfigError: missing, malformed, or readable by others.
        """
        try:
            status = path.stat()
            lines = read_small(path, MAX_KEY_FILE).split()
        except OSError as error:
            raise ConfigError(f"key file {path}: {error.strerror}") from None
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise ConfigError(f"key file {path} must belong to you and be closed to others: chmod 600 {path}")
        if len(lines) not in (2, 3) or not all(_is_key(line) for line in lines) or _public(lines[0]) != lines[1]:
            raise ConfigError(f"key file {path} is damaged: delete it and start the engine again")
        return cls(lines[1], *lines[::2])

    def save(self, path: Path) -> None:
        write_new(path, b"".join(key + b"\n" for key in (self.secret, self.public, self.server) if key))


@dataclass(frozen=True, slots=True)
class CurveServer:
    """The binding side: its own pair, and where the allow-list lies."""

    pair: KeyPair
    keys_dir: Path

    @classmethod
    def load(cls, keys_dir: Path) -> Self:
        return cls(KeyPair.load(keys_dir / "server.key"), keys_dir)

    def allowed(self) -> set[bytes]:
        """Public keys (z85) that may connect, as the files stand now.

        Raises:
            ConfigError: naming the file that cannot be read.
        """
        keys = {KeyPair.load(self.keys_dir / "client.key").public}
        for path in (self.keys_dir / ALLOW_LIST).glob("*.pub"):
            try:
                keys.add(read_small(path, MAX_KEY_FILE).strip())
            except OSError as error:
                raise ConfigError(f"{path} of the allow-list cannot be read: {error.strerror}") from None
        return keys


@dataclass(frozen=True, slots=True)
class CurveClient:
    """The connecting side."""

    server_key: bytes
    pair: KeyPair

    def __post_init__(self) -> None:
        if not _is_key(self.server_key):
            raise ConfigError(f"a CURVE server key has 40 characters of z85, not {self.server_key!r:.60}")

    @classmethod
    def load(cls, key_file: Path, server_key: str) -> Self:
        return cls(server_key.encode(), KeyPair.load(key_file))


def _public(secret: bytes) -> bytes | None:
    """What belongs to a secret key; None where that is no key."""
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError:
        return None


def _is_key(text: bytes) -> bool:
    return len(text) == 40 and _public(text) is not None


def create_keys(keys_dir: Path, guest: str = "") -> str:
    """Make the deployment's key files where they are missing; returns the server's public key.

    Args:
        guest: public key of further clients.

    Raises:
        ConfigError: those that are there, or the allow-list, cannot be used.
        OSError: they cannot be made.
    """
    keys_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (keys_dir / ALLOW_LIST).mkdir(mode=0o700, exist_ok=True)
    if not (keys_dir / "server.key").exists():
        KeyPair.generate().save(keys_dir / "server.key")
    server = KeyPair.load(keys_dir / "server.key").public
    if not (keys_dir / "client.key").exists():
        replace(KeyPair.generate(), server=server).save(keys_dir / "client.key")
    if guest:
        write_new(keys_dir / GUEST, guest.encode())
    CurveServer.load(keys_dir).allowed()  # what is wrong is told now, rather than to each client by silence
    return server.decode()
