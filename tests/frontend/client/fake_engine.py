"""A pump without sockets and a deployment without processes: what a client sends is a list, what it hears is called."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from wavecore.engine_core.api.request_options import RequestOptions
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.client import EngineClient
from wavecore.frontend.client.mailbox import Mailbox, OutputKind
from wavecore.frontend.client.notifiers import ThreadNotifier
from wavecore.frontend.client.request import EngineRequest
from wavecore.transport.errors import EngineDead
from wavecore.transport.io.connection import Disconnected, EngineEvent, Reconnected
from wavecore.transport.processes.deployment import Cause, Deployment, EngineEntry
from wavecore.transport.processes.places import Place
from wavecore.transport.wire.messages import UNTOLD, Abort, Add, Load, Ready, Step, StepTokens, TensorFrame, Utility
from wavecore.transport.wire.tensors import to_numpy

START_SECONDS = 5.0
RESOLVED = {"max_model_len": 100, "vocab_size": 50, "enable_prefix_caching": True}


class FakePump:
    """Stands in for `ClientPump`; events are given by the test, in its own thread."""

    tick_seconds = 1.0
    mute: frozenset[int] = frozenset()  # engines that do not answer

    def __init__(self, on_event: Callable[[int, EngineEvent], None]) -> None:
        self._on_event = on_event
        self.client_ids: dict[int, bytes] = {}
        self.epochs: dict[int, bytes] = {}
        self.addresses: dict[int, tuple[str, str]] = {}
        self.sent: list[tuple[int, Add | Abort | Utility]] = []
        self.lives = 0
        self.closed = False
        self._lock = threading.RLock()  # what the IO thread of the real one does one after the other

    def call_soon(self, call: Callable[[], object]) -> None:
        with self._lock:
            call()

    def call_later(self, seconds: float, call: Callable[[], object]) -> None:
        timer = threading.Timer(seconds, lambda: self.closed or self.call_soon(call))
        timer.daemon = True
        timer.start()

    def forked(self) -> None:
        self.closed = True

    def connect(self, index: int, input: str, output: str, curve: object = None) -> None:
        self.addresses[index] = (input, output)
        if index not in self.mute:
            self.new_life(index)

    def client_id(self, index: int) -> bytes | None:
        return self.client_ids.get(index)

    def send(self, index: int, message: Add | Abort | Utility) -> bytes:
        if index not in self.client_ids:
            raise EngineDead("not ready")
        self.sent.append((index, message))
        return self.client_ids[index]

    def close(self, timeout: float = 1.0) -> None:
        self.closed = True

    # --- what the test makes happen ---

    def on_event(self, index: int, event: EngineEvent) -> None:
        self.call_soon(lambda: self._on_event(index, event))

    def new_life(self, index: int) -> None:
        self.lives += 1
        self.epochs[index] = bytes([self.lives]) * 16
        self.new_session(index)

    def new_session(self, index: int) -> None:
        self.lives += 1
        self.client_ids[index] = bytes([self.lives]) * 16
        self.on_event(index, Ready(self.epochs[index], RESOLVED))

    def adds(self) -> list[tuple[int, Add]]:
        return [(i, m) for i, m in self.sent if isinstance(m, Add)]

    def aborted(self) -> list[int]:
        return [h for _, m in self.sent if isinstance(m, Abort) for h in m.handles.tolist()]

    def step(
        self,
        index: int,
        rows: Sequence[tuple[int, Sequence[int], int]],
        extras: dict[int, dict[str, Any]] | None = None,
        frames: tuple[TensorFrame, ...] = (),
        load: Load = UNTOLD,
    ) -> None:
        """rows: (handle, tokens, finish)."""
        output = StepTokens(
            np.array([r[0] for r in rows], np.uint32),
            np.array([len(r[1]) for r in rows], np.uint32),
            np.array([t for r in rows for t in r[1]], np.int32),
            np.array([r[2] for r in rows], np.uint8),
            extras or {},
            frames,
        )
        self.on_event(index, Step(self.epochs[index], 1, output, load))

    def disconnect(self, index: int) -> None:
        self.on_event(index, Disconnected("gone"))

    def reconnect(self, index: int) -> None:
        self.on_event(index, Reconnected())


class FakeDeployment:
    """Stands in for `transport.deployment`."""

    def __init__(self, engines: int, server_key: str) -> None:
        entries = tuple(
            EngineEntry(i, "ready", input=f"ipc:///in{i}", output=f"ipc:///out{i}", server_key=server_key)
            for i in range(engines)
        )
        self.value = Deployment("ready", 1, entries)
        self.causes: dict[bytes, Cause] = {}

    def read(self, runtime_dir: Path) -> Deployment:
        return self.value

    def why_dead(self, runtime_dir: Path, index: int, epoch: bytes) -> Cause | None:
        return self.causes.get(epoch)

    def set_state(self, state: str) -> None:
        engines = tuple(replace(e, state=state) for e in self.value.engines)
        self.value = replace(self.value, engines=engines)


class World:
    """A client of fake engines.

    Args:
        places: where they are found; the fake deployment is in each that is no access file.
    """

    def __init__(
        self,
        monkeypatch: Any,
        engines: int = 1,
        state: str = "ready",
        server_key: str = "",
        places: Sequence[Place] = (Path("/nowhere"),),
    ) -> None:
        self.deployment = FakeDeployment(engines, server_key)
        self.deployment.set_state(state)
        for module in ("places.deployment", "client.deployment_watch.deployment"):
            room = "transport.processes" if module.startswith("places") else "frontend"
            monkeypatch.setattr(f"wavecore.{room}.{module}", self.deployment)
        monkeypatch.setattr("wavecore.frontend.client.client.ClientPump", FakePump)
        monkeypatch.setattr("wavecore.frontend.client.balance.sample", lambda engines, _: engines)
        self.client = EngineClient(*places, timeout=START_SECONDS)
        pump = self.client._pump
        assert isinstance(pump, FakePump)
        self.pump = pump
        self.notifier = ThreadNotifier()

    def submit(
        self,
        prompt: Sequence[int] = (1, 2),
        kind: OutputKind = OutputKind.DELTA,
        resume: bool = False,
        timeout: float | None = None,
        queue_timeout: float | None = None,
        rank: int | None = None,
        **params: Any,
    ) -> Mailbox:
        values = SamplingParams(**{"temperature": 0.0, **params})
        options = RequestOptions(timeout=timeout, queue_timeout=queue_timeout, data_parallel_rank=rank)
        ids = np.array(prompt, np.int32)
        request = EngineRequest("r", None, ids, values, values.to_wire(), options, resume=resume)
        mailbox = Mailbox(request, None, self.notifier, kind)
        self.client.submit(mailbox)
        return mailbox

    def kill(self, index: int, message: str = "engine 0 was killed by signal 9") -> None:
        """The engine dies; the deployment knows why before the client hears of it."""
        self.deployment.causes[self.pump.epochs[index]] = Cause("signal", message, signal=9)
        self.pump.disconnect(index)

    def prompt_of(self, add: Add) -> list[int]:
        ids: list[int] = to_numpy(add.prompt).tolist()
        return ids
