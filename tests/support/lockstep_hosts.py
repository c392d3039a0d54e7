"""Hosts that compute together, an engine each in lockstep, or one engine on all; see several_hosts.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.support.several_hosts import host_settings
from tests.support.waiting import two_free_ports

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.transport.curve import create_keys
from wavecore.transport.processes.supervisor import Supervisor


def on_all(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make the calls at once, as hosts do; what they return, in order."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def lockstep_settings(folder: Path, hosts: int, port: int) -> list[dict[str, Any]]:
    """What the engine on each host has of its own, and all alike.

    Args:
        folder: for keys, which all hosts have.
        port: of the head.
    """
    create_keys(folder / "keys")
    common = {"dp_lockstep": True, "data_parallel_address": f"tcp://127.0.0.1:{port}"}
    common |= {"skip_tokenizer_init": True, "disable_tqdm": True}
    return [{**common, **host_settings(folder, [1] * hosts, host)} for host in range(hosts)]


@contextmanager
def started(supervisors: Sequence[Supervisor]) -> Iterator[list[LLM]]:
    """All hosts at once; a client of each."""
    with ExitStack() as stack:
        stack.callback(on_all, [supervisor.stop for supervisor in supervisors])
        clients = [LLM.connect(folder) for folder in on_all([supervisor.start for supervisor in supervisors])]
        for llm in clients:
            stack.callback(llm.shutdown)
        yield clients


@contextmanager
def hosts_in_lockstep(folder: Path, of_each: Sequence[dict[str, Any]], **settings: Any) -> Iterator[list[LLM]]:
    """Start an engine a host; a client of each.

    Args:
        folder: for keys.
        of_each: settings of each host, beside those of all.
    """
    own = lockstep_settings(folder, len(of_each), two_free_ports())
    configs = [EngineConfig(**{**common, **settings, **more}) for common, more in zip(own, of_each, strict=True)]
    with started([make_supervisor(config) for config in configs]) as clients:
        yield clients


def one_engine_settings(folder: Path, hosts: int, port: int) -> list[dict[str, Any]]:
    """What each host has of its own where the ranks of one engine lie on all of them, and all alike.

    Args:
        folder: for keys, which all hosts have.
        port: of the head.
    """
    create_keys(folder / "keys")
    common = {"nnodes": hosts, "keys": str(folder / "keys"), "data_parallel_address": f"tcp://127.0.0.1:{port}"}
    common |= {"skip_tokenizer_init": True, "disable_tqdm": True}
    return [{**common, "node_rank": host, "address": f"tcp://127.0.0.{host + 2}"} for host in range(hosts)]
