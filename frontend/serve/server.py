"""`wavecore serve`: holds the port, and runs engines and API processes until a signal ends it.

Engines have their supervisor. API processes keep nothing, so that all there is to do about a dead one is to start
another, which takes what waits at the port. Both end with this process, whatever becomes of it.
"""

import logging
import math
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from wavecore.frontend.base import places_of
from wavecore.frontend.serve.server_config import ServerConfig
from wavecore.transport.errors import ResourceError, WavecoreError
from wavecore.transport.io.farewell import say_bye
from wavecore.transport.processes.group import Backoff
from wavecore.transport.processes.logs import LineWriter
from wavecore.transport.processes.places import Place, curve_of, read_place
from wavecore.transport.processes.process import ChildSpec
from wavecore.transport.processes.rank_process import RankProcess
from wavecore.transport.processes.runtime_dir import ADMIN_SOCKETS, RuntimeDir
from wavecore.transport.processes.supervisor import SIGNALS, Supervisor, signals_to
from wavecore.transport.waker import Waker

TICK_SECONDS = 0.25
GRACE_SECONDS = 5.0  # beyond the time to drain, then a process is killed
ADVICE = "run fewer API processes, or give the machine or container more memory"

logger = logging.getLogger(__name__)


class Server:
    """One server. Everything happens in the main thread, but for the supervisor.

    Args:
        config: `attach` and `runtime_dir` are filled in once engines of our own are ready.
        supervisor: of the engines, not started; None attaches to those of `config.attach`.
        listener: listens already.
        count: of API processes.
        progress: as of `Supervisor.start`.
        on_ready: called once every API process serves.
    """

    def __init__(
        self,
        config: ServerConfig,
        supervisor: Supervisor | None,
        listener: socket.socket,
        count: int,
        progress: Callable[[int, str, float], None],
        on_ready: Callable[[Path], None],
    ) -> None:
        self._config, self._supervisor, self._listener = config, supervisor, listener
        self._progress, self._on_ready = progress, on_ready
        self._selector = selectors.DefaultSelector()
        self._output = LineWriter(lambda: sys.stderr)
        self._processes = [_ApiProcess(index, self._selector, self._output.put) for index in range(count)]
        self._waker = Waker()
        self._selector.register(self._waker.fd, selectors.EVENT_READ, self._waker.clear)
        self._received: list[int] = []
        self._told = 0  # signals that were passed on
        self._own_dir: RuntimeDir | None = None

    def run(self) -> int:
        """Serve until a signal ends it: the first one drains, the second one ends it at once.

        Returns:
            0, or 130 after Ctrl-C.

        Raises:
            WavecoreError: engines or API processes did not start, or every engine stays down.
        """
        with signals_to(self._on_signal):
            try:
                if self._supervisor is not None:
                    self._config = replace(self._config, attach=(str(self._supervisor.start(self._progress)),))
                folder = self._folder()
                for index, process in enumerate(self._processes):
                    process.spawn(replace(self._config, runtime_dir=str(folder), index=index), self._listener)
                self._watch(folder)
            except WavecoreError:
                if not self._received:
                    raise
            finally:
                for process in self._processes:
                    process.destroy()
                if self._supervisor is not None:
                    self._supervisor.stop()
                if self._own_dir is not None:
                    self._own_dir.remove()
                self._output.close()
                self._selector.close()
                self._waker.close()
        return 130 if self._received[:1] == [signal.SIGINT] else 0

    def _folder(self) -> Path:
        """For the operator's sockets: the first runtime directory of engines on this host, or one of our own."""
        here = [place for place in places_of(self._config.attach) if isinstance(place, Path)]
        if not here:
            self._own_dir = RuntimeDir(None, ADMIN_SOCKETS)
        return here[0] if self._own_dir is None else self._own_dir.path

    def _watch(self, folder: Path) -> None:
        """Until all API processes have ended, which they do at a signal only."""
        told = False
        while any(process.is_there for process in self._processes):
            for key, _ in self._selector.select(TICK_SECONDS):
                key.data()
            for process in self._processes:
                process.tick()
            self._pass_on()
            if not told and all(process.was_ready for process in self._processes):
                told = True
                self._on_ready(folder)
            supervisor = self._supervisor
            if supervisor is not None and supervisor.deployment().state in ("failed", "stopped"):
                supervisor.wait()  # raises, with the cause
                return

    def _pass_on(self) -> None:
        while self._told < len(self._received):
            number, first = self._received[self._told], self._told == 0
            logger.warning("stopping%s: %s", "" if first else " at once", SIGNALS[number])
            self._told += 1
            for process in self._processes:
                process.stop(self._config.shutdown_timeout if first else None)

    def _on_signal(self, number: int) -> None:
        self._received.append(number)
        self._waker.wake()
        if not any(process.is_there for process in self._processes) and self._supervisor is not None:
            self._supervisor.request_stop()  # engines are still starting


class _ApiProcess:
    """One API process over all its lives.

    Attributes:
        was_ready: it has served.
    """

    def __init__(self, index: int, selector: selectors.BaseSelector, on_output: Callable[[str], None]) -> None:
        self.was_ready = False
        self._name = f"api server {index}"
        self._selector, self._on_output = selector, on_output
        self._backoff = Backoff()
        self._life: RankProcess | None = None
        self._stopping = False
        self._places: tuple[Place, ...] = ()
        self._spawn: Callable[[], None] = lambda: None
        self._spawn_at = self._kill_at = math.inf

    @property
    def is_there(self) -> bool:
        """Whether it runs, or will again."""
        return self._life is not None or self._spawn_at < math.inf

    def spawn(self, config: ServerConfig, listener: socket.socket) -> None:
        """Start a life; the further ones are started alike.

        Raises:
            ResourceError: the machine gives no process.
            ConfigError: an access file that cannot be used.
        """
        self._spawn, self._spawn_at = partial(self.spawn, config, listener), math.inf
        self._places = places_of(config.attach)
        spec = ChildSpec(
            self._name,
            "wavecore.frontend.serve",
            config.to_json(),
            memory_advice=ADVICE,
            argv=["--attach", config.attach[0]],
            fds=[("listener", listener.fileno())],
        )
        try:
            self._life = RankProcess(
                0,
                spec,
                selector=self._selector,
                on_phase=lambda *_: None,
                on_change=self._on_change,
                on_output=self._on_output,
            )
        except OSError as error:
            raise ResourceError(f"{self._name} could not be started: {error}") from error

    def stop(self, drain: float | None) -> None:
        """Have it end after at most `drain` seconds; None kills it. It is not started again."""
        self._stopping, self._spawn_at = True, math.inf
        if self._life is not None and drain is not None:
            self._life.child.signal(signal.SIGTERM)
            self._kill_at = time.monotonic() + drain + GRACE_SECONDS
        elif self._life is not None:
            self._life.kill()

    def tick(self) -> None:
        """Raises:
        ResourceError: as `spawn`.
        """
        now = time.monotonic()
        if now >= self._spawn_at:
            self._spawn()
        if now >= self._kill_at and self._life is not None:
            self._life.kill()

    def destroy(self) -> None:
        if self._life is not None:
            self._life.kill()
            self._life.reap()
            self._life = None

    def _on_change(self, life: RankProcess) -> None:
        """It serves, says why it fails, or has ended.

        Raises:
            WavecoreError: its first start failed.
        """
        self.was_ready |= life.endpoints is not None
        if life.cause is None:
            return
        self._life = None
        if self._stopping:
            return
        delay = self._backoff.ended(time.monotonic(), self.was_ready) if self.was_ready else None
        if delay is None:
            raise life.cause.as_error()
        why = life.cause.message
        logger.warning("%s; it is started again in %g s, and requests that it had are lost", why, delay)
        self._spawn_at = time.monotonic() + delay
        try:
            self._say_bye(life.resolved)
        except WavecoreError as error:  # the engines miss it by themselves, some seconds later
            logger.warning("%s: its requests were not ended at once: %s", self._name, error)

    def _say_bye(self, sessions: Mapping[str, Any]) -> None:
        """Have engines end what the dead process left there.

        Args:
            sessions: with engines, as it told last.
        """
        for place in self._places:
            for engine in read_place(place).engines:
                if session := sessions.get(str(engine.index)):
                    client_id, epoch = map(bytes.fromhex, session)
                    say_bye(engine.output, client_id, epoch, curve_of(place, engine))
