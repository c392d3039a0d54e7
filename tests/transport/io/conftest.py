"""A client with a memory, engines beside it or in a process of their own, and sockets that are closed in any case."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.support.linked_ranks import Hosts
from tests.transport.io import fake_engine

from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import WavecoreError
from wavecore.transport.io import sockets
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.connection import Disconnected, EngineEvent, Reconnected
from wavecore.transport.io.host_link import HostLink
from wavecore.transport.io.sockets import make_context, make_socket
from wavecore.transport.wire.messages import Abort, Add, Ready, Result, Step, Utility
from wavecore.transport.wire.tensors import from_numpy, to_numpy

DEADLINE = 30.0  # generous: other processes may own the cores; nothing waits for it to pass


class Client:
    """A ClientPump with a memory. Checks every token as it comes; `wait_for` blocks on a condition."""

    def __init__(self, on_step: Callable[[Step], None] | None = None) -> None:
        self.changed = threading.Condition()
        self.events: list[EngineEvent] = []
        self.received: dict[int, int] = {}  # handle -> tokens so far
        self.ends: dict[int, list[int]] = {}  # handle -> finish codes; exactly one is right
        self.extras: dict[int, dict[str, Any]] = {}
        self.results: dict[int, Result] = {}
        self.faults: list[str] = []
        self.refused: list[WavecoreError] = []  # why messages were not sent
        self.frames = 0
        self.steps = 0
        self.on_step = on_step
        self._next = 0
        self.pump = ClientPump(self._event)

    def _event(self, index: int, event: EngineEvent) -> None:
        if isinstance(event, Step) and self.on_step is not None:
            self.on_step(event)
        with self.changed:
            if isinstance(event, Step):
                self._step(event)
            elif isinstance(event, Result):
                self.results[event.call] = event
            else:
                self.events.append(event)
            self.changed.notify_all()

    def _step(self, step: Step) -> None:
        self.steps += 1
        output = step.output
        starts = np.concatenate([[0], np.cumsum(output.counts, dtype=np.int64)])
        for row, handle in enumerate(output.handles.tolist()):
            if handle in self.ends:
                self.faults.append(f"output for {handle} after its end")
            first = self.received.get(handle, 0)
            for offset, got in enumerate(output.tokens[starts[row] : starts[row + 1]].tolist()):
                if got != fake_engine.token(handle, first + offset):
                    self.faults.append(f"handle {handle}: token {first + offset} is {got}")
            self.received[handle] = first + int(output.counts[row])
            for position in output.extras.get(row, {}).get("pooled", ()):
                array = to_numpy(output.frames[position])
                self.frames += 1
                if len(set(array[:: max(1, len(array) // 64)].tolist())) != 1:
                    self.faults.append(f"handle {handle}: a tensor was mixed up")
            self.extras.setdefault(handle, {}).update(output.extras.get(row, {}))
            if output.finish[row]:
                self.ends.setdefault(handle, []).append(int(output.finish[row]))

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, DEADLINE), f"waited in vain for {what}"
        assert not self.faults, self.faults[:5]

    def saw(self, kind: type, times: int = 1) -> bool:
        return sum(isinstance(event, kind) for event in self.events) >= times

    def connect(self, addresses: tuple[str, str], curve: CurveClient | None = None) -> None:
        readies = sum(isinstance(event, Ready) for event in self.events)
        self.pump.connect(0, *addresses, curve)
        self.wait_for(lambda: self.saw(Ready, readies + 1), "READY")

    def add(self, prompt: Any = (1, 2, 3), **params: Any) -> int:
        handle = self._next
        self._next += 1
        ids = from_numpy(np.asarray(prompt, np.int32))
        self._send(Add(b"", b"", 0, handle, ids, params))
        return handle

    def abort(self, *handles: int) -> None:
        self._send(Abort(b"", b"", 0, np.array(handles, np.uint32)))

    def call(self, call: int, method: str, **args: Any) -> None:
        self._send(Utility(b"", b"", 0, call, method, args))

    def _send(self, message: Add | Abort | Utility) -> None:
        self.pump.call_soon(lambda: self._send_now(message))

    def _send_now(self, message: Add | Abort | Utility) -> None:
        try:
            self.pump.send(0, message)
        except WavecoreError as error:
            with self.changed:
                self.refused.append(error)
                self.changed.notify_all()

    def wait_refusal(self, kind: type[WavecoreError]) -> WavecoreError:
        self.wait_for(lambda: bool(self.refused), "the refusal")
        assert type(self.refused[0]) is kind
        return self.refused.pop()

    def wait_ends(self, *handles: int) -> None:
        self.wait_for(lambda: all(handle in self.ends for handle in handles), f"the end of {len(handles)} requests")
        assert all(len(self.ends[handle]) == 1 for handle in handles)

    def wait_outage(self) -> None:
        self.wait_for(lambda: self.saw(Disconnected) and self.saw(Reconnected), "an outage and its end")


class EngineProcess:
    """fake_engine.py as a child process."""

    def __init__(self, input_address: str, output_address: str, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, fake_engine.__file__, input_address, output_address, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = json.loads(self.process.stdout.readline())
        self.addresses = (line["input"], line["output"])

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, kill: bool = False) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        if kill:
            self.process.kill()
        else:
            self.process.send_signal(signal.SIGCONT)
            self.process.stdin.close()
        self.process.wait(DEADLINE)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def ipc() -> Iterator[tuple[str, str]]:
    """Two fresh ipc addresses."""
    with tempfile.TemporaryDirectory(prefix="wc-") as folder:
        yield f"ipc://{folder}/input", f"ipc://{folder}/output"


@pytest.fixture
def raw_socket() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    """Makes sockets of a test's own. They are closed here, so that a failing test cannot hang the next."""
    context = make_context()
    made: list[zmq.Socket[bytes]] = []

    def make(kind: int, address: str, identity: bytes | None = None) -> zmq.Socket[bytes]:
        made.append(make_socket(context, kind, address, identity=identity))
        made[-1].setsockopt(zmq.SNDTIMEO, 20_000)
        made[-1].setsockopt(zmq.RCVTIMEO, 20_000)
        return made[-1]

    yield make
    for socket in made:
        socket.close(0)
    context.term()


@pytest.fixture
def clean_up() -> Iterator[Callable[[Callable[[], object]], None]]:
    """Register what must be called at the end, in reverse order."""
    stack: list[Callable[[], object]] = []
    yield stack.append
    for call in reversed(stack):
        call()


@pytest.fixture
def make_engine(ipc: tuple[str, str], clean_up: Any) -> Callable[..., Any]:
    """Starts a fake engine in this process (default addresses: `ipc`)."""

    def make(addresses: tuple[str, str] = ipc, **options: Any) -> Any:
        engine = fake_engine.FakeEngine(*addresses, **options)
        clean_up(engine.stop)
        return engine

    return make


@pytest.fixture
def make_client(clean_up: Any) -> Callable[..., Client]:
    def make(**options: Any) -> Client:
        client = Client(**options)
        clean_up(client.pump.close)
        return client

    return make


@pytest.fixture
def make_process(ipc: tuple[str, str], clean_up: Any) -> Callable[..., EngineProcess]:
    """Starts a fake engine in a child process (default addresses: `ipc`)."""

    def make(*options: str, addresses: tuple[str, str] = ipc) -> EngineProcess:
        engine = EngineProcess(*addresses, *options)
        clean_up(lambda: engine.end(kill=engine.process.poll() is None))
        return engine

    return make


@pytest.fixture
def quick_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second of both ends in this process lasts a tenth: heartbeats, silence, repeats. Under load a peer may so seem
    silent: for tests that wait for just that."""
    fake_engine.quicken(monkeypatch.setattr)


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    """Of ranks that repeat what they say ten times as often, and leave after a quarter of a second."""
    monkeypatch.setattr(HostLink, "tick_seconds", 0.05)
    monkeypatch.setattr(HostLink, "flush_seconds", 0.25)
    monkeypatch.setattr(sockets, "LINGER_MS", 200)
    with ExitStack() as until:
        yield Hosts(tmp_path / "keys", until)
