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
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from wavecore.frontend.base import places_of
from wavecore.frontend.serve.server_config import ServerConfig
from wavecore.transport.errors import WavecoreError
from wavecore.transport.io.connection import say_bye
from wavecore.transport.processes.deployment import Cause, EngineEntry
from wavecore.transport.processes.group import Group, GroupContext, Limits
from wavecore.transport.processes.logs import LineWriter
from wavecore.transport.processes.places import curve_of, read_place
from wavecore.transport.processes.process import ChildSpec
from wavecore.transport.processes.runtime_dir import ADMIN_SOCKETS, RuntimeDir
from wavecore.transport.processes.stall import TICK_SECONDS
from wavecore.transport.processes.supervisor import SIGNALS, Supervisor, signals_to
from wavecore.transport.waker import Waker

LIMITS = Limits(step=math.inf, idle=math.inf)  # of API processes, which have no steps
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
        self._config, self._supervisor, self._listener, self._count = config, supervisor, listener, count
        self._progress, self._on_ready = progress, on_ready
        self._selector = selectors.DefaultSelector()
        self._output = LineWriter(lambda: sys.stderr)
        self._processes: list[_ApiProcess] = []
        self._waker = Waker()
        self._selector.register(self._waker.fd, selectors.EVENT_READ, self._waker.clear)
        self._received: list[int] = []  # signals
        self._own_dir: RuntimeDir | None = None

    def run(self) -> int:
        """Serve until a signal ends it: the first one drains, the second one ends it at once.

        Returns:
            0, or 130 after Ctrl-C.

        Raises:
            WavecoreError: engines or API processes did not start, or every engine, or an API process, stays down.
        """
        with signals_to(self._on_signal):
            try:
                if self._supervisor is not None:
                    self._config = replace(self._config, attach=(str(self._supervisor.start(self._progress)),))
                folder = self._folder()
                self._spawn(folder)
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

    def _spawn(self, folder: Path) -> None:
        def show(_name: str, line: str) -> None:
            self._output.put(line)

        context = GroupContext(folder, folder, None, "", LIMITS, self._selector, lambda *_: None, show)
        for index in range(self._count):
            config = replace(self._config, runtime_dir=str(folder), index=index)
            self._processes.append(_ApiProcess(config, self._listener, context))
            self._processes[-1].spawn()

    def _watch(self, folder: Path) -> None:
        """Until all API processes have ended, which they do at a signal only, or a second signal came."""
        told, stopping, next_tick = False, False, time.monotonic()
        while any(process.state != "stopped" for process in self._processes):
            for key, _ in self._selector.select(max(0.0, next_tick - time.monotonic())):
                key.data()
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                for process in self._processes:
                    process.tick()
            if self._received and not stopping:
                stopping = True
                logger.warning("stopping: %s", SIGNALS[self._received[0]])
                for process in self._processes:
                    process.stop(self._config.shutdown_timeout)
            if len(self._received) > 1:
                logger.warning("stopping at once: %s", SIGNALS[self._received[1]])
                return
            if not told and all(process.state == "ready" for process in self._processes):
                told = True
                self._on_ready(folder)
            for process in self._processes:
                process.check()
            supervisor = self._supervisor
            if supervisor is not None and supervisor.deployment().state in ("failed", "stopped"):
                supervisor.wait()  # raises, with the cause
                return

    def _on_signal(self, number: int) -> None:
        self._received.append(number)
        self._waker.wake()
        if not self._processes and self._supervisor is not None:
            self._supervisor.request_stop()  # engines are still starting


class _ApiProcess(Group):
    """One API process over all its lives: a group of one rank, which serves others than clients of engines."""

    def __init__(self, config: ServerConfig, listener: socket.socket, context: GroupContext) -> None:
        self._places = places_of(config.attach)
        spec = ChildSpec(
            f"api server {config.index}",
            "wavecore.frontend.serve",
            config.to_json(),
            memory_advice=ADVICE,
            argv=["--attach", config.attach[0]],
            fds=[("listener", listener.fileno())],
        )
        super().__init__(config.index, [spec], context)

    def check(self) -> None:
        """Raises:
        WavecoreError: it did not start, or stays down.
        """
        cause = self.entries[0].cause
        if self.state == "failed" and cause is not None:
            raise self.failure or cause.as_error()

    def _argv(self, entry: EngineEntry) -> list[str]:  # noqa: ARG002 (it is no engine)
        return []

    def _died(self, cause: Cause) -> None:
        super()._died(cause)
        if self.state != "waiting":
            return
        try:
            self._say_bye()
        except WavecoreError as error:  # the engines miss it by themselves, some seconds later
            logger.warning("%s: its requests were not ended at once: %s", self._specs[0].name, error)

    def _say_bye(self) -> None:
        """Have engines end what the dead process left there: its sessions with them are what it resolved last."""
        for place in self._places:
            for engine in read_place(place).engines:
                if self._ranks and (session := self._ranks[0].resolved.get(str(engine.index))):
                    client_id, epoch = map(bytes.fromhex, session)
                    say_bye(engine.output, client_id, epoch, curve_of(place, engine))
