"""The folder of one deployment: sockets, keys and `deployment.json`. Private, locked while in use, gone afterwards.

The lock is an flock held by the supervisor: Linux drops it with the process, whatever ended it, so a free lock
means a dead supervisor. A second bind to an ipc path silently takes it over, hence a fresh folder for each start.

Nothing is removed that a deployment did not write. The lock file lists its names, before they are made, so the next
start knows them however this one ends. A folder that the user named may hold other files, keeps its keys for later
starts, and is looked at by its own next start alone; a fresh one is removed with its keys, and after a kill by any
other start. While the deployment runs, what a cleaner of old files took is made again.
"""

import contextlib
import fcntl
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from wavecore.transport.errors import ConfigError, ResourceError
from wavecore.transport.small_files import write_new
from wavecore.transport.wire.checks import Checker

LOCK = "lock"
ADMIN_SOCKETS = "admin.sock", *(f"admin-{number}.sock" for number in range(1, 64))  # of the API processes, by number
PREFIX = "wavecore-"
MAX_PATH = 80  # an ipc path must stay under 108 bytes with the socket's name behind it
TOUCH_SECONDS = 3600.0  # cleaners take what nobody touched for days
_FRESH, _NAMED = "wavecore, fresh", "wavecore, named"  # first line of a lock file
_HERE = "."  # in its list: the folder itself, which the deployment made
# What a deployment may write at all: a damaged list can name nothing else.
_NAMES = re.compile(
    r"\.|lock|\.?deployment\.json|engine\d+\.(in|out)|admin(-\d+)?\.sock|"
    r"keys(/(server|client)\.key|/authorized_clients(/deployment\.pub)?)?"
)
_MAX_LIST = 1 << 20
_CHECKS = Checker(lambda name, reason: ConfigError(f"{name} {reason}"))


class RuntimeDir:
    """Create with `RuntimeDir(path, names)`; `remove` when done.

    Args:
        path: a folder of the user's choice, or None for a fresh one under $XDG_RUNTIME_DIR or the temp folder;
            then fresh folders of dead supervisors beside it are removed first.
        names: what the deployment will write into it.

    Raises:
        ConfigError: the folder is in use, a link, not private, has files of these names already, or its path cannot be.
        ResourceError: it cannot be made.
    """

    def __init__(self, path: str | None, names: Iterable[str] = ()) -> None:
        self.path = _base() if path is None else _CHECKS.path("runtime_dir", path).absolute()
        self._kind = _FRESH if path is None else _NAMED
        self._lock = -1
        self._names: set[str] = set()  # what is removed at the end
        self._contents: dict[str, bytes] = {}
        self._touch_at = time.monotonic() + TOUCH_SECONDS
        try:
            if path is None:
                _sweep(self.path)
                self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self.path))
            elif len(os.fsencode(self.path)) > MAX_PATH:
                raise ConfigError(f"runtime_dir {path} is longer than {MAX_PATH} bytes, too long for sockets in it")
            if path is None or not os.path.lexists(self.path):
                self._names.add(_HERE)
            self._own(name for name in names if path is None or not name.startswith("keys"))
        except BaseException as error:
            self.remove()
            if not isinstance(error, OSError):
                raise
            text = f"cannot make the runtime directory {self.path}: {error}; name another with runtime_dir"
            raise ResourceError(text) from error

    def keep(self, *names: str) -> None:
        """`repair` writes these files again as they are now."""
        self._contents |= {name: (self.path / name).read_bytes() for name in names}

    def repair(self) -> None:
        """Make again what was removed of the folder, the lock and the files to keep; now and then touch all names.

        Raises:
            ConfigError: another deployment, or another user, has taken the folder's place.
            OSError: it cannot be done just now.
        """
        if not _is_at(self._lock, self.path / LOCK):
            lock, _, _ = _take_lock(self.path)
            os.close(self._lock)
            self._lock = lock
            self._names.add(LOCK)
        self._list_names()
        for name, data in self._contents.items():
            if not os.path.lexists(self.path / name):
                (self.path / name).parent.mkdir(mode=0o700, exist_ok=True)
                write_new(self.path / name, data)
        if time.monotonic() >= self._touch_at:
            self._touch_at += TOUCH_SECONDS
            for name in self._names | {_HERE}:
                with contextlib.suppress(OSError):
                    os.utime(self.path / name, follow_symlinks=False)

    def remove(self) -> None:
        """Delete what this deployment wrote, and the folder if it made that and it is empty; releases the lock last.

        Where another deployment has taken the folder, its files stay.
        """
        if _is_at(self._lock, self.path / LOCK) or not os.path.lexists(self.path / LOCK):
            _delete(self.path, self._names)
        if self._lock >= 0:
            os.close(self._lock)
        self._lock, self._names = -1, set()

    def _own(self, names: Iterable[str]) -> None:
        """Take the lock, remove what a dead deployment left, and list what this one will write."""
        had_lock = os.path.lexists(self.path / LOCK)
        self._lock, _, before = _take_lock(self.path)
        self._names |= before & {LOCK, _HERE} if had_lock else {LOCK}
        _delete(self.path, before - {LOCK, _HERE})
        for name in names:
            if os.path.lexists(self.path / name):
                raise ConfigError(f"{self.path / name} is no file of ours: move it, or name another runtime_dir")
            self._names.add(name)
        self._list_names()

    def _list_names(self) -> None:
        text = "\n".join((self._kind, *sorted(self._names), "")).encode()
        if os.pread(self._lock, _MAX_LIST, 0) != text:
            os.pwrite(self._lock, text, 0)
            os.ftruncate(self._lock, len(text))


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of this runtime directory."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
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


def _sweep(base: Path) -> None:
    """Remove what dead deployments left in fresh folders; one that is just being made has no list yet."""
    for path in list(base.glob(f"{PREFIX}*/{LOCK}")):
        with contextlib.suppress(OSError, ConfigError):
            lock, kind, names = _take_lock(path.parent, os.O_RDWR, tries=1)
            if kind == _FRESH:
                _delete(path.parent, names)
            os.close(lock)


def _take_lock(folder: Path, flags: int = os.O_RDWR | os.O_CREAT, tries: int = 20) -> tuple[int, str, set[str]]:
    """The lock file's descriptor, locked, and what it says: the kind of folder and the names that a deployment wrote.

    Raises:
        ConfigError: another process holds it, or the folder or the file is somebody else's.
    """
    if folder.is_symlink():
        raise ConfigError(f"runtime_dir {folder} is a link: name the folder that it leads to")
    for _ in range(tries):  # a client that looks whether the lock is held holds it for a moment itself
        with contextlib.ExitStack() as unless_taken:
            try:
                if flags & os.O_CREAT:
                    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if not is_private(folder):
                    advice = f"chmod 700 {folder}"
                    raise ConfigError(f"runtime_dir {folder} must belong to you and be closed to others: {advice}")
                fd = os.open(folder / LOCK, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
            except FileNotFoundError:  # its last owner has just removed the folder
                continue
            unless_taken.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
                continue
            text = os.pread(fd, _MAX_LIST, 0).decode(errors="replace")
            kind, *names = text.split("\n")
            if text and kind not in (_FRESH, _NAMED):
                raise ConfigError(f"{folder / LOCK} is no file of ours: move it, or name another runtime_dir")
            if _is_at(fd, folder / LOCK):  # else its owner has just removed it
                unless_taken.pop_all()
                return fd, kind, {name for name in names if _NAMES.fullmatch(name)}
    raise ConfigError(f"runtime_dir {folder} is in use by a running deployment; stop it or name another")


def _delete(folder: Path, names: set[str]) -> None:
    """Delete these names; behind all others the lock, then the folder."""
    for name in (*sorted(names - {LOCK, _HERE}, reverse=True), *(n for n in (LOCK, _HERE) if n in names)):
        path = folder / name
        if not (name.startswith("keys/") and path.parent.is_symlink()):  # that folder is not ours
            with contextlib.suppress(OSError):
                (os.rmdir if path.is_dir() else os.unlink)(path)


def _is_at(fd: int, path: Path) -> bool:
    """Whether this open file is the one at that path."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def _base() -> Path:
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if Path(base).is_absolute() and len(os.fsencode(base)) <= MAX_PATH // 2 and os.access(base, os.W_OK):
            return Path(base)
    return Path("/tmp")


def is_private(path: Path) -> bool:
    """Whether it is a folder of this user's, and no link, that nobody else may enter."""
    try:
        info = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid() and not info.st_mode & 0o077
