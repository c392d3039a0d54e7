"""Engines in lockstep on several hosts: one failure domain, whatever happens to a host or to the network."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.faults.conftest import LIMITS, SCRIPT, Deployed, Stream
from tests.support.lockstep_hosts import lockstep_settings, on_all
from tests.support.proxy import Proxy
from tests.support.waiting import two_free_ports, until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.frontend.client.service import make_supervisor
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes.supervisor import Limits

SLOW = pytest.mark.slow
PATIENT = Limits(ready=60, drain=5, step=60, idle=60, grace=5)  # a host's supervisor does not see that it is stopped
Start = Callable[..., Any]
RANK = ["rank 0 on 127.0.0.", "rank 1 on 127.0.0.3"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """`with start({rank: faults}) as (one, two):`, a deployment a host; with `via` a proxy as the third, through which
    the second connects. At the end every request has ended, and nothing is left."""

    @contextmanager
    def make(faults: dict[int, Any] | None = None, limits: Limits = LIMITS, via: Any = None) -> Iterator[list[Any]]:
        port, supervisors, scripts = two_free_ports(), [], []
        with ExitStack() as stack:
            proxy = None if via is None else stack.enter_context(via(port))
            for rank, own in enumerate(lockstep_settings(tmp_path, 2, port)):
                scripts.append(tmp_path / f"script{rank}.json")
                script = {**SCRIPT, "step_seconds": 0.01, "faults": (faults or {}).get(rank, {})}
                scripts[-1].write_text(json.dumps(script))
                if rank and proxy:
                    own["data_parallel_address"] = f"tcp://127.0.0.1:{proxy.port}"
                config = EngineConfig(model=f"scripted:{scripts[-1]}", max_num_seqs=2, **own)
                supervisors.append(make_supervisor(config, limits))
            stack.callback(on_all, [supervisor.stop for supervisor in supervisors])
            found = on_all([partial(Deployed, *each) for each in zip(supervisors, scripts, strict=True)])
            for deployed in found:
                stack.callback(deployed.llm.shutdown)
            yield [*found, *([proxy] if proxy else [])]
            for deployed in found:
                for stream in deployed.streams:
                    assert stream.end
                assert deployed.call("check_integrity") is True

    return make


@contextmanager
def weak(port: int) -> Iterator[Proxy]:
    proxy = Proxy(port)
    try:
        yield proxy
    finally:
        proxy.close()


def deaf(_data: bytes) -> list[bytes]:
    return []


def passing(data: bytes) -> list[bytes]:
    return [data]


def streaming(hosts: list[Deployed], max_tokens: int = 2000) -> list[Stream]:
    """A request on each host that has tokens."""
    streams = [host.stream(number, max_tokens) for number, host in enumerate(hosts)]
    for stream in streams:
        assert stream.first.wait(30)
    return streams


def check_new_life(hosts: list[Deployed], epochs: list[str]) -> None:
    """All hosts serve in a new life, together: each one's step is one of all."""
    for host, epoch in zip(hosts, epochs, strict=True):
        assert host.recovered(epoch).restarts > 0
    for number, host in enumerate(hosts):
        host.stream(500 + number, 10).check_finished()
    until(lambda: len({s["steps"] + s["dummy_steps"] for host in hosts for s in host.llm.step_stats()}) == 1)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=SLOW), 1])
def test_killed_rank_of_another_host(start: Start, rank: int) -> None:
    """One of several hosts in lockstep loses its engine (kill -9); rank 0's is the one that all others talk to.

    The streams of all hosts end with `EngineDead`, which names the rank and its host; each host's supervisor starts its
    engine again, and they meet in a new life.
    """
    with start() as hosts:
        epochs = [host.engine.epoch for host in hosts]
        streams = streaming(hosts)
        os.kill(hosts[rank].engine.pid, signal.SIGKILL)
        for stream in streams:
            assert isinstance(stream.error, EngineDead)
            stream.check_prefix()
        assert f"engine {rank} (pid" in str(streams[rank].error) and "signal 9" in str(streams[rank].error)
        assert RANK[rank] in str(streams[1 - rank].error)
        check_new_life(hosts, epochs)


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_rank_of_another_host_that_raises(start: Start, rank: int) -> None:
    """One of several hosts in lockstep meets an exception that no single request is to blame for.

    All streams get it, with the rank, its host and the error, and all hosts start again.
    """
    with start({rank: {"raise_at_step": 20}}) as hosts:
        epochs = [host.engine.epoch for host in hosts]
        hosts[rank].heal()
        for number, stream in enumerate(streaming(hosts)):
            assert "RuntimeError: the scripted model was told to raise" in str(stream.error)
            assert number == rank or RANK[rank] in str(stream.error)
        check_new_life(hosts, epochs)


@SLOW
@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_host(start: Start, rank: int) -> None:
    """One of several hosts in lockstep stops (SIGSTOP of all that runs on it), and goes on later.

    After 10 s of silence the others end, and name its rank and host. When it goes on it is told that its life is over,
    ends, and meets them in the next one. No request ends twice, and none is answered from two lives.
    """
    with start(limits=PATIENT) as hosts:
        epochs = [host.engine.epoch for host in hosts]
        streams = streaming(hosts)
        os.kill(hosts[rank].engine.pid, signal.SIGSTOP)
        said = str(streams[1 - rank].error)
        assert RANK[rank] in said and "was silent for 10 s" in said
        until(lambda: hosts[1 - rank].engine.state != "ready")
        os.kill(hosts[rank].engine.pid, signal.SIGCONT)
        assert isinstance(streams[rank].error, EngineDead)
        for stream in streams:
            stream.check_prefix()
        check_new_life(hosts, epochs)


@SLOW
def test_half_open_network(start: Start) -> None:
    """The network between hosts in lockstep carries nothing for a while, and no connection breaks.

    After 10 s both sides end, and each names the other. They meet in a new life when the network carries again.
    """
    with start(via=weak) as (one, two, proxy):
        hosts = [one, two]
        epochs = [host.engine.epoch for host in hosts]
        streams = streaming(hosts)
        proxy.change = deaf
        for rank, stream in enumerate(streams):
            assert f"rank {1 - rank} on 127.0.0." in str(stream.error) and "was silent for 10 s" in str(stream.error)
            stream.check_prefix()
        proxy.change = passing
        check_new_life(hosts, epochs)


@pytest.mark.parametrize("fault", ["resets", pytest.param("delay", marks=SLOW), pytest.param("short", marks=SLOW)])
def test_network_that_is_bad_for_a_while(start: Start, fault: str) -> None:
    """Connections between hosts in lockstep break and come back, take 200 ms each way, or carry nothing for 3 s.

    No request is lost, and no token wrong: it takes as long as it takes.
    """
    with start(via=weak) as (one, two, proxy):
        streams = streaming([one, two], 20 if fault == "delay" else 80)
        if fault == "delay":
            proxy.delay = 0.2
        elif fault == "short":
            proxy.change = deaf
            begun = len(streams[0].tokens)
            with pytest.raises(AssertionError):
                until(lambda: len(streams[0].tokens) > begun + 5, seconds=3)
            proxy.change = passing
        else:
            for number in (20, 40):
                until(lambda number=number: len(streams[0].tokens) > number)  # type: ignore[misc]
                proxy.reset()
        for stream in streams:
            stream.check_finished()
        assert [host.engine.restarts for host in (one, two)] == [0, 0]


@SLOW
def test_sigterm_to_one_host(start: Start) -> None:
    """One of several hosts in lockstep gets SIGTERM.

    All drain: running requests finish on each, and then all end in order, at once.
    """
    with start() as hosts:
        epochs = [host.engine.epoch for host in hosts]
        streams = streaming(hosts, 150)
        os.kill(hosts[1].engine.pid, signal.SIGTERM)
        for stream in streams:
            stream.check_finished()
        for host, epoch in zip(hosts, epochs, strict=True):
            cause = host.cause_of(epoch)
            assert (cause.signal, cause.status) == (0, 0)
        check_new_life(hosts, epochs)
