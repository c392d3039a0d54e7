"""What the files of a model have in common: they are read with bounds, and what cannot be read is named."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from wavecore.transport.errors import ModelError
from wavecore.transport.small_files import open_regular, read_small


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; {} where there is none.

    Raises:
        ModelError: naming the file that is over-size or not a JSON object.
    """
    text = read_text(path) if path.exists() else "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_text(path: Path) -> str:
    """A text file.

    Raises:
        ModelError: naming the file that is over-size, no text or no regular file.
    """
    try:
        return read_small(path).decode()
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def named_path(name: str | Path) -> Path:
    """The file or folder that a user means; there may be none. `~` is their home.

    Raises:
        ModelError: it may not be read, or no path can be so.
    """
    try:
        path = Path(name).expanduser()
        allowed = not path.exists() or os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK)
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of nobody known
        raise ModelError(f"{str(name)[:200]!r} cannot be a path: {getattr(error, 'strerror', error)}") from error
    if not allowed:
        raise ModelError(f"{path} cannot be read: permission denied")
    return path


def unreadable(path: Path, reason: object) -> ModelError:
    """The error for a file that is not what its name says; one that Git LFS has not fetched yet is named as that."""
    way_out = "" if isinstance(reason, OSError) else "; download it again"  # the system's own reason says enough
    with suppress(OSError), open_regular(path) as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            reason, way_out = "it is a Git LFS pointer, not the file itself", "; run `git lfs pull` in its folder"
    return ModelError(f"{path} cannot be read: {reason}{way_out}")
