"""The requests of a client that have not ended: where each was sent, which rows belong to it, what becomes of it when
an engine's life is over. Every method runs under the client's lock and returns the mailboxes to wake. Knows no threads.

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

from wavecore.frontend.client.engines import Balancer, EngineLink, LinkState
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.transport.errors import EngineDead, RequestError, RequestTimeout, WavecoreError
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.wire.messages import Abort, FinishReason, Step

logger = logging.getLogger(__name__)

MAX_RESUMES = 3
GRACE_SECONDS = 5.0  # after a request's own deadline the engine has this long to say so itself
MAX_HANDLE = 0xFFFFFFFF
_REASONS = {int(reason): reason for reason in FinishReason}
_NOTHING: Mapping[str, Any] = {}


@dataclass(slots=True, eq=False)
class Flight:
    """A request on its way.

    Attributes:
        link: where it was sent; None while it waits for an engine to come back.
        session: the connection it was sent over.
        handles: handle -> choice, of choices that still run.
        sent_again: how often.
        lost_by: the death that it was sent again for.
        started: monotonic time when it was submitted.
    """

    mailbox: Mailbox
    link: EngineLink | None = None
    session: bytes = b""
    handles: dict[int, int] = field(default_factory=dict)
    sent_again: int = 0
    lost_by: EngineDead | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def deadline(self) -> float:
        """Monotonic time when the client gives up on it."""
        options = self.mailbox.request.options
        timeout = math.inf if options.timeout is None else options.timeout
        if self.link is not None:  # the engine counts its time
            return self.started + timeout + GRACE_SECONDS
        if self.mailbox.has_tokens:
            return self.started + timeout
        return self.started + min(options.deadlines.values(), default=math.inf)


class InFlight:
    """The requests of one client, by mailbox and by the handles of their choices."""

    def __init__(self, pump: ClientPump, links: Iterable[EngineLink]) -> None:
        self._pump = pump
        self._links = list(links)
        self._balancer = Balancer()
        self._flights: dict[Mailbox, Flight] = {}
        self._rows: dict[int, Flight] = {}
        self._next_handle = 1

    def __len__(self) -> int:
        return len(self._flights)

    # --- a request's way -----------------------------------------------------------------------------------------

    def submit(self, mailbox: Mailbox, hope: bool) -> bool:
        """Send a request to the least loaded engine, or let it wait for one.

        Args:
            hope: an engine will come back where none is up.

        Returns:
            Whether it waits.

        Raises:
            EngineDead: no engine lives or will.
            Overloaded, MessageTooLarge: it cannot be sent.
        """
        link = self._balancer.choose(self._links)
        if link is None and not hope:
            raise self.no_engine()
        flight = Flight(mailbox)
        if link is not None:
            self._send(flight, link, [], 0.0)
        self._flights[mailbox] = flight
        return link is None

    def deliver(self, link: EngineLink, step: Step) -> list[Mailbox]:
        """Hand the rows of a step to their mailboxes."""
        link.report(step.load[2])
        columns = step.columns
        tokens, extras, frames = columns.tokens.tolist(), columns.extras, columns.frames
        touched: list[Mailbox] = []
        stopped: list[int] = []
        at = 0
        rows = zip(columns.handles.tolist(), columns.counts.tolist(), columns.finish.tolist(), strict=True)
        for place, (handle, count, finish) in enumerate(rows):
            new = tokens[at : at + count]
            at += count
            flight = self._rows.get(handle)
            if flight is None:  # aborted, ended by a stop string, or sent again since
                continue
            mailbox = flight.mailbox
            reason = _REASONS[finish]
            here = mailbox.deliver(flight.handles[handle], new, reason, extras.get(place, _NOTHING), frames)
            if here:
                stopped.append(handle)
            if here or finish:
                del flight.handles[handle], self._rows[handle]
                if not flight.handles:
                    self._forget(flight)
            touched.append(mailbox)
        self._send_abort(link, stopped)
        return touched

    def abort(self, mailbox: Mailbox) -> list[Mailbox]:
        """End a request; its running choices end as "abort". Unknown or ended ones are no error."""
        flight = self._flights.get(mailbox)
        if flight is None:
            return []
        for choice in range(mailbox.request.params.n):
            mailbox.end(choice, FinishReason.ABORT)
        self._abort_at_engine(flight)
        self._forget(flight)
        return [mailbox]

    def fail_all(self, why: str) -> list[Mailbox]:
        touched: list[Mailbox] = []
        for flight in list(self._flights.values()):
            self._abort_at_engine(flight)
            touched += self._fail(flight, RequestError(f"request {flight.mailbox.request.request_id}: {why}"))
        return touched

    def abort_all_at(self, link: EngineLink) -> None:
        """Tell an engine to end all that it was sent; it hears so when it is in reach again."""
        self._send_abort(link, [h for f in self._flights.values() if f.link is link for h in f.handles])

    # --- when engines die ----------------------------------------------------------------------------------------

    def lose(self, link: EngineLink, error: EngineDead, everything: bool) -> list[Mailbox]:
        """Send again or fail what was sent over an earlier connection, or over any."""
        lost = [f for f in self._flights.values() if f.link is link and (everything or f.session != link.session)]
        touched: list[Mailbox] = []
        for flight in lost:
            self._detach(flight)
            flight.sent_again += 1
            flight.lost_by = error
            mailbox = flight.mailbox
            allowed = 1 if not mailbox.has_tokens else MAX_RESUMES if _can_resume(mailbox) else 0
            if flight.sent_again > allowed:
                touched += self._fail(flight, error)
        return touched + self.send_waiting()

    def send_waiting(self) -> list[Mailbox]:
        """Send what waits for an engine, if one lives."""
        touched: list[Mailbox] = []
        for flight in [f for f in self._flights.values() if f.link is None]:
            link = self._balancer.choose(self._links)
            if link is None:
                break
            try:
                self._send(flight, link, flight.mailbox.emitted, time.monotonic() - flight.started)
            except WavecoreError as refused:
                touched += self._fail(flight, refused)
        return touched

    @property
    def num_waiting(self) -> int:
        return sum(f.link is None for f in self._flights.values())

    def fail_waiting(self, error: WavecoreError | None = None) -> list[Mailbox]:
        """No engine will come back, or it takes nothing of this client."""
        touched: list[Mailbox] = []
        for flight in [f for f in self._flights.values() if f.link is None]:
            touched += self._fail(flight, error or flight.lost_by or self.no_engine())
        return touched

    @property
    def have_deadlines(self) -> bool:
        return any(f.mailbox.request.options.deadlines for f in self._flights.values())

    def fail_overdue(self) -> list[Mailbox]:
        """The second level of deadlines: an engine ends a request in time; this is for an engine that says nothing."""
        now = time.monotonic()
        touched: list[Mailbox] = []
        for flight in [f for f in self._flights.values() if f.deadline < now]:
            self._abort_at_engine(flight)
            silent = "the engine said nothing" if flight.link else f"no engine was up to take it: {self.no_engine()}"
            text = f"request {flight.mailbox.request.request_id}: its timeout passed and {silent}"
            touched += self._fail(flight, RequestTimeout(text))
        return touched

    def no_engine(self) -> EngineDead:
        """Why no engine takes a request now."""
        error = next((link.error for link in self._links if link.error is not None), None)
        return EngineDead(str(error) if error else "the connection to every engine is broken for now; try again")

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _send(self, flight: Flight, link: EngineLink, emitted: list[int], elapsed: float) -> None:
        mailbox, request = flight.mailbox, flight.mailbox.request
        if self._next_handle + request.params.n > MAX_HANDLE:
            self._next_handle = 1
        first = self._next_handle
        flight.session = self._pump.send(link.index, request.message(first, emitted, mailbox.seed, elapsed))
        self._next_handle += request.params.n
        flight.link = link
        flight.handles = {first + i: i for i in range(request.params.n) if mailbox.is_running(i)}
        self._rows.update(dict.fromkeys(flight.handles, flight))
        link.own_tokens += request.cost

    def _abort_at_engine(self, flight: Flight) -> None:
        if flight.link is not None and flight.session == flight.link.session:
            self._send_abort(flight.link, list(flight.handles))

    def _send_abort(self, link: EngineLink, handles: list[int]) -> None:
        if handles and link.state in (LinkState.UP, LinkState.BROKEN):
            try:
                self._pump.send(link.index, Abort(b"", b"", 0, np.array(handles, np.uint32)))
            except EngineDead:
                logger.debug("engine %d is gone: nothing to abort", link.index)

    def _fail(self, flight: Flight, error: WavecoreError) -> list[Mailbox]:
        self._forget(flight)
        # A copy for each: one exception raised in many tasks would collect all their tracebacks.
        flight.mailbox.fail(type(error)(str(error)))
        return [flight.mailbox]

    def _detach(self, flight: Flight) -> None:
        for handle in flight.handles:
            del self._rows[handle]
        flight.handles = {}
        if flight.link is not None:
            flight.link.own_tokens -= flight.mailbox.request.cost
            flight.link = None

    def _forget(self, flight: Flight) -> None:
        self._detach(flight)
        self._flights.pop(flight.mailbox, None)


def _can_resume(mailbox: Mailbox) -> bool:
    params = mailbox.request.params
    return mailbox.request.resume and (params.greedy or params.seed is not None or mailbox.seed is not None)
