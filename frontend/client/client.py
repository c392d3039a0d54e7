"""EngineClient: requests to engines and their outputs back, over any death of an engine.

It owns one of each: a `ClientPump` (all sockets, and the IO thread that calls `_on_event`), a `RemoteEngine` for every
engine, the `InFlight` requests, the `Calls` without an answer, and a `DeploymentWatch` for each place.

All state changes in the IO thread. Whoever calls in hands over what is to be done (`ClientPump.call_soon`) and reads
single values, so there is no lock. A collector may therefore close a stream, and a signal handler may abort requests
or shut the client down or raise, at any moment in any thread: nothing that it interrupted is half-changed or held.

Each request ends exactly once. When a life of an engine is over, a request without a token goes once to a living
engine, or waits for the restarted one; one with tokens fails with the cause (or goes on once, with `resume`). A request
that is submitted while an engine is being restarted waits as well.
"""

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from wavecore.frontend.client.calls import Calls
from wavecore.frontend.client.deployment_watch import DeploymentWatch
from wavecore.frontend.client.engines import EngineState, RemoteEngine
from wavecore.frontend.client.in_flight import InFlight
from wavecore.frontend.client.mailbox import Mailbox
from wavecore.transport import forks
from wavecore.transport.errors import EngineDead, Overloaded, RequestError, StartError, WavecoreError, as_wavecore_error
from wavecore.transport.headroom import check_headroom
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.io.connection import ClientFailed, Disconnected, EngineEvent, Reconnected
from wavecore.transport.processes.places import Place, check_alike, read_place
from wavecore.transport.wire.messages import Dead, Heartbeat, Ready, Result, Step

logger = logging.getLogger(__name__)

SWEEP_SECONDS = 0.25  # between two looks at the deadlines of all requests
CLOSED = "this client was closed (shutdown); make a new one"


class EngineClient:
    """A client of every engine of a deployment, on one host or several, or of one stage of a pipeline.

    Args:
        places: where its engines are found.
        timeout: seconds until the first engine must have answered.
        stage: whose engines; "" where there are no stages. None takes all, for calls alone: their models may differ.

    Raises:
        StartError: no deployment there, or no such stage, or no answer in time.
        ConfigError: engines of two places have the same number, or another model.
        EngineDead: the deployment is over; with the cause.
        Overloaded: the engine has as many clients as it takes.
        ResourceError: too few descriptors or threads.
    """

    def __init__(self, *places: Place, timeout: float = 30.0, stage: str | None = None) -> None:
        self.places = places
        found = [read_place(place) for place in places]
        check_alike(places, found)
        stages = {entry.stage for each in found for entry in each.engines}
        mine = [[RemoteEngine(e.index) for e in each.engines if stage in (None, e.stage)] for each in found]
        self._engines = {engine.index: engine for engines in mine for engine in engines}
        if stages and not self._engines:
            raise StartError(f"no stage {stage!r} in {self}; connect with stage=: {', '.join(sorted(stages))}")
        # For each engine: of four sockets, and of two connections
        check_headroom(f"a client of {len(self._engines)} engines", 6 * len(self._engines), 0)
        self.numbers = sorted(self._engines)
        self._closed = ""  # why nothing can be sent any more
        self._refused: WavecoreError | None = None  # why no engine takes this client, or ever will
        self._sweeping = False  # a look at the deadlines is scheduled
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # an engine is ready, or something is in the way
        self._owner = os.getpid()
        self._pump = ClientPump(self._on_event)
        self._requests = InFlight(self._pump, list(self._engines.values()))
        self._calls = Calls(self._pump)
        self._watches: list[DeploymentWatch] = []  # by place
        self._watch_of: dict[int, DeploymentWatch] = {}  # by engine
        for number, (place, engines) in enumerate(zip(places, mine, strict=True)):
            own = {engine.index: engine for engine in engines}
            watch = DeploymentWatch(place, own, self._pump, self._down, partial(self._lost, number))
            self._watches.append(watch)
            self._watch_of |= dict.fromkeys(own, watch)
        forks.tell(self)
        try:
            self._pump.call_soon(self._first_look)
            self._wait_ready(timeout)
        except BaseException:
            self.close()
            raise

    # --- requests ------------------------------------------------------------------------------------------------

    def submit(self, mailbox: Mailbox) -> None:
        """Send a request. Its outputs, and its end whatever happens, arrive in the mailbox: EngineDead with the cause
        where no engine lives or will, Overloaded or MessageTooLarge where it cannot be sent.

        While an engine is being restarted the request waits for it, within its own deadlines.
        """
        self._requests.live.add(mailbox)
        if not self._closed and not self.can_recover():
            self._requests.refuse(mailbox, self._requests.no_engine())
            return
        self._pump.call_soon(partial(self._submit, mailbox))
        if self._closed:  # now or meanwhile: nobody may be there any more to take it
            self._requests.refuse(mailbox, EngineDead(self._closed))

    def abort(self, mailbox: Mailbox) -> None:
        """End a request, at any moment, as often as one likes."""
        self._requests.live.discard(mailbox)
        if not self._closed:
            self._pump.call_soon(partial(self._requests.abort, mailbox))

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._requests.live)

    # --- utility calls -------------------------------------------------------------------------------------------

    def call(
        self, method: str, args: Mapping[str, Any] | None = None, *, engine: int | None = None, timeout: float = 60.0
    ) -> Future[Result]:
        """Call a named method of one engine.

        Returns:
            A future of the answer's `.value` and `.frames`; it fails with EngineDead when the engine dies, and with
            RequestTimeout after `timeout` seconds.

        Raises:
            EngineDead: no engine lives.
        """
        up = [index for index in self.engines if engine in (None, index)]
        if not up:
            raise self._requests.no_engine()
        future = self._calls.start(up[0], method, args or {}, timeout)
        self.check_open()  # now or meanwhile: nobody may be there any more to answer
        return future

    def check_open(self) -> None:
        """Raises:
        EngineDead: this client was closed, or belongs to the process that this one was forked from.
        """
        if self._closed:
            raise EngineDead(self._closed)

    def check_health(self) -> None:
        """Raises:
        EngineDead: no engine takes requests; with the cause.
        """
        self.check_open()
        if not self.engines:
            raise self._requests.no_engine()

    def can_recover(self) -> bool:
        """Whether an engine takes requests, or is being started again and will."""
        return not self._closed and (bool(self.engines) or any(w.can_recover() for w in self._watches))

    @property
    def engines(self) -> list[int]:
        """Indices of the engines that take requests."""
        return [engine.index for engine in self._engines.values() if engine.state is EngineState.UP]

    @property
    def sessions(self) -> dict[int, tuple[bytes, bytes]]:
        """Engine -> what this client is called there, and the epoch: whoever sees it die can say goodbye for it."""
        up = [engine for engine in self._engines.values() if engine.state is EngineState.UP]
        return {engine.index: (engine.client_id, engine.epoch) for engine in up if engine.client_id}

    @property
    def resolved(self) -> Mapping[str, Any]:
        """What the first engine said at ready: model_path, max_model_len, vocab_size, ..."""
        return next((engine.resolved for engine in self._engines.values() if engine.resolved), {})

    def close(self) -> None:
        """End every request and let go of the engines. Idempotent, in any thread and in a signal handler."""
        self._closed = self._closed or CLOSED
        self._pump.call_soon(self._end)
        self._pump.close()

    def forked(self) -> None:
        """The child of a fork has this object and not its threads: there it is closed, and nothing waits for them."""
        use = f"in this one use wavecore.connect({[str(place) for place in self.places]})"
        self._closed = f"this client belongs to process {self._owner}; {use}"
        self._pump.forked()
        self._end()

    # --- what changes state: the IO thread -----------------------------------------------------------------------

    def _submit(self, mailbox: Mailbox) -> None:
        if self._requests.submit(mailbox):
            for watch in self._watches:  # the last engine may have been given up since
                watch.look_later()
        if mailbox.request.options.deadlines and not self._sweeping:
            self._sweeping = True
            self._pump.call_later(SWEEP_SECONDS, self._check_deadlines)

    def _end(self) -> None:
        self._requests.fail_all(f"the request had not ended: {self._closed}, and send it again")
        self._calls.fail(None, RequestError(f"the call was not answered: {self._closed}"))
        self._news.put(None)

    def _on_event(self, index: int, event: EngineEvent) -> None:
        engine = self._engines[index]
        if isinstance(event, Step):
            self._requests.deliver(engine, event)
            self._requests.report(engine, event.load)
        elif isinstance(event, Heartbeat):
            self._requests.report(engine, event.load)
        elif isinstance(event, Ready):
            self._on_ready(engine, event)
        elif isinstance(event, Result):
            self._calls.answer(event)
        elif isinstance(event, Dead):
            if event.code == Overloaded.code:  # it takes no more clients, and lives on for those that it has
                self._refuse(Overloaded(f"{engine.name}: {event.message}"))
            else:
                error = EngineDead(f"{engine.name} ended in phase {event.phase}: {event.message}")
                self._down(engine, engine.epoch, error, EngineState.DOWN)
        elif isinstance(event, Disconnected):
            if engine.state is EngineState.UP:
                engine.state = EngineState.BROKEN
                engine.falls_silent(event.reason, event.silent * self._pump.tick_seconds)
                self._watch_of[index].look()
        elif isinstance(event, ClientFailed):
            self._refuse(event.error)
            self._closed = self._closed or f"this client's IO thread failed ({event.error}): make a new client"
            self._end()
        elif isinstance(event, Reconnected):
            if engine.state in (EngineState.BROKEN, EngineState.UNREACHABLE):
                engine.state, engine.error = EngineState.UP, None
            self._requests.send_waiting()

    def _on_ready(self, engine: RemoteEngine, ready: Ready) -> None:
        """A new connection to an engine, perhaps to a new life: whatever was sent over an earlier one is lost."""
        forgot = f"{engine.name} was restarted, or heard nothing of this client for 10 s and ended its requests"
        error = engine.error or EngineDead(forgot)
        engine.resolved, engine.epoch = ready.resolved, ready.epoch
        engine.client_id = self._pump.client_id(engine.index)
        engine.state, engine.error = EngineState.UP, None
        for other in self._engines.values():
            other.silent_since = min(other.silent_since, time.monotonic())
        self._requests.lose(engine, error, everything=False)
        self._calls.fail(engine.index, error)
        self._news.put(None)

    def _down(self, engine: RemoteEngine, epoch: bytes, error: EngineDead, state: EngineState) -> None:
        """A life of an engine is over, or out of reach for too long."""
        known = engine.state is EngineState.DOWN or engine.epoch != epoch
        if known or (state is EngineState.UNREACHABLE and engine.state is not EngineState.BROKEN):
            return
        ends = [engine]
        if state is EngineState.DOWN and (life := engine.resolved.get("lockstep")):  # the others end with it
            same = [each for each in self._engines.values() if each.resolved.get("lockstep") == life]
            ends = [each for each in same if each.state is not EngineState.DOWN]
        for each in ends:
            each.error = error
            self._requests.abort_all_at(each)  # for an engine that lives behind a broken connection
            each.state = state
            if state is EngineState.DOWN:
                each.falls_silent("its life ended")
        logger.debug("%s", error)  # whoever is concerned gets it as an exception, and the supervisor logs it
        for each in ends:
            self._requests.lose(each, error, everything=True)
            self._calls.fail(each.index, error)
            self._watch_of[each.index].look_later()

    def _lost(self, place: int, reason: WavecoreError, rank: int | None) -> None:
        """No engine of that place takes requests any more, or that one does not; those of other places may."""
        if rank is not None or not any(w.can_recover() for number, w in enumerate(self._watches) if number != place):
            self._refuse(reason, rank)

    def _refuse(self, reason: WavecoreError, rank: int | None = None) -> None:
        """No engine takes this client's requests, or that one does not: it will not come back, or has as many clients
        as it takes."""
        self._refused = reason if rank is None else self._refused
        self._requests.fail_waiting(reason if isinstance(reason, Overloaded) or rank is not None else None, rank)
        self._news.put(None)

    def _first_look(self) -> None:
        try:
            for watch in self._watches:
                watch.look()
        except Exception as error:  # `_wait_ready` raises it
            self._refuse(as_wavecore_error(error))

    def _check_deadlines(self) -> None:
        """One sweep over all requests, again while any has a deadline; a timer for each would outlive most of them."""
        self._requests.fail_overdue()
        self._sweeping = self._requests.have_deadlines
        if self._sweeping:
            self._pump.call_later(SWEEP_SECONDS, self._check_deadlines)

    # --- the caller's thread -------------------------------------------------------------------------------------

    def __str__(self) -> str:
        return ", ".join(map(str, self.places))

    def _wait_ready(self, timeout: float) -> None:
        by = time.monotonic() + min(timeout, threading.TIMEOUT_MAX)
        try:
            while not self.engines:
                self._news.get(timeout=max(0.0, by - time.monotonic()))
                if self._refused:
                    raise self._refused
                self.check_open()
        except queue.Empty:
            silent = f"no engine of {self} answered within {timeout:g} s"
            raise StartError(f"{silent}; is it overloaded, or has it another key?") from None
