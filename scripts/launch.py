"""Runs the engines of a deployment, as `wavecore engine` does, and shows which GPUs their ranks have.

    scripts/launch.py -dp D -tp T MODEL [--SETTING VALUE ...] [--dry-run] [--log-dir DIR]

    -dp D, --data-parallel-size D      so many engines, each with the whole model
    -tp T, --tensor-parallel-size T    so many GPUs an engine
    --dry-run                          print the map of ranks to devices, and end
    --log-dir DIR                      besides standard error, every line that a rank prints into a file of its own

All settings of `wavecore engine` are understood, with the same exit codes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.devices import places
from wavecore.frontend.cli.engine import make_parser, serve
from wavecore.frontend.cli.main import own_process, told
from wavecore.frontend.cli.parser import settings
from wavecore.transport.errors import NotSupportedError
from wavecore.transport.processes.logs import LineWriter

MAX_WAITING = 1 << 20  # lines for a file that is written too slowly; LineWriter says how many more it dropped


def run(args: Sequence[str]) -> int:
    parser = make_parser("scripts/launch.py")
    parser.option("dry_run", bool, False, "print the map of ranks to devices, and end")
    parser.option("log_dir", str, "", "folder for a file of each rank with every line that it prints")
    values = parser.parse(args)
    config = settings(values)
    devices = device_map(config)
    print("\n".join(f"{name}: {device}" for name, device in devices.items()), flush=True)
    if values.dry_run:
        return 0
    if not values.log_dir:
        return serve(config)
    with log_files(Path(values.log_dir), devices) as on_output:
        return serve(config, on_output)


def device_map(config: EngineConfig) -> Mapping[str, str]:
    """The device of each rank, by the name that its lines and errors have.

    Raises:
        ConfigError: too few GPUs.
        NotSupportedError: Ray chooses them, later.
    """
    if config.data_parallel_backend == "ray":
        raise NotSupportedError("scripts/launch.py with data_parallel_backend ray: use `wavecore engine`")
    found, size = [place for ranks in places(config) for place in ranks], config.tensor_parallel_size
    group = len(found) if config.dp_lockstep else size
    return {
        f"engine {number // size}" + (f" rank {number % group}" if group > 1 else ""): place.name
        for number, place in enumerate(found)
    }


@contextmanager
def log_files(folder: Path, names: Iterable[str]) -> Iterator[Callable[[str, str], None]]:
    """What writes lines of ranks into `<name>.log` each, behind those of earlier runs, and makes nobody wait.

    Raises:
        OSError: the files cannot be made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        writers = {}
        for name in names:
            path = folder / f"{name.replace(' ', '-')}.log"
            writers[name] = _writer(stack.enter_context(path.open("a", encoding="utf-8")))
            stack.callback(writers[name].close)
        yield lambda name, line: writers[name].put(line)


def _writer(file: TextIO) -> LineWriter:
    return LineWriter(lambda: file, MAX_WAITING)


if __name__ == "__main__":
    own_process()
    sys.exit(told("launch.py", lambda: run(sys.argv[1:])))
