"""EngineClient: requests to engines and their outputs back, over any death of an engine. Knows no text.

Each request ends exactly once. When a life of an engine is over, a request without a token goes once to a living
engine, or waits for the restarted one; one with tokens fails with the cause (or goes on, with `resume`). A request
that is submitted while an engine is being restarted waits as well.

Threads: user threads call in, the pump's IO thread calls `_on_event`, the timer's thread watches broken connections.
One lock guards all state; nothing blocks under it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from wavecore.frontend.client.calls import Answer, Calls
from wavecore.frontend.client.engines import EngineLink, LinkState
from wavecore.frontend.client.in_flight import InFlight
from wavecore.frontend.client.mailbox import Mailbox, wake
from wavecore.frontend.client.timer import Timer
from wavecore.transport.errors import EngineDead, Overloaded, RequestError, StartError
from wavecore.transport.io.client_pump import ClientPump, Disconnected, Event, Failed, Reconnected
from wavecore.transport.io.curve import CurveClient
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment
from wavecore.transport.wire.messages import Dead, Heartbeat, Ready, Result, Step

logger = logging.getLogger(__name__)

VERDICT_SECONDS = 1.0  # how long a broken connection is looked at closely; after that it may be a mere network fault
UNREACHABLE_SECONDS = 10.0
FOLLOW_SECONDS = 0.25
SWEEP_SECONDS = 0.25  # between two looks at the deadlines of all requests
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
        Overloaded: the engine has as many clients as it takes.
    """

    def __init__(self, runtime_dir: str | Path, *, timeout: float = 30.0, version: str) -> None:
        self._runtime_dir = Path(runtime_dir)
        found = deployment.read(self._runtime_dir)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._links = {entry.index: EngineLink(entry.index) for entry in found.engines}
        self._closed = ""  # why nothing can be sent any more
        self._refused: Overloaded | None = None  # an engine would not take this client
        self._sweeping = False  # a look at the deadlines is scheduled
        self._hoping = False  # a look at whether an engine will come back is scheduled
        self._owner = os.getpid()
        self._timer = Timer("wavecore-client-watch")
        self._pump = ClientPump(self._on_event, version=version)
        self._requests = InFlight(self._pump, self._links.values())
        self._calls = Calls(self._pump, self._timer)
        try:
            self._connect(found)
            self._wait_ready(timeout)
        except BaseException:
            self.close()
            raise

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self, mailbox: Mailbox) -> None:
        """Send a request. Its outputs, and its end whatever happens, arrive in the mailbox.

        While an engine is being restarted the request waits for it, within its own deadlines.

        Raises:
            EngineDead: no engine lives or will; with the cause.
            Overloaded, MessageTooLarge: it cannot be sent.
        """
        hope = self.has_hope()  # may read a file: not under the lock
        with self._lock:
            self._check_open()
            if self._requests.submit(mailbox, hope):
                self._watch_hope()
            if mailbox.request.options.deadlines and not self._sweeping:
                self._sweeping = True
                self._timer.schedule(SWEEP_SECONDS, self._check_deadlines)

    def abort(self, mailbox: Mailbox) -> None:
        """End a request, at any moment, as often as one likes."""
        with self._lock:
            touched = self._requests.abort(mailbox)
        wake(touched)

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
        with self._lock:
            self._check_open()
            up = [link for link in self._links.values() if link.state is LinkState.UP and engine in (None, link.index)]
            if not up:
                raise self._requests.no_engine()
            return self._calls.start(up[0].index, method, args or {}, timeout)

    def check_health(self) -> None:
        """Raises:
        EngineDead: no engine takes requests; with the cause.
        """
        with self._lock:
            self._check_open()
            if not any(link.state is LinkState.UP for link in self._links.values()):
                raise self._requests.no_engine()

    def has_hope(self) -> bool:
        """Whether an engine takes requests, or is being started again and will."""
        return bool(self.engines) or self._has_hope()

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
        self._end("this client was closed (shutdown); make a new one")
        self._timer.close()
        self._pump.close()

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = reason
            touched = self._requests.fail_all(f"the request had not ended: {reason}, and send it again")
        wake(touched)
        self._calls.fail(None, RequestError(f"the call was not answered: {reason}"))

    # --- events of the pump (IO thread) --------------------------------------------------------------------------

    def _on_event(self, index: int, event: Event) -> None:
        link = self._links[index]
        if isinstance(event, Step):
            with self._lock:
                touched = self._requests.deliver(link, event)
            wake(touched)
        elif isinstance(event, Heartbeat):
            link.report(event.tokens)
        elif isinstance(event, Ready):
            self._on_ready(link, event)
        elif isinstance(event, Result):
            self._calls.answer(event)
        elif isinstance(event, Dead):
            if event.code == Overloaded.code:  # it takes no more clients, and lives on for those that it has
                with self._changed:
                    self._refused = Overloaded(f"engine {index}: {event.message}")
                    touched = self._requests.fail_waiting(self._refused)
                    self._changed.notify_all()
                wake(touched)
                return
            self._down(link, EngineDead(f"engine {index} ended in phase {event.phase}: {event.message}"), link.epoch)
        elif isinstance(event, Disconnected):
            with self._lock:
                if link.state is not LinkState.UP:
                    return
                link.state = LinkState.BROKEN
            self._judge(link, link.epoch, time.monotonic(), event.reason)
        elif isinstance(event, Failed):
            self._end(f"this client's IO thread failed ({event.reason}): make a new client")
        elif isinstance(event, Reconnected):
            with self._lock:
                if link.state in (LinkState.BROKEN, LinkState.UNREACHABLE):
                    link.state, link.error = LinkState.UP, None
                touched = self._requests.send_waiting()
            wake(touched)

    def _on_ready(self, link: EngineLink, ready: Ready) -> None:
        """A new connection to an engine, perhaps to a new life: whatever was sent over an earlier one is lost."""
        forgot = f"engine {link.index} was restarted, or heard nothing of this client for 10 s and ended its requests"
        with self._lock:
            error = link.error or EngineDead(forgot)
            link.state, link.error = LinkState.UP, None
            link.epoch, link.resolved, link.session = ready.epoch, ready.resolved, self._pump.session(link.index)
            touched = self._requests.lose(link, error, everything=False)
            self._changed.notify_all()
        wake(touched)
        self._calls.fail(link.index, error)

    def _down(self, link: EngineLink, error: EngineDead, epoch: bytes, state: LinkState = LinkState.DOWN) -> None:
        """A life of an engine is over, or out of reach for too long."""
        with self._lock:
            if link.state is LinkState.DOWN or link.epoch != epoch:
                return
            link.error = error
            self._requests.abort_all_at(link)  # for an engine that lives behind a broken connection
            link.state = state
            touched = self._requests.lose(link, error, everything=True)
            if self._requests.num_waiting:
                self._watch_hope()
            self._changed.notify_all()
        # Whoever is concerned gets it as an exception, and the supervisor logs it; a third time would only alarm.
        logger.log(logging.DEBUG if touched else logging.INFO, "%s", error)
        wake(touched)
        self._calls.fail(link.index, error)
        self._timer.schedule(FOLLOW_SECONDS, lambda: self._follow(link))

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
            self._down(link, EngineDead(text), epoch, LinkState.UNREACHABLE)
        else:
            delay = 0.01 if broken < VERDICT_SECONDS else 0.5
            self._timer.schedule(delay, lambda: self._judge(link, epoch, since, reason))

    def _follow(self, link: EngineLink) -> None:
        """A restarted engine may listen elsewhere: over tcp its port may have been taken in between."""
        with self._lock:
            if self._closed or link.state not in (LinkState.DOWN, LinkState.UNREACHABLE):
                return
        try:
            found = deployment.read(self._runtime_dir)
        except StartError:  # stopped
            return
        self._connect(found)
        if any(entry.state in ALIVE for entry in found.engines):
            self._timer.schedule(FOLLOW_SECONDS, lambda: self._follow(link))

    def _watch_hope(self, delay: float = 0.1) -> None:
        """Under the lock: look soon whether what waits for an engine still may."""
        if not self._hoping:
            self._hoping = True
            self._timer.schedule(delay, self._check_hope)

    def _check_hope(self) -> None:
        """While requests wait for an engine: fail them when none will come back."""
        hope = self._has_hope()
        with self._lock:
            self._hoping = False
            touched = [] if hope or self._closed else self._requests.fail_waiting()
            if not self._closed and self._requests.num_waiting:
                self._watch_hope(0.25)
        wake(touched)

    def _has_hope(self) -> bool:
        try:
            found = deployment.read(self._runtime_dir)
        except StartError:
            return False
        return found.state not in ("dead", "stopped") and any(
            # One that is ready, but not for us, is no hope: a wait for it would have no end.
            entry.state in ALIVE
            and not (entry.state == "ready" and self._links[entry.index].state is LinkState.UNREACHABLE)
            for entry in found.engines
        )

    def _check_deadlines(self) -> None:
        """One sweep over all requests, again while any has a deadline; a timer for each would outlive most of them."""
        with self._lock:
            self._sweeping = False
            touched = self._requests.fail_overdue()
            if not self._closed and self._requests.have_deadlines:
                self._sweeping = True
                self._timer.schedule(SWEEP_SECONDS, self._check_deadlines)
        wake(touched)

    # -------------------------------------------------------------------------------------------------------------

    def _connect(self, found: Deployment) -> None:
        """Talk to every engine where it listens now."""
        for entry in found.engines:
            link, addresses = self._links[entry.index], (entry.input, entry.output)
            if entry.input and addresses != link.addresses:
                link.addresses = addresses
                curve = CurveClient.load(self._runtime_dir / "keys", entry.server_key) if entry.server_key else None
                self._pump.connect(entry.index, *addresses, curve)

    def _wait_ready(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        with self._changed:
            while not any(link.state is LinkState.UP for link in self._links.values()):
                if self._refused is not None:
                    raise self._refused
                if time.monotonic() > until:
                    raise StartError(f"no engine of {self._runtime_dir} answered within {timeout} s; is it overloaded?")
                self._changed.wait(0.25)
                self._connect(deployment.read(self._runtime_dir))  # it may have been starting when we first looked
                if not self._has_hope():
                    causes = [e.cause.message for e in deployment.read(self._runtime_dir).engines if e.cause]
                    raise EngineDead(causes[0] if causes else f"the deployment in {self._runtime_dir} is over")

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead(self._closed)
        if os.getpid() != self._owner:  # a fork has the object, not its threads
            use = f"in this one use wavecore.connect({str(self._runtime_dir)!r})"
            raise EngineDead(f"this client belongs to process {self._owner}; {use}")
