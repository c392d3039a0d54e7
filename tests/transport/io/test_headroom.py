"""Too few descriptors or threads are told before libzmq, which would end the process, is asked for anything."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import until
from tests.transport.io.conftest import DEADLINE

from wavecore.transport import headroom
from wavecore.transport.errors import ResourceError
from wavecore.transport.io import connection
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.connection import ClientFailed
from wavecore.transport.wire.messages import Dead, Ready

# Makes clients of the engine at {addresses} under a limit of descriptors until that fails, and says with what.
CONNECT = """
import resource, sys, threading
from wavecore.transport.errors import ResourceError
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.connection import ClientFailed
from wavecore.transport.wire.messages import Ready

resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))
clients = []
try:
    while True:
        heard, events = threading.Event(), []
        def on_event(_, event):
            if isinstance(event, Ready | ClientFailed):
                events.append(event)
                heard.set()
        clients.append(ClientPump(on_event))
        clients[-1].connect(0, *{addresses})
        heard.wait()
        assert isinstance(events[0], Ready), events
except ResourceError as error:
    print(len(clients), error)
for client in clients:
    client.close()
"""


def num_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.parametrize("limit", [20, 64, 67, 69, 71, 75])
def test_a_program_that_runs_out_of_descriptors_hears_so(make_process: Any, limit: int) -> None:
    """With 69, 71 and 75 of them it would be libzmq that finds none, and ends the program."""
    engine = make_process()
    script = CONNECT.format(limit=limit, addresses=engine.addresses)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert f"needs 20 file descriptors, and of this process's {limit} only" in done.stdout


@pytest.mark.parametrize("given", range(4))
def test_a_client_without_a_thread_is_refused_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch, given: int) -> None:
    """Whichever of its threads the system does not give."""
    threads, files = threading.active_count(), num_descriptors()
    start, left = threading._start_new_thread, iter(range(given))  # type: ignore[attr-defined]

    def refuse(*args: Any) -> int:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        return int(start(*args))

    monkeypatch.setattr(threading, "_start_new_thread", refuse)
    with pytest.raises(ResourceError, match="ulimit -u"):
        ClientPump(lambda *_: None)
    until(lambda: (threading.active_count(), num_descriptors()) == (threads, files), "everything given back")


def test_a_client_that_cannot_open_its_sockets_says_so(make_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise ResourceError("no descriptor is left")

    monkeypatch.setattr(connection, "make_socket", refuse)
    client = make_client()
    client.pump.connect(0, "ipc:///nowhere", "ipc:///nowhere")
    client.wait_for(lambda: client.saw(ClientFailed), "the failure")
    assert isinstance(client.events[0].error, ResourceError)


def test_a_client_that_cannot_open_sockets_again_says_so_and_leaves_nothing(
    make_engine: Any, make_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any, **_options: Any) -> Any:
        raise ResourceError("no descriptor is left")

    engine = make_engine()
    threads, files = threading.active_count(), num_descriptors()
    client = make_client()
    client.connect(engine.addresses)
    monkeypatch.setattr(connection, "make_socket", refuse)
    client.pump.connect(0, *engine.addresses)
    client.wait_for(lambda: client.saw(ClientFailed), "the failure")
    assert isinstance(client.events[-1].error, ResourceError)
    client.pump.join(DEADLINE)
    until(lambda: threading.active_count() == threads, "the end of its threads")
    until(lambda: num_descriptors() <= files, "everything given back")


def test_clients_beyond_an_engines_descriptors_are_refused_by_name(make_process: Any, make_client: Any) -> None:
    engine = make_process()
    resource.prlimit(engine.process.pid, resource.RLIMIT_NOFILE, (80, 80))
    clients = []
    while not clients or clients[-1].saw(Ready):
        clients.append(make_client())
        clients[-1].pump.connect(0, *engine.addresses)
        clients[-1].wait_for(lambda: clients[-1].events, "an answer")
    assert clients[-1].events[0].code == "overloaded"
    assert "of the engine's 80 file descriptors are free)" in clients[-1].events[0].message
    crowd = [make_client() for _ in range(10)]
    for client in crowd:
        client.pump.connect(0, *engine.addresses)
    for client in crowd:
        client.wait_for(lambda client=client: client.saw(Dead), "the refusal")
        client.pump.close()
    for client in clients[:-1]:
        client.wait_ends(client.add())
    assert engine.process.poll() is None


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[0] - 1, before[1]))
        headroom.raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
