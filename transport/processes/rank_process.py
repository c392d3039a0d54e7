"""One rank of a group in one life: its process, what it says and prints, and why it ended. When it should end is the
group's business. An API process is the only rank of its group (`frontend/serve/server.py`)."""

from __future__ import annotations

import logging
import math
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from wavecore.transport.errors import ProtocolError
from wavecore.transport.processes.child import STACKS_SIGNAL
from wavecore.transport.processes.deployment import Cause, EngineEntry, RankEntry, from_plain, parse_json
from wavecore.transport.processes.process import Child, ChildSpec, LineReader, explain_end
from wavecore.transport.wire.checks import ON_WIRE, table

_LAST_READS = 64

logger = logging.getLogger(__name__)


class RankProcess:
    """Owned by the supervisor's thread.

    Args:
        rank: in its group.
        spec: what to run.
        selector: gets this child's descriptors, with the method to call as data, until the child has ended.
        on_phase: called with (phase, fraction) while it starts.
        on_change: called with this object when it is ready, says why it fails, or has ended.
        on_output: called with each line that the child prints.

    Raises:
        OSError: no descriptors, memory or process ids just now.

    Attributes:
        child: its process.
        entry: its line of the deployment; replaced, never changed.
        phase: what it is doing.
        since: when it last said so, in seconds of the monotonic clock.
        endpoints: where it listens, and its epoch, as it said when it was ready; None until then.
        resolved: what it resolved at start; of an API process its sessions with engines, which it tells again.
        failed_at: when it said why it fails, in seconds of the monotonic clock; infinity until then.
        reason: why it ends: what it said itself, or why its group ends it; None if it says nothing.
        cause: why it ended; None while it lives.
    """

    def __init__(
        self,
        rank: int,
        spec: ChildSpec,
        *,
        selector: selectors.BaseSelector,
        on_phase: Callable[[str, float], None],
        on_change: Callable[[RankProcess], None],
        on_output: Callable[[str], None],
    ) -> None:
        self.phase = "start"
        self.endpoints: EngineEntry | None = None
        self.resolved: Mapping[str, Any] = {}
        self.failed_at = math.inf
        self.reason: Cause | None = None
        self.cause: Cause | None = None
        self._spec, self._selector, self._on_phase, self._on_change = spec, selector, on_phase, on_change
        self._seconds: dict[str, float] = {}  # of each phase that is over
        self.since = time.monotonic()
        self.child = Child(spec)
        self.entry = RankEntry(rank, self.child.pid, spec.device)
        self._status, self._log = LineReader(self.child.status_fd), LineReader(self.child.log_fd)
        self._pipes = ((self._status, self._on_status), (self._log, on_output))
        selector.register(self.child.pidfd, selectors.EVENT_READ, self._on_end)
        for lines, on_line in self._pipes:
            selector.register(lines.fd, selectors.EVENT_READ, partial(self._on_readable, lines, on_line))

    @property
    def failed(self) -> bool:
        """It has ended, or is about to."""
        return self.reason is not None or self.cause is not None

    def read_status(self) -> None:
        """Take in what it has said, without `on_change`."""
        self._read(self._status, self._on_status)

    def kill(self) -> None:
        """End the process and all that it started; `on_change` tells when that is done. Nothing after the end."""
        if self.cause is None:
            self.child.kill()

    def give_up(self, reason: Cause) -> None:
        """Take down the stacks of all its threads; the group kills it thereafter."""
        self.reason = self.reason or reason
        self.child.signal(STACKS_SIGNAL)

    def reap(self) -> None:
        """Wait for the end of one that was killed; `on_change` does not tell."""
        if self.cause is None:
            self.child.reap()

    def _on_readable(self, lines: LineReader, on_line: Callable[[str], None]) -> None:
        failed, ready = self.failed, self.endpoints
        self._read(lines, on_line)
        if (failed, ready) != (self.failed, self.endpoints):
            self._on_change(self)

    def _read(self, lines: LineReader, on_line: Callable[[str], None]) -> None:
        """A pipe may have something to read, or be at its end."""
        if self.cause is not None or lines.ended:  # the child ended in the same turn of the selector
            return
        for text in lines.read():
            on_line(text)
        if lines.ended:
            self._selector.unregister(lines.fd)

    def _on_end(self) -> None:
        """The process is gone."""
        if self.cause is not None:
            return
        self.child.kill()  # what it started ends with it, and lets go of the pipes
        for lines, on_line in self._pipes:
            for _ in range(_LAST_READS):  # bounded: a stray descendant may go on writing
                self._read(lines, on_line)
            if not lines.ended:
                self._selector.unregister(lines.fd)
        self._selector.unregister(self.child.pidfd)
        self.cause = self._explain(self.child.reap())
        self.entry = replace(self.entry, state="ended")
        self._on_change(self)

    def _explain(self, returncode: int | None) -> Cause:
        tail, cause = tuple(self._log.tail), self.reason
        if cause is None:
            kind = "signal" if returncode and returncode < 0 else "exit"
            message = explain_end(self._spec, self.entry.pid, returncode, tail, self.child.oom_kills)
            cause = Cause(kind, message, self.phase)
        code = -1 if returncode is None else returncode
        signal = max(0, -(returncode or 0))
        return replace(cause, rank=self.entry.rank, signal=signal, status=max(-1, code), log_tail=tail)

    def _on_status(self, line: str) -> None:
        try:
            said = parse_json(line)
            at = ON_WIRE.real("", said["at"], 0.0, math.inf)
            if "phase" in said:
                self._enter(str(said["phase"]), at)
                self._on_phase(self.phase, ON_WIRE.real("", said["fraction"], 0.0, 1.0))
            elif "failed" in said:
                self.failed_at = at
                self.reason = from_plain(Cause, said["failed"])
            elif "ready" in said:
                found = from_plain(EngineEntry, {**said["ready"], "index": 0})
                self.resolved = table(said["ready"]["resolved"])
                # It counts the GPUs that it sees, and so calls its own "cuda:0"; whether it uses one it knows best.
                own = self.resolved.get("device", "")
                device = own if own == "cpu" else self._spec.device or own
                if self.phase != "serve":
                    self._enter("serve", at)
                    parts = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._seconds.items())
                    logger.info("%s was ready after %.2f s: %s", self._spec.name, sum(self._seconds.values()), parts)
                ready = {"device": device, "state": "ready", "seconds": self._seconds}
                self.entry = from_plain(RankEntry, {**asdict(self.entry), **ready})
                self.endpoints = found
        except (ProtocolError, KeyError, TypeError) as error:  # a child that was killed in the middle of a line, too
            logger.warning("%s said %.200r, which is no status: %s", self._spec.name, line, error)

    def _enter(self, phase: str, at: float) -> None:
        """It began with a phase, in which it may have been before."""
        self._seconds[self.phase] = round(self._seconds.get(self.phase, 0.0) + at - self.since, 3)
        self.phase, self.since = phase, at
