"""The requests of a client that have not ended: where each was sent, and what becomes of it when an engine dies.

Every method but `refuse` runs in the IO thread; telling the consumers of mailboxes never blocks.
A request that is sent again gets new handles, and rows of unknown handles are dropped: late outputs cannot matter.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np

from wavecore.frontend.client.balance import Balance
from wavecore.frontend.client.engines import EngineState, Flight, RemoteEngine, Stay
from wavecore.frontend.client.mailbox import Mailbox, OutputKind, notify
from wavecore.transport import errors
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.wire.messages import UNTOLD, Abort, FinishReason, Load, Step

logger = logging.getLogger(__name__)

MAX_HANDLE = 0xFFFFFFFF
MAX_MOVES = 64  # requests that one report of an engine moves away from it
_REASONS = {int(reason): reason for reason in FinishReason}
_NOTHING: Mapping[str, Any] = {}


class InFlight:
    """The requests of one client, by mailbox and by the handles of their choices.

    Attributes:
        live: those that have not ended, as callers see it: they add what they submit, and take out what they abort.
    """

    def __init__(self, pump: ClientPump, engines: Sequence[RemoteEngine]) -> None:
        self._pump = pump
        self._engines = engines
        self._balance = Balance(engines)
        self.live: set[Mailbox] = set()
        self._flights: dict[Mailbox, Flight] = {}
        self._rows: dict[int, tuple[Flight, Stay, int]] = {}  # by handle; with the choice
        self._next_handle = 1

    # --- a request's way -----------------------------------------------------------------------------------------

    def submit(self, mailbox: Mailbox) -> bool:
        """Send a request to the best engine, or let it wait for one. Returns whether it waits."""
        flight = self._flights[mailbox] = Flight(mailbox, self._balance.prefixes(mailbox.request))
        self._try_to_send([flight], new=True)
        return flight.at is None

    def refuse(self, mailbox: Mailbox, error: errors.WavecoreError) -> None:
        """End a request that is in nobody's hands yet, or that nobody will hear of again."""
        mailbox.end("error", error)  # first: the child of a fork in between finds it ended, or among the living
        self.live.discard(mailbox)
        notify([mailbox])

    def deliver(self, engine: RemoteEngine, step: Step) -> None:
        """Hand the rows of a step to their mailboxes."""
        output, now = step.output, time.monotonic()
        tokens, extras, frames = output.tokens.tolist(), output.extras, output.frames
        touched: list[Mailbox] = []
        stopped: list[int] = []
        at = 0
        rows = zip(output.handles.tolist(), output.counts.tolist(), output.finish.tolist(), strict=True)
        for place, (handle, count, finish) in enumerate(rows):
            new = tokens[at : at + count]
            at += count
            row = self._rows.get(handle)
            if row is None:  # aborted, ended by a stop string, or sent again since
                continue
            flight, stay, choice = row
            if stay is not flight.at:  # it was moved away
                if finish:
                    self._end_choice(flight, stay, handle)
                continue
            mailbox, extra = flight.mailbox, extras.get(place, _NOTHING)
            if extra:  # the first row of each choice has some
                engine.unstarted.pop(mailbox, None)
            ended = mailbox.deliver(choice, new, now, _REASONS[finish], extra, frames)
            if ended:
                if not finish:
                    stopped.append(handle)
                self._end_choice(flight, stay, handle)
            if ended or mailbox.kind is not OutputKind.FINAL:
                touched.append(mailbox)
        unread = notify(touched)
        self._send_abort(engine, stopped)
        for mailbox in unread:
            self.abort(mailbox)

    def report(self, engine: RemoteEngine, load: Load) -> None:
        """Take in how busy an engine is, and move requests that wait there to engines where none of this client's do.

        A request that moves has no token yet, and what its first engine may still say of it is dropped. Each move
        lowers the larger of two loads, so none goes back and forth.
        """
        engine.report(load)
        free = [other for other in self._engines if not other.unstarted]
        most = min(load.waiting, MAX_MOVES) if free else 0
        for flight in [self._flights[mailbox] for mailbox in islice(reversed(engine.unstarted), most)]:
            request, left = flight.mailbox.request, flight.at
            pinned = request.options.data_parallel_rank is not None
            if left is None or flight.left or flight.mailbox.has_tokens or pinned:
                continue
            target = self._balance.choose(flight)
            if target not in free or len(request.prompt) > target.room or target.load + request.size >= engine.load:
                break
            with suppress(errors.WavecoreError):  # a request that is refused there stays here
                self._send(flight, target)
                flight.left = left
                self._send_abort(engine, list(left.handles))
                engine.ended(flight.mailbox)

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
            self.refuse(mailbox, errors.RequestError(f"request {mailbox.request.request_id}: {why}"))
        self._flights.clear()
        self._rows.clear()
        for engine in self._engines:  # which may still report until the goodbye is out
            engine.unstarted.clear()

    def abort_all_at(self, engine: RemoteEngine) -> None:
        """Tell an engine to end all that it was sent; it hears so when it is in reach again."""
        self._send_abort(engine, [handle for handle, (_, stay, _) in self._rows.items() if stay.engine is engine])

    # --- when engines die ----------------------------------------------------------------------------------------

    def lose(self, engine: RemoteEngine, error: errors.EngineDead, everything: bool) -> None:
        """Send again or fail what was sent over an earlier connection, or over any. A request that was moved away, and
        was perhaps not ended there, shares in the blame, and goes on where it is."""
        failed: dict[Flight, errors.WavecoreError] = {}
        engine.report(UNTOLD)

        def is_lost(stay: Stay | None) -> bool:
            return stay is not None and stay.engine is engine and (everything or stay.client_id != engine.client_id)

        for flight in self._flights.values():
            here, before = is_lost(flight.at), is_lost(flight.left)
            if before:
                self._leave(flight)
            if here:
                self._detach(flight)
            elif not before:
                continue
            mailbox = flight.mailbox
            if flight.lost_by is None and (not here or _can_resume(mailbox) or not mailbox.has_tokens):
                flight.lost_by = error
            elif flight.lost_by is None or engine.state is not EngineState.DOWN:
                failed[flight] = error
            else:
                who = f"request {mailbox.request.request_id} was in an engine that died for the second time"
                failed[flight] = errors.EngineDead(f"{who}, may well be the cause, and is not sent again: {error}")
        self._fail(failed)
        self.send_waiting()

    def send_waiting(self) -> None:
        """Send what waits for an engine, if one lives."""
        self._try_to_send(self._waiting())

    def _try_to_send(self, flights: list[Flight], new: bool = False) -> None:
        failed: dict[Flight, errors.WavecoreError] = {}
        for flight in flights:
            engine = self._balance.choose(flight)
            if engine is None:
                continue
            try:
                self._send(flight, engine, new)
            except Exception as refused:  # by the wire, or a fault of ours: of this request alone
                failed[flight] = errors.as_wavecore_error(refused)
        self._fail(failed)

    def fail_waiting(self, error: errors.WavecoreError | None = None, rank: int | None = None) -> None:
        """No engine will come back, or it takes nothing of this client; or that is so of the one with this rank."""
        lost = [f for f in self._waiting() if rank in (None, f.mailbox.request.options.data_parallel_rank)]
        self._fail({flight: error or flight.lost_by or self.no_engine() for flight in lost})

    @property
    def have_deadlines(self) -> bool:
        return any(f.mailbox.request.options.deadlines for f in self._flights.values())

    def fail_overdue(self) -> None:
        """The second level of deadlines: an engine ends a request in time; this is for an engine that says nothing."""
        now = time.monotonic()
        failed: dict[Flight, errors.WavecoreError] = {}
        for flight in [f for f in self._flights.values() if f.deadline < now]:
            silent = "the engine said nothing" if flight.at else f"no engine was up to take it: {self.no_engine()}"
            text = f"request {flight.mailbox.request.request_id}: its timeout passed and {silent}"
            failed[flight] = errors.RequestTimeout(text)
        self._fail(failed)

    def no_engine(self) -> errors.EngineDead:
        """Why no engine takes a request now."""
        error = next((engine.error for engine in self._engines if engine.error is not None), None)
        return errors.EngineDead(str(error) if error else "the connection to every engine is broken for now; try again")

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _send(self, flight: Flight, engine: RemoteEngine, new: bool = False) -> None:
        mailbox, request = flight.mailbox, flight.mailbox.request
        elapsed = 0.0 if new else time.monotonic() - mailbox.started
        if self._next_handle + request.params.n > MAX_HANDLE:
            self._next_handle = 1
        first = self._next_handle
        message = request.message(first, mailbox.emitted, mailbox.seed, elapsed)
        client_id = self._pump.send(engine.index, message)
        self._next_handle += request.params.n
        choices = [i for i in range(request.params.n) if mailbox.is_running(i)]
        flight.at = Stay(engine, client_id, {first + i for i in choices})
        self._rows.update({first + i: (flight, flight.at, i) for i in choices})
        self._balance.sent(flight, engine)

    def _abort_at_engine(self, flight: Flight) -> None:
        if flight.at and flight.at.client_id == flight.at.engine.client_id:
            self._send_abort(flight.at.engine, list(flight.at.handles))

    def _send_abort(self, engine: RemoteEngine, handles: list[int]) -> None:
        if handles and engine.state in (EngineState.UP, EngineState.BROKEN):
            try:
                self._pump.send(engine.index, Abort(b"", b"", 0, np.array(handles, np.uint32)))
            except errors.WavecoreError as error:  # gone, or it takes nothing more: its rows come to nobody
                logger.debug("engine %d was not told to abort: %s", engine.index, error)

    def _waiting(self) -> list[Flight]:
        return [flight for flight in self._flights.values() if flight.at is None]

    def _fail(self, failed: Mapping[Flight, errors.WavecoreError]) -> None:
        for flight, error in failed.items():
            self._abort_at_engine(flight)
            # A copy for each: one exception raised in many tasks would collect all their tracebacks.
            flight.mailbox.end("error", errors.from_code(error.code, str(error)))
            self._forget(flight)
        notify([flight.mailbox for flight in failed])

    def _detach(self, flight: Flight) -> None:
        if flight.at is not None:
            for handle in flight.at.handles:
                del self._rows[handle]
            flight.at.engine.ended(flight.mailbox)
            flight.at = None

    def _leave(self, flight: Flight) -> None:
        """The engine that it was moved away from has ended it, or is over."""
        if flight.left is not None:
            for handle in flight.left.handles:
                del self._rows[handle]
            flight.left = None

    def _end_choice(self, flight: Flight, stay: Stay, handle: int) -> None:
        stay.handles.discard(handle)
        del self._rows[handle]
        if not stay.handles:
            (self._forget if stay is flight.at else self._leave)(flight)

    def _forget(self, flight: Flight) -> None:
        self._detach(flight)
        self._leave(flight)
        self._flights.pop(flight.mailbox, None)
        self.live.discard(flight.mailbox)


def _can_resume(mailbox: Mailbox) -> bool:
    params = mailbox.request.params
    return mailbox.request.resume and (params.greedy or params.seed is not None or mailbox.seed is not None)
