"""Watches deployment.json for a client while an engine is not up: where it listens, why it died, whether it comes back.

One rule of when to look: at once when a connection breaks, then again and again until every engine is up or will never
be. A client whose engines are all up reads no file.

For engines known by an access file nobody writes down how they are: their last words and their silence have to do. One
that says nothing for long counts as dead; its connection stays, and should it speak again, it is up.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from wavecore.frontend.client.engines import EngineState, RemoteEngine
from wavecore.transport.errors import EngineDead, ResourceError, StartError, WavecoreError
from wavecore.transport.io.client_pump import ClientPump
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment, EngineEntry
from wavecore.transport.processes.places import AccessFile, Place, curve_of, read_place

LOOK_SECONDS = 0.25
BROKEN_LOOK_SECONDS = 0.01  # the supervisor tells within milliseconds why an engine died
UNREACHABLE_SECONDS = 9.5  # without a word: the end of a host is heard within 10 s
GONE_SECONDS = 0.75  # more than a tick of the supervisor
OVER = ("stopped", "failed")  # states in which an engine stays


class DeploymentWatch:
    """Of one place. Looks and calls back in the IO thread; `can_recover` may be asked in any.

    Args:
        engines: those of the place that are of interest.
        on_down: told (engine, epoch, error, state) when that life of an engine is over or has long been out of reach.
        on_lost: told the reason when no engine of this place will ever take a request again; at each look also (reason,
            index) of each single one that will not.
    """

    def __init__(
        self,
        place: Place,
        engines: Mapping[int, RemoteEngine],
        pump: ClientPump,
        on_down: Callable[[RemoteEngine, bytes, EngineDead, EngineState], None],
        on_lost: Callable[[WavecoreError, int | None], None],
    ) -> None:
        self._place, self._engines, self._pump = place, engines, pump
        self._on_down, self._on_lost = on_down, on_lost
        self._addresses: dict[int, tuple[str, str]] = {}  # where each engine is connected
        self._missing_since = 0.0  # monotonic time; 0 while the file is there
        self._planned: object | None = None  # stands for the next look; one that comes earlier takes its place

    def can_recover(self) -> bool:
        """Whether an engine is up, starting, or to be started again, and will take requests of this client."""
        try:
            found = self._read()
        except StartError:  # stopped
            return False
        return found is None or len(self._over(found)) < len(found.engines)

    def look(self) -> None:
        """Look now, and again later while an engine may yet come up."""
        self._planned, again = None, True
        try:
            again = self._look()
        finally:  # what failed once, without a descriptor left for the file, say, may work the next time
            if again:
                broken = any(engine.state is EngineState.BROKEN for engine in self._engines.values())
                self._plan(BROKEN_LOOK_SECONDS if broken else LOOK_SECONDS)

    def look_later(self) -> None:
        """Look in a moment, unless a look is planned anyway."""
        if self._planned is None:
            self._plan(LOOK_SECONDS)

    def _plan(self, delay: float) -> None:
        self._planned = this = object()
        self._pump.call_later(delay, lambda: self.look() if this is self._planned else None)

    def _read(self) -> Deployment | None:
        """The file, as far as it speaks of the engines that were there when this client was made.

        None while it cannot be read for want of descriptors, or is missing and that may be a cleaner's work, which the
        supervisor undoes in its next tick.

        Raises:
            StartError: it is missing for longer: the deployment was stopped.
        """
        try:
            found = read_place(self._place)
        except ResourceError:
            return None
        except StartError:
            self._missing_since = self._missing_since or time.monotonic()
            if time.monotonic() - self._missing_since > GONE_SECONDS:
                raise
            return None
        self._missing_since = 0.0
        return replace(found, engines=tuple(entry for entry in found.engines if entry.index in self._engines))

    def _look(self) -> bool:
        """Returns whether an engine that is not up may come up."""
        try:
            found = self._read()
        except StartError as stopped:
            self._find_causes()
            for index in (*self._engines, None):
                self._on_lost(stopped, index)
            return False
        if found is None:
            return True
        self._find_causes()
        over = self._over(found)
        for index, reason in over.items():
            self._on_lost(reason, index)
        if len(over) == len(found.engines):
            self._on_lost(next(iter(over.values()), EngineDead(f"the deployment in {self._place} is over")), None)
        for entry in found.engines:
            try:
                self._connect(entry)
            except WavecoreError as error:  # a missing key file, for one: the next look tries again
                for index in (entry.index, None) if entry.index not in self._addresses else ():
                    self._on_lost(error, index)
        coming = [self._engines[entry.index] for entry in found.engines if entry.state not in OVER]
        return any(engine.state is not EngineState.UP for engine in coming)

    def _find_causes(self) -> None:
        """Why connections broke: the engine is dead by deployment.json, or out of reach for too long."""
        for engine in [engine for engine in self._engines.values() if engine.state is EngineState.BROKEN]:
            epoch = engine.epoch
            file = None if isinstance(self._place, AccessFile) else self._place
            cause = deployment.why_dead(file, engine.index, epoch) if file else None
            if cause is not None:
                self._on_down(engine, epoch, EngineDead(cause.message), EngineState.DOWN)
            elif engine.silent_for > UNREACHABLE_SECONDS:
                self._on_down(engine, epoch, _silence(engine), EngineState.UNREACHABLE)

    def _over(self, found: Deployment) -> dict[int, EngineDead]:
        """Why engines take no requests of this client, now or later, by engine."""
        over = [entry for entry in found.engines if not self._may_come(entry)]
        gone = ""
        if found.state in ("dead", "stopped") or len(over) == len(found.engines):
            over, gone = [*found.engines], f"the deployment in {self._place} is over"
        return {entry.index: self._why(entry, gone) for entry in over}

    def _may_come(self, entry: EngineEntry) -> bool:
        """Whether it takes requests or will. One that is ready, but not for us, does not count: a wait for it would
        have no end; nor, where nobody tells, one that has long been silent."""
        engine = self._engines[entry.index]
        if isinstance(self._place, AccessFile):
            return engine.state is EngineState.UP or engine.silent_for <= UNREACHABLE_SECONDS
        return entry.state not in OVER and not (entry.state == "ready" and engine.state is EngineState.UNREACHABLE)

    def _why(self, entry: EngineEntry, gone: str) -> EngineDead:
        engine = self._engines[entry.index]
        if isinstance(self._place, AccessFile):
            return engine.error or _silence(engine)
        return EngineDead(entry.cause.message if entry.cause else gone or f"{engine.name} takes no requests any more")

    def _connect(self, entry: EngineEntry) -> None:
        """Talk to an engine where it listens now: over tcp its port may have been taken while it was down."""
        addresses = entry.input, entry.output
        if entry.input and addresses != self._addresses.get(entry.index):
            self._pump.connect(entry.index, *addresses, curve_of(self._place, entry))
            self._addresses[entry.index], self._engines[entry.index].host = addresses, entry.host


def _silence(engine: RemoteEngine) -> EngineDead:
    reason = f"out of reach for {engine.silent_for:.1f} s ({engine.broken_by}); is its machine reachable?"
    return EngineDead(f"{engine.name} has been {reason}")
