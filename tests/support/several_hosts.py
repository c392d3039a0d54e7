"""Hosts that share no memory: addresses of this machine from 127.0.0.2 on, and what a client elsewhere has of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.client.service import make_supervisor
from wavecore.transport.curve import create_keys
from wavecore.transport.processes.places import AccessFile
from wavecore.transport.processes.supervisor import Limits, Supervisor


def save_access(runtime_dir: Path, file: Path, change: Callable[[dict[str, Any]], object] | None = None) -> Path:
    """What `wavecore access` prints of these engines, as a file that `change` has seen."""
    told = json.loads(AccessFile.of(runtime_dir).to_json())
    if change is not None:
        change(told)
    file.touch(mode=0o600)
    file.write_text(json.dumps(told))
    return file


@contextmanager
def dense_hosts(
    folder: Path, engines: Sequence[int], limits: Limits | None, **settings: Any
) -> Iterator[list[Supervisor]]:
    """Start hosts with keys of their own, which none of them makes; `engines` says how many each has."""
    create_keys(folder / "keys")
    size, supervisors = sum(engines), []
    for host, count in enumerate(engines):
        own: Mapping[str, Any] = {
            "address": f"tcp://127.0.0.{host + 2}",
            "data_parallel_size": size,
            "data_parallel_rank": sum(engines[:host]),
            "data_parallel_size_local": count,
            "keys": str(folder / "keys"),
        }
        supervisors.append(make_supervisor(EngineConfig(**{**own, **settings}), limits))
    with ThreadPoolExecutor(len(engines)) as threads, ExitStack() as stack:
        for supervisor in supervisors:
            stack.callback(supervisor.stop)
        list(threads.map(Supervisor.start, supervisors))
        yield supervisors
