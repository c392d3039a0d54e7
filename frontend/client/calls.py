"""Utility calls that wait for their answer. Every one ends: by the answer, its deadline, or the death of its engine."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from wavecore.frontend.client.timer import Timer
from wavecore.transport.errors import RequestTimeout, WavecoreError, from_code
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.wire.messages import Result, Utility


class Calls:
    """The calls of one client that have no answer yet."""

    def __init__(self, pump: ClientPump, timer: Timer) -> None:
        self._pump = pump
        self._timer = timer
        self._lock = threading.Lock()
        self._pending: dict[int, tuple[int, Future[Result]]] = {}  # number -> engine, future
        self._next = 1

    def start(self, engine: int, method: str, args: Mapping[str, Any], timeout: float) -> Future[Result]:
        """Call a method of an engine; the future fails with RequestTimeout after `timeout` seconds."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel it, and its answer always has a place
        with self._lock:
            number = self._next
            self._next += 1
            self._pump.send(engine, Utility(b"", b"", 0, number, method, dict(args)))
            self._pending[number] = engine, future
        late = RequestTimeout(f"{method}: engine {engine} gave no answer within {timeout} s")
        self._timer.schedule(timeout, lambda: self._settle(number, late))
        return future

    def answer(self, result: Result) -> None:
        self._settle(result.call, from_code(result.error_code, result.error) if result.error_code else result)

    def fail(self, engine: int | None, error: WavecoreError) -> None:
        """End the calls of one engine, or all."""
        with self._lock:
            numbers = [n for n, (index, _) in self._pending.items() if engine in (None, index)]
        for number in numbers:
            self._settle(number, type(error)(str(error)))

    def _settle(self, number: int, outcome: Result | WavecoreError) -> None:
        with self._lock:
            _, future = self._pending.pop(number, (0, None))
        if future is None:  # ended already
            return
        if isinstance(outcome, WavecoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
