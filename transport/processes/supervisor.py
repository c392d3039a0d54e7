"""Starts, watches, restarts and stops the engines of one host. Embedded by `LLM` and `wavecore engine`.

An engine is a group of processes, its ranks. One thread owns them all: it spawns them (they die with it, see
child.SupervisedChild), reads their status and log pipes, sees their end by pidfd within a millisecond, and writes
`deployment.json` before anybody else learns of a change. All that it knows of them are the lines on the status pipe,
each with the time "at" which it was said, in seconds of the monotonic clock:
    {"phase": str, "fraction": float}    while starting; "bind" is the phase that takes the addresses
    {"ready": {"input", "output", "epoch", "resolved"}}    of a worker: {"resolved": {"device"}}
    {"failed": fields of deployment.Cause}    the last line of a child that ends on an error
"""

import atexit
import contextlib
import logging
import os
import queue
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Self

from wavecore.transport import curve, forks
from wavecore.transport.addresses import check_interface
from wavecore.transport.errors import EngineDead, ResourceError, StartError, WavecoreError, as_wavecore_error
from wavecore.transport.headroom import check_headroom
from wavecore.transport.processes import deployment
from wavecore.transport.processes.deployment import Deployment
from wavecore.transport.processes.group import EngineGroup, Group, GroupContext, Limits, serving_ranks, socket_name
from wavecore.transport.processes.logs import LineWriter
from wavecore.transport.processes.process import ChildSpec
from wavecore.transport.processes.runtime_dir import ADMIN_SOCKETS, RuntimeDir
from wavecore.transport.processes.stall import TICK_SECONDS
from wavecore.transport.waker import Waker

__all__ = ["ChildSpec", "Limits", "Supervisor"]

SIGNALS: dict[int, str] = {
    signal.SIGTERM: "SIGTERM",
    signal.SIGINT: "SIGINT (Ctrl-C)",
    signal.SIGHUP: "SIGHUP (the terminal was closed)",
}
Progress = Callable[[int, str, float], None]
END_SECONDS = 60.0  # `stop` waits no longer, in all, than its children may take and this

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def signals_to(handle: Callable[[int], None]) -> Iterator[None]:
    """Within it those of SIGNALS are handed over, in the main thread.

    SIGINT and SIGHUP stay ignored where they were: that is how `nohup` and a shell's `&` ask to be left running.
    """
    numbers = [n for n in SIGNALS if n == signal.SIGTERM or signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, lambda got, _frame: handle(got)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervisor:
    """Runs engines until `stop`, or for ever.

    Args:
        groups: of each its ranks, rank = place; the first of a group, and each other one that serves, is an engine.
        runtime_dir: see runtime_dir.RuntimeDir.
        address: None binds ipc sockets in the runtime directory; "tcp://HOST[:PORT]" that interface, with CURVE.
        keys: folder of CURVE keys that several hosts share; None makes own ones in the runtime directory.
        limits: how long things may take.
        on_output: called in the supervisor's thread, which it must not block, with a rank's name and each line that it
            prints; these lines go to stderr as well.
        first: number of the first engine, where another supervisor has those before it.
        client_key: public CURVE key of clients that have another deployment's `client.key`.
        make_group: called in the supervisor's thread, as `Group` is.

    Example:
        with Supervisor([[ChildSpec("engine 0", "wavecore.engine_core", config.to_json())]]) as supervisor:
            runtime_dir = supervisor.start()
    """

    def __init__(
        self,
        groups: Sequence[Sequence[ChildSpec]],
        *,
        runtime_dir: str | None = None,
        address: str | None = None,
        keys: str | None = None,
        limits: Limits | None = None,
        on_output: Callable[[str, str], None] | None = None,
        first: int = 0,
        client_key: str = "",
        make_group: Callable[[int, Sequence[ChildSpec], GroupContext], EngineGroup] = Group,
    ) -> None:
        self._specs, self._where, self._address = tuple(groups), runtime_dir, address
        self._keys = None if keys is None else Path(keys).expanduser().absolute()
        self._first, self._client_key, self._make_group = first, client_key, make_group
        self._limits, self._on_output = limits or Limits(), on_output
        self._dir: RuntimeDir | None = None
        self._deployment = Deployment("starting", os.getpid(), (), started=time.time())
        self._written: object = None  # what was written last, and when: another time means that somebody changed it
        self._started = self._warned = False
        self._stops: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()  # drain seconds, the signal's name
        self._phases: queue.SimpleQueue[tuple[int, str, float] | None] = queue.SimpleQueue()  # None: started or failed
        self._failure: WavecoreError | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._waker: Waker | None = None

    @property
    def runtime_dir(self) -> Path | None:
        return self._dir.path if self._dir else None

    def deployment(self) -> Deployment:
        """What the file says now."""
        return self._deployment

    def start(self, progress: Progress | None = None) -> Path:
        """Start every engine and wait until all are ready. Call it once.

        Args:
            progress: called in this thread with (engine, phase, fraction).

        Returns:
            The runtime directory, all that a client needs.

        Raises:
            WavecoreError: the first engine's failure (ModelError, ConfigError, ResourceError, ...), or StartError when
                one ended silently or was not ready in time. Nothing is left behind.
        """
        if self._thread is not None:
            raise StartError("this supervisor was started before; make a new one")
        ranks = [len(specs) for specs in self._specs]
        check_headroom("an engine's supervisor", 19 + 4 * sum(ranks) + max(ranks), 3)
        engines = sum(len(serving_ranks(specs)) for specs in self._specs)
        numbers = range(self._first, self._first + engines)
        sockets = [socket_name(index, end) for index in numbers for end in ("in", "out")]
        keys = ["keys", *(f"keys/{name}" for name in (*curve.KEY_FILES, curve.ALLOW_LIST, curve.GUEST))]
        names = [deployment.FILE, deployment.SCRATCH, *ADMIN_SOCKETS, *(keys if self._address else sockets)]
        self._dir = RuntimeDir(self._where, names)
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, args=(self._dir, self._waker), name="supervisor", daemon=True)
        self._thread.start()
        forks.tell(self)
        atexit.register(self.stop)  # a script that just ends still removes the folder
        try:
            while (phase := self._phases.get()) is not None:
                if progress is not None:
                    progress(*phase)
            if self._failure is not None:
                raise self._failure
        except BaseException:
            self.stop()
            raise
        return self._dir.path

    def request_stop(self, drain: float = 0.0, reason: str = "") -> None:
        """Ask for `stop` without waiting for it; `reason` is logged. May be called from a signal handler."""
        self._stops.put((drain, reason))
        if self._waker is not None:
            self._waker.wake()

    def stop(self, drain: float = 0.0) -> None:
        """End every engine and remove the runtime directory; returns when that is done. Idempotent, from any thread and
        a signal handler.

        Args:
            drain: seconds for running requests to finish, while new ones are refused; 0 ends them now, each with an
                error. A later call with less time shortens an earlier one.
        """
        thread = self._thread
        if thread is None:
            return
        self.request_stop(drain)
        if thread is not threading.current_thread():  # a collector there may have dropped whoever owns this
            thread.join(max(drain, self._limits.drain) + self._limits.grace + END_SECONDS)
        atexit.unregister(self.stop)

    def forked(self) -> None:
        """The child of a fork has this object and not its thread: it may neither end the engines nor wait for that."""
        self._thread = self._waker = None

    def wait(self) -> None:
        """Wait until everything has ended: by `stop`, or because every engine stays down.

        Raises:
            WavecoreError: every engine stays down; the last one's cause.
        """
        self._over.wait()
        if self._failure is not None:
            raise self._failure

    def serve(self, progress: Progress | None = None, on_ready: Callable[[Path], None] | None = None) -> int:
        """Start, then run in the foreground of a program until a signal ends it. Main thread only.

        The first of SIGNALS drains for `limits.drain` seconds, the second ends at once.

        Returns:
            The program's exit code: 0 after SIGTERM or SIGHUP, 130 after SIGINT.

        Raises:
            WavecoreError: as `start` and `wait`; its `exit_code` is the program's.
        """
        received: list[int] = []

        def on_signal(number: int) -> None:
            received.append(number)
            self.request_stop(self._limits.drain if len(received) == 1 else 0.0, SIGNALS[number])

        with signals_to(on_signal):
            try:
                path = self.start(progress)
                if on_ready is not None:
                    on_ready(path)
                self.wait()
            except WavecoreError:
                if not received:
                    raise
            finally:
                self.stop()
        return 130 if signal.SIGINT in received else 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    # --- the supervisor's thread ------------------------------------------------------------------------------------

    def _run(self, folder: RuntimeDir, waker: Waker) -> None:
        output = LineWriter(lambda: sys.stderr)
        with selectors.DefaultSelector() as selector:
            selector.register(waker.fd, selectors.EVENT_READ, waker.clear)
            groups: list[EngineGroup] = []
            try:
                groups = self._make(folder, selector, output)
                self._loop(folder, selector, groups)
            except Exception as error:  # ours or the machine's: no process may stay, and start() must hear of it
                self._failure = self._failure or as_wavecore_error(error)
                if self._started or self._failure is not error:
                    known = self._failure is error
                    logger.error("the supervisor ends, and its engines with it: %s", error, exc_info=not known)
            finally:
                for group in groups:
                    group.destroy()
                folder.remove()
                waker.close()
                self._deployment = replace(self._deployment, state="stopped")
                self._over.set()
                self._phases.put(None)
                output.close()

    def _make(self, folder: RuntimeDir, selector: selectors.BaseSelector, output: LineWriter) -> list[EngineGroup]:
        server_key, keys = "", folder.path / "keys"
        if self._address:
            check_interface(self._address)
            try:
                if self._keys is not None:
                    server_key, kept = curve.lend_keys(self._keys, keys), ["client.key"]
                else:
                    server_key = curve.create_keys(keys, self._client_key)
                    kept = [*curve.KEY_FILES, *([curve.GUEST] if self._client_key else [])]
                folder.keep(*(f"keys/{name}" for name in kept))
            except OSError as error:
                raise ResourceError(f"cannot write the keys in {keys}: {error}; name another runtime_dir") from error
        tell, show = (lambda *phase: self._phases.put(phase)), partial(self._show, output)
        where = folder.path, self._keys or keys, self._address, server_key
        context = GroupContext(*where, self._limits, selector, tell, show)
        firsts = accumulate((len(serving_ranks(specs)) for specs in self._specs), initial=self._first)
        return [self._make_group(first, specs, context) for first, specs in zip(firsts, self._specs, strict=False)]

    def _show(self, output: LineWriter, name: str, line: str) -> None:
        output.put(line)
        if self._on_output is not None:
            self._on_output(name, line)

    def _loop(self, folder: RuntimeDir, selector: selectors.BaseSelector, groups: list[EngineGroup]) -> None:
        for group in groups:
            group.spawn()
        next_tick = time.monotonic() + TICK_SECONDS
        while any(g.state != "stopped" for g in groups):
            self._publish(folder, groups)
            if not self._started and self._deployment.state == "ready":
                self._started = True
                self._phases.put(None)
            if self._is_down(groups) and not self._started:
                return
            for key, _ in selector.select(max(0.0, next_tick - time.monotonic())):
                key.data()
            while not self._stops.empty():
                drain, reason = self._stops.get()
                if reason:  # logged here: a signal handler may have interrupted the log itself
                    logger.warning("stopping%s: %s", "" if drain > 0 else " at once", reason)
                for group in groups:
                    group.stop(drain)
            if time.monotonic() >= next_tick:
                next_tick = time.monotonic() + TICK_SECONDS
                for group in groups:
                    group.tick()
        self._publish(folder, groups)
        if not self._started:
            self._failure = StartError("stopped before every engine was ready")

    def _is_down(self, groups: list[EngineGroup]) -> bool:
        """The first start failed, or every engine stays down: the cause is kept for `start` or `wait`."""
        failure = next((g.failure for g in groups if g.failure is not None), None)
        if failure is None and all(g.state == "failed" for g in groups):
            cause = groups[-1].entries[0].cause
            failure = EngineDead(f"every engine stays down; the last end: {cause.message if cause else 'unknown'}")
        if failure is not None:
            self._failure = failure
            self._over.set()
        return failure is not None

    def _publish(self, folder: RuntimeDir, groups: list[EngineGroup]) -> None:
        """Bring `deployment.json` up to date, and everything around it that somebody removed."""
        engines = tuple(entry for group in groups for entry in group.entries)
        if engines != self._deployment.engines:
            resolved = next((g.resolved for g in groups if g.resolved), {})
            self._deployment = replace(
                self._deployment, state=deployment.overall(engines), engines=engines, resolved=resolved
            )
        file = folder.path / deployment.FILE
        try:
            folder.repair()
            if self._written != (self._deployment, file.exists() and file.stat().st_mtime_ns):
                deployment.write(folder.path, self._deployment)
                self._written = self._deployment, file.stat().st_mtime_ns
            self._warned = False
        except OSError as error:
            if not self._started:
                raise ResourceError(f"cannot write {file}: {error}; make room, or name another runtime_dir") from error
            if not self._warned:  # a full disk is no reason to stop serving; the next tick tries again
                logger.warning("cannot write %s: %s; clients cannot attach until this works again", file, error)
            self._warned = True
