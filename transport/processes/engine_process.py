"""One engine's process through its lives: spawned, ready, ended, spawned again after a pause, or given up."""

from __future__ import annotations

import logging
import math
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from wavecore.transport.addresses import engine_ports
from wavecore.transport.errors import ProtocolError, RequestError, StartError, WavecoreError, from_code
from wavecore.transport.processes.child import STACKS_SIGNAL
from wavecore.transport.processes.deployment import Cause, EngineEntry, from_plain, parse_json
from wavecore.transport.processes.process import Child, ChildSpec, LineReader, explain_end
from wavecore.transport.processes.stall import StallWatch
from wavecore.transport.wire.checks import ON_WIRE, table

FORGIVE_SECONDS = 600.0
MAX_FAILED_STARTS = 5
MAX_DELAY = 60.0
_LAST_READS = 64

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds.

    Attributes:
        ready: from spawn to ready, in all.
        drain: for running requests after a first signal.
        step: that one step may compute.
        idle: that a child with work may do nothing at all.
        grace: for a child to end after it was told to, then it is killed.
    """

    ready: float = 600.0
    drain: float = 30.0
    step: float = 60.0
    idle: float = 4.0
    grace: float = 5.0


class Backoff:
    """Delays 1, 2, 4 ... 60 s between the lives of a child, and from 1 s again after a life of FORGIVE_SECONDS.

    A child that was ready is started again however often it ends: requests may be to blame, and each of them has few
    tries. One that fails in MAX_FAILED_STARTS starts in a row stays down.
    """

    def __init__(self) -> None:
        self._last_end, self._delay, self._failed_starts = -math.inf, 1.0, 0

    def ended(self, now: float, was_ready: bool) -> float | None:
        """A life ended at `now` (monotonic seconds); the delay before the next start, None for never."""
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            return None
        delay = 1.0 if now - self._last_end > FORGIVE_SECONDS else self._delay
        delay = min(delay, MAX_DELAY)
        self._last_end, self._delay = now, 2.0 * delay
        return delay


class EngineProcess:
    """Owned by the supervisor's thread.

    Args:
        index: of the engine.
        spec: what to run.
        runtime_dir: folder of the deployment.
        address: None for ipc, or "tcp://HOST", or "tcp://HOST:PORT".
        server_key: CURVE public key, empty on ipc.
        limits: how long things may take.
        selector: gets this child's descriptors, with the method to call as data.
        on_phase: called with (index, phase, fraction) while it starts.
        on_output: called with each line that the child prints.

    Attributes:
        entry: its line of the deployment; replaced, never changed.
        resolved: what the child resolved at start.
        failure: set when the first start failed.
    """

    def __init__(
        self,
        index: int,
        spec: ChildSpec,
        *,
        runtime_dir: Path,
        address: str | None,
        server_key: str,
        limits: Limits,
        selector: selectors.BaseSelector,
        on_phase: Callable[[int, str, float], None],
        on_output: Callable[[str], None],
    ) -> None:
        self.entry = EngineEntry(index, server_key=server_key)
        self.resolved: Mapping[str, Any] = {}
        self.failure: WavecoreError | None = None
        self._spec, self._dir, self._address, self._limits = spec, runtime_dir, address, limits
        self._selector, self._on_phase, self._on_output = selector, on_phase, on_output
        self._backoff = Backoff()
        self._child: Child | None = None
        self._stall: StallWatch | None = None
        self._pipes: tuple[tuple[LineReader, Callable[[str], None]], ...] = ()
        self._known: Cause | None = None  # why it ends: what it said itself, or why the supervisor ends it
        self._phase = "start"
        self._was_ready = self._stopping = False
        self._spawn_at = self._kill_at = self._ready_by = math.inf

    def spawn(self) -> None:
        """Start a life."""
        ours = self.entry
        argv = ["--index", str(ours.index), "--runtime-dir", str(self._dir)]
        argv += ["--input", ours.input or self._bind("in"), "--output", ours.output or self._bind("out")]
        self._spawn_at = self._kill_at = math.inf
        self._known, self._phase = None, "start"
        try:
            child = self._child = Child(self._spec, argv)
        except OSError as error:  # no descriptors, memory or process ids just now
            self._died(Cause("resource", f"{self._spec.name} could not be started: {error}", self._phase))
            return
        self._selector.register(child.pidfd, selectors.EVENT_READ, self._on_end)
        self._pipes = ((LineReader(child.status_fd), self._on_status), (LineReader(child.log_fd), self._on_output))
        for lines, on_line in self._pipes:
            self._selector.register(lines.fd, selectors.EVENT_READ, partial(self._read, lines, on_line))
        self._ready_by = time.monotonic() + self._limits.ready
        self.entry = replace(ours, pid=child.pid, state="restarting" if self._was_ready else "starting")

    def stop(self, drain: float) -> None:
        """End this child, after at most `drain` seconds of finishing its requests; never start it again."""
        self._stopping, self._spawn_at = True, math.inf
        if self._child is None:
            self.entry = replace(self.entry, state="stopped")
        elif self.entry.state not in ("ready", "draining"):
            self._child.kill()  # it is still loading: there is nothing to end in order
        else:
            self._child.signal(signal.SIGTERM if drain > 0 else signal.SIGINT)
            self._kill_at = min(self._kill_at, time.monotonic() + drain + self._limits.grace)
            self.entry = replace(self.entry, state="draining")

    def destroy(self) -> None:
        """End the child, if any, at once."""
        if self._child is not None:
            self._child.kill()
            self._child.reap()
            self._child = None

    def tick(self) -> None:
        """Deadlines and the watch on progress; call it every stall.TICK_SECONDS."""
        now = time.monotonic()
        if self._child is None:
            if now >= self._spawn_at:
                self.entry = replace(self.entry, restarts=self.entry.restarts + 1)
                self.spawn()
        elif self._kill_at < math.inf:
            if now >= self._kill_at:
                self._child.kill()
        elif self._ready_by < math.inf:
            if now >= self._ready_by:
                advice = f"{self._spec.slow_start_advice}, or " if self._spec.slow_start_advice else ""
                reason = f"was not ready after {self._limits.ready:g} s (phase: {self._phase})"
                self._kill_stuck("start", f"{reason}; {advice}see its last output for what it waits for")
        elif self._stall is not None and (stuck := self._stall.tick()):
            self._kill_stuck("stuck", f"was stuck and has been ended: {stuck}")

    def _read(self, lines: LineReader, on_line: Callable[[str], None]) -> None:
        """One of the child's pipes has something to read, or is at its end."""
        if self._child is None or lines.ended:  # the child ended in the same turn of the selector
            return
        for text in lines.read():
            on_line(text)
        if lines.ended:
            self._selector.unregister(lines.fd)

    def _on_end(self) -> None:
        """The child's process is gone."""
        child = self._child
        if child is None:
            return
        child.kill()  # what it started ends with it, and lets go of the pipes
        for lines, on_line in self._pipes:
            for _ in range(_LAST_READS):  # bounded: a stray descendant may go on writing
                self._read(lines, on_line)
            if not lines.ended:
                self._selector.unregister(lines.fd)
        self._selector.unregister(child.pidfd)
        returncode = child.reap()
        self._child = self._stall = None
        self._ready_by = math.inf
        cause = self._cause(child, returncode)
        if self._stopping:
            self.entry = replace(self.entry, state="stopped", cause=cause if returncode else None)
        else:
            self._died(cause)

    def _died(self, cause: Cause) -> None:
        """Plan the next life, or give up."""
        if not self._was_ready:  # `start` raises it
            self.entry = replace(self.entry, state="failed", cause=cause)
            self.failure = _as_error(cause)
            return
        delay = self._backoff.ended(time.monotonic(), was_ready=self._phase == "serve")
        down = f"stays down after {MAX_FAILED_STARTS} failed starts in a row"
        then = down if delay is None else f"is started again in {delay:g} s"
        logger.error("%s ended and %s: %s", self._spec.name, then, cause.message)
        self.entry = replace(self.entry, state="failed" if delay is None else "waiting", cause=cause)
        if cause.phase == "bind" and not cause.signal:  # its port was taken meanwhile: take a new one
            self.entry = replace(self.entry, input="", output="")
        if delay is not None:
            self._spawn_at = time.monotonic() + delay

    def _on_status(self, line: str) -> None:
        try:
            said = parse_json(line)
            if "phase" in said:
                self._phase = str(said["phase"])
                self._on_phase(self.entry.index, self._phase, ON_WIRE.real("", said["fraction"], 0.0, 1.0))
            elif "failed" in said:
                self._known = from_plain(Cause, said["failed"])
            elif "ready" in said and self._child is not None:
                found = from_plain(EngineEntry, {**said["ready"], "index": self.entry.index})
                self.resolved = table(said["ready"]["resolved"])
                self._phase, self._ready_by, self._was_ready = "serve", math.inf, True
                self._stall = StallWatch(self._child.pid, self._child.progress, self._limits.idle, self._limits.step)
                self.entry = replace(
                    self.entry, state="ready", cause=None, epoch=found.epoch, input=found.input, output=found.output
                )
        except (ProtocolError, KeyError, TypeError) as error:  # a child that was killed in the middle of a line, too
            logger.warning("%s said %.200r, which is no status: %s", self._spec.name, line, error)

    def _kill_stuck(self, code: str, reason: str) -> None:
        """Take down the stacks of all threads, then, in the next tick, the process."""
        assert self._child is not None
        message = f"{self._spec.name} (pid {self._child.pid}) {reason}"
        logger.error("%s", message)
        self._known = self._known or Cause(code, message, self._phase)
        self._child.signal(STACKS_SIGNAL)
        self._kill_at = time.monotonic()

    def _cause(self, child: Child, returncode: int | None) -> Cause:
        tail = tuple(self._pipes[1][0].tail)
        cause = self._known
        if cause is None:
            kind = "signal" if returncode and returncode < 0 else "exit"
            message = explain_end(self._spec, child.pid, returncode, tail, child.oom_kills)
            cause = Cause(kind, message, self._phase)
        code = -1 if returncode is None else returncode
        return replace(cause, signal=max(0, -(returncode or 0)), status=max(-1, code), log_tail=tail)

    def _bind(self, which: str) -> str:
        if self._address:
            return engine_ports(self._address, self.entry.index)[which == "out"]
        return f"ipc://{self._dir}/{socket_name(self.entry.index, which)}"


def socket_name(index: int, end: str) -> str:
    """The file of an engine's ipc socket; its ends are "in" and "out"."""
    return f"engine{index}.{end}"


def _as_error(cause: Cause) -> WavecoreError:
    """What `start` raises: the child's own error where it is one of the tree, else a StartError with all that is
    known."""
    where = f" (while: {cause.phase})" if cause.phase else ""
    error = from_code(cause.code, f"{cause.message}{where}")
    if type(error) in (RequestError, WavecoreError):  # "signal", "exit", "internal", ...
        error = StartError(f"{cause.message}{where}")
        error.add_note(cause.traceback or "\n".join(("Its last output:", *cause.log_tail[-20:])))
    return error
