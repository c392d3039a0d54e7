"""CURVE keys of a deployment, for tcp: made, kept in files, and read back with care.

keys_dir/server.key                 its secret and its public key, one z85 text a line, mode 0600
keys_dir/client.key                 likewise, of the deployment's clients
keys_dir/authorized_clients/*.pub   public keys of more clients, one a file; read again at every handshake
"""

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
GUEST = f"{ALLOW_LIST}/deployment.pub"  # clients of another deployment
MAX_KEY_FILE = 4096  # bytes


@dataclass(frozen=True, slots=True)
class KeyPair:
    """z85 texts of 40 bytes each."""

    public: bytes
    secret: bytes = field(repr=False)

    @property
    def is_pair(self) -> bool:
        """Whether these are keys at all, and belong together."""
        return len(self.secret) == 40 and _public(self.secret) == self.public

    @classmethod
    def generate(cls) -> Self:
        return cls(*zmq.curve_keypair())

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a key file.

        Raises:
            ConfigError: missing, malformed, or readable by others.
        """
        lines = read_secret(path, MAX_KEY_FILE).split()
        if len(lines) != 2 or not (pair := cls(lines[1], lines[0])).is_pair:
            raise ConfigError(f"key file {path} is damaged: delete it and start the engine again")
        return pair

    def save(self, path: Path) -> None:
        write_new(path, b"%s\n%s\n" % (self.secret, self.public))


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
        if len(self.server_key) != 40 or _public(self.server_key) is None:
            raise ConfigError(f"a CURVE server key has 40 characters of z85, not {self.server_key!r:.60}")

    @classmethod
    def load(cls, key_file: Path, server_key: str) -> Self:
        return cls(server_key.encode(), KeyPair.load(key_file))


def read_secret(path: Path, limit: int) -> bytes:
    """A file that holds a secret, of at most `limit` bytes.

    Raises:
        ConfigError: it cannot be read, or others can.
    """
    try:
        status = path.stat()
        data = read_small(path, limit)
    except OSError as error:
        raise ConfigError(f"key file {path}: {error.strerror}") from None
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        raise ConfigError(f"key file {path} must belong to you and be closed to others: chmod 600 {path}")
    return data


def _public(secret: bytes) -> bytes | None:
    """What belongs to a secret key; None where that is no key."""
    try:
        return zmq.curve_public(secret)
    except zmq.ZMQError:
        return None


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
        KeyPair.generate().save(keys_dir / "client.key")
    if guest:
        write_new(keys_dir / GUEST, guest.encode())
    CurveServer.load(keys_dir).allowed()  # what is wrong is told now, rather than to each client by silence
    return server.decode()


def lend_keys(keys_dir: Path, folder: Path) -> str:
    """Give a folder the clients' keys of a deployment on several hosts; returns its servers' public key.

    Args:
        keys_dir: as `create_keys` made it.

    Raises:
        ConfigError: the keys there cannot be used, or the folder has those of another deployment.
        OSError: the copy cannot be made.
    """
    server, clients = CurveServer.load(keys_dir), KeyPair.load(keys_dir / "client.key")
    server.allowed()
    copy = folder / "client.key"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not copy.exists():
        clients.save(copy)
    elif KeyPair.load(copy) != clients:
        raise ConfigError(f"{copy} is of other keys than {keys_dir}: move it, or name another runtime_dir")
    return server.pair.public.decode()
