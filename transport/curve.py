"""CURVE keys of a deployment, for tcp: made, kept in files, and read back with care.

keys_dir/server.key, client.key     secret and public key of each side, one z85 text a line, mode 0600
keys_dir/authorized_clients/*.pub   public keys of more clients, one a file; read again at every handshake
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import zmq

from wavecore.transport.errors import ConfigError
from wavecore.transport.small_files import read_small, write_new

KEY_FILES = ("server.key", "client.key")
ALLOW_LIST = "authorized_clients"
MAX_KEY_FILE = 4096  # bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """z85 texts of 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

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
        if len(lines) != 2 or any(len(line) != 40 for line in lines):
            raise ConfigError(f"key file {path} is damaged: delete it and start the engine again")
        return cls(public=lines[1], secret=lines[0])

    def save(self, path: Path) -> None:
        write_new(path, self.secret + b"\n" + self.public + b"\n")


@dataclass(frozen=True, slots=True)
class CurveServer:
    """The binding side: its own pair, and where the allow-list lies."""

    pair: KeyPair
    keys_dir: Path

    @classmethod
    def load(cls, keys_dir: Path) -> Self:
        return cls(KeyPair.load(keys_dir / "server.key"), keys_dir)

    def allowed(self) -> set[bytes]:
        """Public keys (z85) that may connect, as the files stand now."""
        keys = {KeyPair.load(self.keys_dir / "client.key").public}
        for path in (self.keys_dir / ALLOW_LIST).glob("*.pub"):
            keys.add(read_small(path, MAX_KEY_FILE).strip())
        return keys


@dataclass(frozen=True, slots=True)
class CurveClient:
    """The connecting side."""

    server_key: bytes
    pair: KeyPair

    def __post_init__(self) -> None:
        if len(self.server_key) != 40:
            raise ConfigError(
                f"a CURVE server key has 40 characters, not {len(self.server_key)}: {self.server_key!r:.60}"
            )

    @classmethod
    def load(cls, keys_dir: Path, server_key: str) -> Self:
        return cls(server_key.encode(), KeyPair.load(keys_dir / "client.key"))


def create_keys(keys_dir: Path) -> str:
    """Make the deployment's key files where they are missing; returns the server's public key."""
    keys_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    (keys_dir / ALLOW_LIST).mkdir(mode=0o700, exist_ok=True)
    for name in KEY_FILES:
        if not (keys_dir / name).exists():
            KeyPair.generate().save(keys_dir / name)
    return KeyPair.load(keys_dir / "server.key").public.decode()
