"""Utility calls that wait for their answer. Every one ends: by the answer, its deadline, or the death of its engine."""

import _thread
import itertools
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from typing import Any

from wavecore.transport.errors import RequestTimeout, WavecoreError, as_wavecore_error, from_code
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.wire.messages import Result, Utility


class Calls:
    """The calls of one client that have no answer yet. All methods but `start` run in the IO thread."""

    def __init__(self, pump: ClientPump) -> None:
        self._pump = pump
        self._pending: dict[int, tuple[int, Future[Result]]] = {}  # number -> engine, future
        self._numbers = itertools.count(1)

    def start(self, engine: int, method: str, args: Mapping[str, Any], timeout: float) -> Future[Result]:
        """Call a method of an engine; the future fails with RequestTimeout after `timeout` seconds."""
        future: Future[Result] = Future()
        future.set_running_or_notify_cancel()  # so that nobody can cancel it, and its answer always has a place
        number = next(self._numbers)
        self._pending[number] = engine, future
        self._pump.call_soon(partial(self._send, number, engine, method, dict(args), timeout))
        return future

    def _send(self, number: int, engine: int, method: str, args: dict[str, Any], timeout: float) -> None:
        late = RequestTimeout(f"{method}: engine {engine} gave no answer within {timeout} s")
        self._pump.call_later(timeout, lambda: self._settle(number, late))
        try:
            self._pump.send(engine, Utility(b"", b"", 0, number, method, args))
        except Exception as error:
            self._settle(number, as_wavecore_error(error))

    def answer(self, result: Result) -> None:
        self._settle(result.call, from_code(result.error_code, result.error) if result.error_code else result)

    def fail(self, engine: int | None, error: WavecoreError) -> None:
        """End the calls of one engine, or all."""
        for number in [n for n, (index, _) in self._pending.copy().items() if engine in (None, index)]:
            self._settle(number, from_code(error.code, str(error)))

    def _settle(self, number: int, outcome: Result | WavecoreError) -> None:
        if number not in self._pending:  # ended already
            return
        # A future has a lock, and a signal handler may have interrupted its caller with it: a thread of this moment
        # waits for it, not the IO thread.
        try:
            _thread.start_new_thread(self._finish, (number, outcome))
        except RuntimeError:  # the system gives no thread
            self._finish(number, outcome)

    def _finish(self, number: int, outcome: Result | WavecoreError) -> None:
        """The first outcome counts. A call is pending until then, so that the child of a fork ends it, too."""
        _, future = self._pending.get(number, (0, None))
        if future is not None:
            with suppress(InvalidStateError):
                if isinstance(outcome, WavecoreError):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)
            self._pending.pop(number, None)
