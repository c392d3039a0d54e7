"""`wavecore keys DIR` and `wavecore access RUNTIME_DIR`: what engines and clients of several hosts need."""

import os
import stat
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from wavecore.transport.curve import create_keys
from wavecore.transport.errors import ConfigError, ResourceError
from wavecore.transport.processes.places import access_to
from wavecore.transport.processes.runtime_dir import is_private


def run_access(args: Sequence[str]) -> int:
    about = "Prints an access file: where engines listen, and the keys that open them. Keep it to yourself."
    parser = ArgumentParser("wavecore access", description=about)
    parser.add_argument("runtime_dir", metavar="RUNTIME_DIR", type=Path, help="as `wavecore engine` prints it")
    text = access_to(parser.parse_args(args).runtime_dir)
    with suppress(OSError):  # no file, as a test's
        if stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode):
            os.fchmod(sys.stdout.fileno(), 0o600)
    print(text)
    return 0


def run(args: Sequence[str]) -> int:
    about = "Makes CURVE keys for engines on several hosts and their clients; those that are there already stay."
    parser = ArgumentParser("wavecore keys", description=about)
    parser.add_argument("folder", metavar="DIR", type=Path, help="for `wavecore engine --keys DIR` on each host")
    folder = parser.parse_args(args).folder
    if os.path.lexists(folder) and not is_private(folder):
        raise ConfigError(f"{folder} must be a folder that belongs to you and is closed to others: chmod 700 {folder}")
    try:
        create_keys(folder)
    except OSError as error:
        raise ResourceError(f"cannot make keys in {folder}: {error}") from error
    print(f"keys in {folder}; copy it to each host, closed to others: rsync -a {folder} HOST:")
    return 0
