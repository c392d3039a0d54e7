"""EngineClient: requests to engines and their outputs back, over any death of an engine. Knows no text.

Each request ends exactly once. When a life of an engine is over, a request without a token goes once to a living
engine, or waits for the restarted one; one with tokens fails with the cause (or goes on, with `resume`).

Threads: user threads call in, the pump's IO thread calls `_on_event`, the timer's thread watches broken connections.
One lock guards all state; nothing blocks under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any

from wavecore.frontend import in_flight
from wavecore.frontend.engine_link import Answer, EngineLink, LinkState
from wavecore.frontend.in_flight import InFlight
from wavecore.frontend.mailbox import Mailbox, Waker
from wavecore.frontend.timer import Timer
from wavecore.transport import deployment
from wavecore.transport.client_pump import ClientPump, Disconnected, Event, Reconnected
from wavecore.transport.curve import CurveClient
from wavecore.transport.errors import EngineDead, RequestError, RequestTimeout, StartError, WavecoreError, from_code
from wavecore.transport.messages import Dead, Heartbeat, Ready, Result, Step, Utility

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 1.0  # how long a broken connection is looked at closely; after that it may be a mere network fault
UNREACHABLE_SECONDS = 10.0
ALIVE = ("starting", "ready", "draining", "dead", "restarting")  # "dead" waits for its next start


class EngineClient:
    """A client of every engine of a deployment.

    Args:
        runtime_dir: where deployment.json lies.
        timeout: seconds until the first engine must have answered.
        version: told to the engines.

    Raises:
        StartError: no deployment there, or no answer in time.
        EngineDead: the deployment is over; with the cause.
    """

    def __init__(self, runtime_dir: str | Path, *, timeout: float = 30.0, version: str) -> None:
        self._runtime_dir = Path(runtime_dir)
        found = deployment.read(self._runtime_dir)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._links = {entry.index: EngineLink(entry.index) for entry in found.engines}
        self._next_call = 1
        self._closed = False
        self._timer = Timer("wavecore-client-watch")
        self._pump = ClientPump(self._on_event, version=version)
        self._requests = InFlight(self._pump, self._links.values())
        try:
            for entry in found.engines:
                curve = CurveClient.load(self._runtime_dir / "keys", entry.server_key) if entry.server_key else None
                self._pump.connect(entry.index, entry.input, entry.output, curve)
            self._wait_ready(timeout)
        except BaseException:
            self.close()
            raise

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self, mailbox: Mailbox) -> None:
        """Send a request. Its outputs, and its end whatever happens, arrive in the mailbox.

        Raises:
            EngineDead: no engine lives; with the cause.
            Overloaded, MessageTooLarge: it cannot be sent.
        """
        with self._lock:
            self._check_open()
            self._requests.submit(mailbox)
        timeout = mailbox.request.timeout
        if timeout is not None:
            self._timer.schedule(timeout + in_flight.GRACE_SECONDS + 0.05, self._check_deadlines)

    def abort(self, mailbox: Mailbox) -> None:
        """End a request, at any moment, as often as one likes."""
        with self._lock:
            touched = self._requests.abort(mailbox)
        _wake(touched)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        with self._lock:
            return len(self._requests)

    # --- utility calls -------------------------------------------------------------------------------------------

    def call(
        self, method: str, args: Mapping[str, Any] | None = None, *, engine: int | None = None, timeout: float = 60.0
    ) -> Future[Answer]:
        """Call a named method of one engine.

        Returns:
            A future; it fails with EngineDead when the engine dies and with RequestTimeout after `timeout` seconds.

        Raises:
            EngineDead: no engine lives.
        """
        future: Future[Answer] = Future()
        with self._lock:
            self._check_open()
            up = [link for link in self._links.values() if link.state is LinkState.UP and engine in (None, link.index)]
            if not up:
                raise self._requests.no_engine()
            number, link = self._next_call, up[0]
            self._next_call += 1
            self._pump.send(link.index, Utility(b"", b"", 0, number, method, dict(args or {})))
            link.calls[number] = future

        def expire() -> None:
            with self._lock:
                pending = link.calls.pop(number, None)
            if pending is not None:
                _settle(pending, RequestTimeout(f"{method}: engine {link.index} gave no answer within {timeout} s"))

        self._timer.schedule(timeout, expire)
        return future

    @property
    def engines(self) -> list[int]:
        """Indices of the engines that take requests."""
        with self._lock:
            return [link.index for link in self._links.values() if link.state is LinkState.UP]

    @property
    def resolved(self) -> Mapping[str, Any]:
        """What the first engine said at ready: model_path, max_model_len, vocab_size, ..."""
        with self._lock:
            return next((link.resolved for link in self._links.values() if link.resolved), {})

    def close(self) -> None:
        """End every request and let go of the engines. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            touched = self._requests.fail_all(RequestError("the client was closed before the request ended"))
            calls = [future for link in self._links.values() for future in link.take_calls()]
        _wake(touched)
        for future in calls:
            _settle(future, RequestError("the client was closed before the call was answered"))
        self._timer.close()
        self._pump.close()

    # --- events of the pump (IO thread) --------------------------------------------------------------------------

    def _on_event(self, index: int, event: Event) -> None:
        link = self._links[index]
        if isinstance(event, Step):
            with self._lock:
                touched = self._requests.deliver(link, event)
            _wake(touched)
        elif isinstance(event, Heartbeat):
            link.report(event.tokens)
        elif isinstance(event, Ready):
            self._on_ready(link, event)
        elif isinstance(event, Result):
            with self._lock:
                future = link.calls.pop(event.call, None)
            if future is not None:
                failed = from_code(event.error_code, event.error) if event.error_code else None
                _settle(future, failed or Answer(event.value, event.frames))
        elif isinstance(event, Dead):
            self._down(link, EngineDead(f"engine {index} ended in phase {event.phase}: {event.message}"), link.epoch)
        elif isinstance(event, Disconnected):
            with self._lock:
                if link.state is not LinkState.UP:
                    return
                link.state = LinkState.BROKEN
            self._judge(link, link.epoch, time.monotonic(), event.reason)
        elif isinstance(event, Reconnected):
            with self._lock:
                if link.state is LinkState.BROKEN:
                    link.state = LinkState.UP
                touched = self._requests.send_waiting()
            _wake(touched)

    def _on_ready(self, link: EngineLink, ready: Ready) -> None:
        """A new connection to an engine, perhaps to a new life: whatever was sent over an earlier one is lost."""
        forgot = f"engine {link.index} was restarted, or heard nothing of this client for 10 s and ended its requests"
        with self._lock:
            error = link.error or EngineDead(forgot)
            link.state, link.error = LinkState.UP, None
            link.epoch, link.resolved, link.session = ready.epoch, ready.resolved, self._pump.session(link.index)
            calls = link.take_calls()
            touched = self._requests.lose(link, error, everything=False)
            self._changed.notify_all()
        _wake(touched)
        for future in calls:
            _settle(future, EngineDead(str(error)))

    def _down(self, link: EngineLink, error: EngineDead, epoch: bytes) -> None:
        """A life of an engine is over."""
        with self._lock:
            if link.state is LinkState.DOWN or link.epoch != epoch:
                return
            link.state, link.error = LinkState.DOWN, error
            calls = link.take_calls()
            touched = self._requests.lose(link, error, everything=True)
            waiting = self._requests.num_waiting
            self._changed.notify_all()
        logger.warning("%s", error)
        _wake(touched)
        for future in calls:
            _settle(future, EngineDead(str(error)))
        if waiting:
            self._timer.schedule(0.1, self._check_hope)

    # --- the timer's thread --------------------------------------------------------------------------------------

    def _judge(self, link: EngineLink, epoch: bytes, since: float, reason: str) -> None:
        """Look for the cause of a broken connection: dead by deployment.json, or out of reach for too long."""
        with self._lock:
            if self._closed or link.state is not LinkState.BROKEN or link.epoch != epoch:
                return
        cause = deployment.why_dead(self._runtime_dir, link.index, epoch, timeout=0)
        broken = time.monotonic() - since
        if cause is not None:
            self._down(link, EngineDead(cause.message), epoch)
        elif broken > UNREACHABLE_SECONDS:
            text = f"engine {link.index} has been out of reach for {broken:.0f} s ({reason}); is its machine reachable?"
            self._down(link, EngineDead(text), epoch)
        else:
            delay = 0.01 if broken < VERDICT_SECONDS else 0.5
            self._timer.schedule(delay, lambda: self._judge(link, epoch, since, reason))

    def _check_hope(self) -> None:
        """While requests wait for an engine: fail them when none will come back."""
        with self._lock:
            if self._closed or not self._requests.num_waiting:
                return
        if self._has_hope():
            self._timer.schedule(0.25, self._check_hope)
            return
        with self._lock:
            touched = self._requests.fail_waiting()
        _wake(touched)

    def _has_hope(self) -> bool:
        try:
            found = deployment.read(self._runtime_dir)
        except StartError:
            return False
        return found.state not in ("dead", "stopped") and any(entry.state in ALIVE for entry in found.engines)

    def _check_deadlines(self) -> None:
        with self._lock:
            touched = self._requests.fail_overdue()
        _wake(touched)

    # -------------------------------------------------------------------------------------------------------------

    def _wait_ready(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        with self._changed:
            while not any(link.state is LinkState.UP for link in self._links.values()):
                if time.monotonic() > until:
                    raise StartError(f"no engine of {self._runtime_dir} answered within {timeout} s; is it overloaded?")
                self._changed.wait(0.25)
                if not self._has_hope():
                    causes = [e.cause.message for e in deployment.read(self._runtime_dir).engines if e.cause]
                    raise EngineDead(causes[0] if causes else f"the deployment in {self._runtime_dir} is over")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("this client was closed (shutdown); make a new one")


def _wake(mailboxes: Sequence[Mailbox]) -> None:
    by_waker: dict[Waker, list[Mailbox]] = {}
    for mailbox in mailboxes:
        if mailbox.must_wake():
            by_waker.setdefault(mailbox.waker, []).append(mailbox)
    for waker, woken in by_waker.items():
        waker.wake(woken)


def _settle(future: Future[Answer], outcome: Answer | WavecoreError) -> None:
    try:
        if isinstance(outcome, WavecoreError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        logger.debug("a utility call was cancelled before its answer came")
