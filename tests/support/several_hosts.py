"""Hosts that share no memory: addresses of this machine from 127.0.0.2 on, and what a client elsewhere has of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.proxy import Proxy

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.client.service import make_supervisor
from wavecore.transport.curve import create_keys
from wavecore.transport.processes.places import access_to
from wavecore.transport.processes.supervisor import Limits, Supervisor


def host_settings(folder: Path, engines: Sequence[int], host: int) -> dict[str, Any]:
    """Of one of several hosts, of which `engines` says how many each has; the keys are in `folder`."""
    return {
        "address": f"tcp://127.0.0.{host + 2}",
        "data_parallel_size": sum(engines),
        "data_parallel_rank": sum(engines[:host]),
        "data_parallel_size_local": engines[host],
        "keys": str(folder / "keys"),
    }


@contextmanager
def dense_hosts(
    folder: Path, engines: Sequence[int], limits: Limits | None = None, **settings: Any
) -> Iterator[list[Supervisor]]:
    """Start so many engines on each host; each host has a supervisor of its own, in this process."""
    create_keys(folder / "keys")
    own = [host_settings(folder, engines, host) for host in range(len(engines))]
    supervisors = [make_supervisor(EngineConfig(**{**each, **settings}), limits) for each in own]
    with ThreadPoolExecutor(len(engines)) as threads, ExitStack() as stack:
        for supervisor in supervisors:
            stack.callback(supervisor.stop)
        list(threads.map(Supervisor.start, supervisors))
        yield supervisors


def save_access(runtime_dir: Path, file: Path, change: Callable[[dict[str, Any]], object] | None = None) -> Path:
    """What `wavecore access` prints of these engines, as a file, after `change` has seen it."""
    told = json.loads(access_to(runtime_dir))
    if change is not None:
        change(told)
    file.touch(mode=0o600)
    file.write_text(json.dumps(told))
    return file


@contextmanager
def way_to(runtime_dir: Path, file: Path, own: str) -> Iterator[list[Proxy]]:
    """An access file to the engines of a runtime directory that leads through proxies at the address `own`."""
    with ExitStack() as stack:
        proxies = []

        def through(told: dict[str, Any]) -> None:
            for engine in told["engines"]:
                for end in ("input", "output"):
                    host, _, port = engine[end].removeprefix("tcp://").rpartition(":")
                    proxies.append(Proxy(int(port), host, own))
                    stack.callback(proxies[-1].close)
                    engine[end] = f"tcp://{own}:{proxies[-1].port}"

        save_access(runtime_dir, file, through)
        yield proxies
