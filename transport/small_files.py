"""Files: opened without trust, since anything may lie in their place, and small ones read whole and written once."""

import errno
import os
import stat
from io import BufferedReader
from pathlib import Path


def open_regular(path: Path) -> BufferedReader:
    """A regular file, opened to be read. Waits for nobody.

    Raises:
        OSError: missing, or no regular file: a FIFO would be waited for, a device has no end.
    """
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file")
    return file


def read_small(path: Path, limit: int = 256 << 20) -> bytes:
    """The whole of a regular file.

    Raises:
        OSError: it cannot be opened, or has more than `limit` bytes.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"larger than {limit} bytes")
    return data


def write_new(path: Path, data: bytes) -> None:
    """Make a file that only its owner can read; whole or not at all, where the disk is full.

    Raises:
        OSError: it is there already, or cannot be written.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
    except OSError as error:
        path.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error
