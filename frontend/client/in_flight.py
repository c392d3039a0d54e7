"""The requests of a client that have not ended: where each was sent, and what becomes of it when an engine dies.

Every method but `refuse` runs in the IO thread; telling the consumers of mailboxes never blocks.
A request that is sent again gets new handles, and rows of unknown handles are dropped: late outputs cannot matter.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wavecore.frontend.client.engines import EngineState, RemoteEngine
from wavecore.frontend.client.mailbox import Mailbox, OutputKind, notify
from wavecore.transport.errors import (
    EngineDead,
    RequestError,
    RequestTimeout,
    WavecoreError,
    as_wavecore_error,
    from_code,
)
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.wire.messages import Abort, FinishReason, Step

logger = logging.getLogger(__name__)

GRACE_SECONDS = 5.0  # after a request's own deadline the engine has this long to say so itself
MAX_HANDLE = 0xFFFFFFFF
_REASONS = {int(reason): reason for reason in FinishReason}
_NOTHING: Mapping[str, Any] = {}


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way.

    Attributes:
        engine: where it was sent; None while it waits for an engine to come back.
        client_id: what this client was called in the session that it was sent in.
        handles: handle -> choice, of choices that still run.
        lost_by: the death that it was sent again for; there is no second time.
    """

    mailbox: Mailbox
    engine: RemoteEngine | None = None
    client_id: bytes = b""
    handles: dict[int, int] = field(default_factory=dict)
    lost_by: EngineDead | None = None

    @property
    def deadline(self) -> float:
        """Monotonic time when the client gives up on it."""
        options = self.mailbox.request.options
        timeout = math.inf if options.timeout is None else options.timeout
        started = self.mailbox.started
        if self.engine is not None:  # the engine counts its time
            return started + timeout + GRACE_SECONDS
        if self.mailbox.has_tokens:
            return started + timeout
        return started + min(options.deadlines.values(), default=math.inf)


class InFlight:
    """The requests of one client, by mailbox and by the handles of their choices.

    Attributes:
        live: those that have not ended, as callers see it: they add what they submit, and take out what they abort.
    """

    def __init__(self, pump: ClientPump, engines: Iterable[RemoteEngine]) -> None:
        self._pump = pump
        self._engines = list(engines)
        self.live: set[Mailbox] = set()
        self._flights: dict[Mailbox, Flight] = {}
        self._rows: dict[int, Flight] = {}
        self._next_handle = 1

    # --- a request's way -----------------------------------------------------------------------------------------

    def submit(self, mailbox: Mailbox) -> bool:
        """Send a request to the least loaded engine, or let it wait for one. Returns whether it waits."""
        flight = self._flights[mailbox] = Flight(mailbox)
        self._try_to_send([flight], new=True)
        return flight.engine is None

    def refuse(self, mailbox: Mailbox, error: WavecoreError) -> None:
        """End a request that is in nobody's hands yet, or that nobody will hear of again."""
        self.live.discard(mailbox)
        mailbox.end("error", error)
        notify([mailbox])

    def deliver(self, engine: RemoteEngine, step: Step) -> None:
        """Hand the rows of a step to their mailboxes."""
        engine.report(step.load)
        output, now = step.output, time.monotonic()
        tokens, extras, frames = output.tokens.tolist(), output.extras, output.frames
        touched: list[Mailbox] = []
        stopped: list[int] = []
        at = 0
        rows = zip(output.handles.tolist(), output.counts.tolist(), output.finish.tolist(), strict=True)
        for place, (handle, count, finish) in enumerate(rows):
            new = tokens[at : at + count]
            at += count
            flight = self._rows.get(handle)
            if flight is None:  # aborted, ended by a stop string, or sent again since
                continue
            mailbox = flight.mailbox
            ended = mailbox.deliver(
                flight.handles[handle], new, now, _REASONS[finish], extras.get(place, _NOTHING), frames
            )
            if ended:
                if not finish:
                    stopped.append(handle)
                del flight.handles[handle], self._rows[handle]
                if not flight.handles:
                    self._forget(flight)
            if ended or mailbox.kind is not OutputKind.FINAL:
                touched.append(mailbox)
        unread = notify(touched)
        self._send_abort(engine, stopped)
        for mailbox in unread:
            self.abort(mailbox)

    def abort(self, mailbox: Mailbox) -> None:
        """End a request; its running choices end as "abort". Unknown or ended ones are no error."""
        if flight := self._flights.get(mailbox):
            mailbox.end("abort")
            self._abort_at_engine(flight)
            self._forget(flight)
            notify([mailbox])

    def fail_all(self, why: str) -> None:
        """The client ends, and with its goodbye its requests at the engines."""
        for mailbox in self.live.copy() | self._flights.keys():
            self.refuse(mailbox, RequestError(f"request {mailbox.request.request_id}: {why}"))
        self._flights.clear()
        self._rows.clear()

    def abort_all_at(self, engine: RemoteEngine) -> None:
        """Tell an engine to end all that it was sent; it hears so when it is in reach again."""
        self._send_abort(engine, [h for f in self._flights.values() if f.engine is engine for h in f.handles])

    # --- when engines die ----------------------------------------------------------------------------------------

    def lose(self, engine: RemoteEngine, error: EngineDead, everything: bool) -> None:
        """Send again or fail what was sent over an earlier connection, or over any."""
        failed: dict[Flight, WavecoreError] = {}
        for flight in self._flights.values():
            if flight.engine is not engine or (flight.client_id == engine.client_id and not everything):
                continue
            self._detach(flight)
            mailbox = flight.mailbox
            if flight.lost_by is None and (_can_resume(mailbox) or not mailbox.has_tokens):
                flight.lost_by = error
            elif flight.lost_by is None or engine.state is not EngineState.DOWN:
                failed[flight] = error
            else:
                who = f"request {mailbox.request.request_id} was in an engine that died for the second time"
                failed[flight] = EngineDead(f"{who}, may well be the cause, and is not sent again: {error}")
        self._fail(failed)
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send what waits for an engine, if one lives."""
        self._try_to_send(self._waiting())

    def _try_to_send(self, flights: list[Flight], new: bool = False) -> None:
        failed: dict[Flight, WavecoreError] = {}
        for flight in flights:
            engine = self._least_loaded()
            if engine is None:
                break
            try:
                elapsed = 0.0 if new else time.monotonic() - flight.mailbox.started
                self._send(flight, engine, flight.mailbox.emitted, elapsed)
            except Exception as refused:  # by the wire, or a fault of ours: of this request alone
                failed[flight] = as_wavecore_error(refused)
        self._fail(failed)

    def fail_waiting(self, error: WavecoreError | None = None) -> None:
        """No engine will come back, or it takes nothing of this client."""
        self._fail({flight: error or flight.lost_by or self.no_engine() for flight in self._waiting()})

    @property
    def have_deadlines(self) -> bool:
        return any(f.mailbox.request.options.deadlines for f in self._flights.values())

    def fail_overdue(self) -> None:
        """The second level of deadlines: an engine ends a request in time; this is for an engine that says nothing."""
        now = time.monotonic()
        failed: dict[Flight, WavecoreError] = {}
        for flight in [f for f in self._flights.values() if f.deadline < now]:
            self._abort_at_engine(flight)
            silent = "the engine said nothing" if flight.engine else f"no engine was up to take it: {self.no_engine()}"
            text = f"request {flight.mailbox.request.request_id}: its timeout passed and {silent}"
            failed[flight] = RequestTimeout(text)
        self._fail(failed)

    def no_engine(self) -> EngineDead:
        """Why no engine takes a request now."""
        error = next((engine.error for engine in self._engines if engine.error is not None), None)
        return EngineDead(str(error) if error else "the connection to every engine is broken for now; try again")

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _least_loaded(self) -> RemoteEngine | None:
        """The engine with the fewest outstanding tokens; ties go round."""
        up = [engine for engine in self._engines if engine.state is EngineState.UP]
        return min(up, key=lambda engine: (engine.load, engine.num_sent), default=None)

    def _send(self, flight: Flight, engine: RemoteEngine, emitted: list[int], elapsed: float) -> None:
        mailbox, request = flight.mailbox, flight.mailbox.request
        if self._next_handle + request.params.n > MAX_HANDLE:
            self._next_handle = 1
        first = self._next_handle
        flight.client_id = self._pump.send(engine.index, request.message(first, emitted, mailbox.seed, elapsed))
        self._next_handle += request.params.n
        flight.engine = engine
        flight.handles = {first + i: i for i in range(request.params.n) if mailbox.is_running(i)}
        self._rows.update(dict.fromkeys(flight.handles, flight))
        engine.num_sent += 1
        engine.own_tokens += request.cost

    def _abort_at_engine(self, flight: Flight) -> None:
        if flight.engine is not None and flight.client_id == flight.engine.client_id:
            self._send_abort(flight.engine, list(flight.handles))

    def _send_abort(self, engine: RemoteEngine, handles: list[int]) -> None:
        if handles and engine.state in (EngineState.UP, EngineState.BROKEN):
            try:
                self._pump.send(engine.index, Abort(b"", b"", 0, np.array(handles, np.uint32)))
            except WavecoreError as error:  # gone, or it takes nothing more: its rows come to nobody
                logger.debug("engine %d was not told to abort: %s", engine.index, error)

    def _waiting(self) -> list[Flight]:
        return [flight for flight in self._flights.values() if flight.engine is None]

    def _fail(self, failed: Mapping[Flight, WavecoreError]) -> None:
        for flight, error in failed.items():
            self._forget(flight)
            # A copy for each: one exception raised in many tasks would collect all their tracebacks.
            flight.mailbox.end("error", from_code(error.code, str(error)))
        notify([flight.mailbox for flight in failed])

    def _detach(self, flight: Flight) -> None:
        for handle in flight.handles:
            del self._rows[handle]
        flight.handles = {}
        if flight.engine is not None:
            flight.engine.own_tokens -= flight.mailbox.request.cost
            flight.engine = None

    def _forget(self, flight: Flight) -> None:
        self._detach(flight)
        self._flights.pop(flight.mailbox, None)
        self.live.discard(flight.mailbox)


def _can_resume(mailbox: Mailbox) -> bool:
    params = mailbox.request.params
    return mailbox.request.resume and (params.greedy or params.seed is not None or mailbox.seed is not None)
