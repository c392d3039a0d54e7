"""The folder of one deployment: sockets, keys and `deployment.json`. Private, locked while in use, gone afterwards.

The lock is an flock held by the supervisor: Linux drops it with the process, whatever ended it, so a free lock
means a dead supervisor. A second bind to an ipc path silently takes it over, hence a fresh folder for each start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from wavecore.transport.errors import ConfigError, ResourceError

LOCK = "lock"
PREFIX = "wavecore-"
MAX_PATH = 80  # an ipc path must stay under 108 bytes with the socket's name behind it


class RuntimeDir:
    """Create with `RuntimeDir(path)`; `remove` when done.

    Args:
        path: a folder of the user's choice, or None for a fresh one under $XDG_RUNTIME_DIR or the temp folder;
            then folders of dead supervisors beside it are removed first.

    Raises:
        ConfigError: the folder is in use, not private, or its path is too long.
        ResourceError: it cannot be made.
    """

    def __init__(self, path: str | None) -> None:
        try:
            self.path, self._lock, self._fresh = _fresh() if path is None else _given(Path(path).absolute())
        except OSError as error:
            raise ResourceError(f"cannot make the runtime directory: {error}; name another with runtime_dir") from error

    def remove(self) -> None:
        """Delete what a deployment made, then the folder if it is ours or empty; releases the lock last."""
        if self._lock < 0:
            return
        if self._fresh:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            _clear(self.path)
            (self.path / LOCK).unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self.path.rmdir()
        os.close(self._lock)
        self._lock = -1


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of this runtime directory."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:  # no descriptor left, no permission: who cannot tell must not call it dead
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _fresh() -> tuple[Path, int, bool]:
    base = _base()
    for old in base.glob(f"{PREFIX}*"):
        if _is_private(old) and (old / LOCK).exists() and not is_held(old):
            shutil.rmtree(old, ignore_errors=True)
    # The name that others may sweep appears only once the lock is held.
    scratch = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=base))
    lock = _take_lock(scratch)
    path = base / scratch.name.lstrip(".")
    scratch.rename(path)
    return path, lock, True


def _given(path: Path) -> tuple[Path, int, bool]:
    if len(os.fsencode(path)) > MAX_PATH:
        raise ConfigError(f"runtime_dir {path} is longer than {MAX_PATH} bytes, too long for an ipc socket in it")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_private(path):
        raise ConfigError(f"runtime_dir {path} must belong to you and be closed to others: chmod 700 {path}")
    lock = _take_lock(path)
    _clear(path)
    return path, lock, False


def _take_lock(path: Path) -> int:
    fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    for _ in range(20):  # a client that looks whether the lock is held holds it for a moment itself
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return fd
        except BlockingIOError:
            time.sleep(0.01)
    os.close(fd)
    raise ConfigError(f"runtime_dir {path} is in use by a running deployment; stop it or name another")


def _clear(path: Path) -> None:
    """Only names that a deployment makes: a user's own files in a folder of their choice stay."""
    for name in ("deployment.json", ".deployment.json"):
        (path / name).unlink(missing_ok=True)
    for socket in path.glob("engine*"):
        socket.unlink(missing_ok=True)
    shutil.rmtree(path / "keys", ignore_errors=True)


def _base() -> Path:
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if base and len(base) <= MAX_PATH // 2 and os.access(base, os.W_OK):
            return Path(base)
    return Path("/tmp")


def _is_private(path: Path) -> bool:
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
