"""One engine through its lives: a group of ranks that start, serve and end together.

Rank 0 is the process that clients talk to; the other ranks are its workers. They are one failure domain: when one ends,
fails or is stuck, all are ended at once, and the group starts again as a whole, after a pause, or is given up.

In a lockstep group the first rank of each engine serves clients, and each engine has its own entry in the deployment.
They end together in order, too: when one exits with status 0, the others have a moment to hand out what they have.

Which rank failed *first* decides what is told. Of those that say why they fail it is the earliest. But a process closes
its connections before it counts as ended, by far if it holds much memory, so a peer may complain of a broken connection
before the death that broke it is seen. Therefore who says why gives way to a rank that is ending, or has just ended,
without a word.
"""

import contextlib
import logging
import math
import selectors
import signal
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from wavecore.transport.addresses import engine_ports
from wavecore.transport.errors import WavecoreError
from wavecore.transport.processes import group_memory
from wavecore.transport.processes.deployment import Cause, EngineEntry, RankEntry
from wavecore.transport.processes.process import ChildSpec
from wavecore.transport.processes.rank_process import RankProcess
from wavecore.transport.processes.stall import GroupWatch

FORGIVE_SECONDS = 600.0
MAX_FAILED_STARTS = 5
MAX_DELAY = 60.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds.

    Attributes:
        ready: from spawn to ready, in all.
        drain: for running requests after a first signal.
        step: that one step may compute.
        idle: that a rank with work may do nothing at all.
        grace: for a rank to end after it was told to or has said why it fails; then it is killed.
    """

    ready: float = 600.0
    drain: float = 30.0
    step: float = 60.0
    idle: float = 4.0
    grace: float = 5.0


class Backoff:
    """Delays 1, 2, 4 ... 60 s between the lives of a group, and from 1 s again after a life of FORGIVE_SECONDS.

    A group that was ready is started again however often it ends: requests may be to blame, and each of them has few
    tries. One that fails in MAX_FAILED_STARTS starts in a row stays down.
    """

    def __init__(self) -> None:
        self._last_end, self._delay, self._failed_starts = -math.inf, 1.0, 0

    def plan(self, name: str, cause: Cause, was_ready: bool) -> tuple[float, Mapping[str, Any]]:
        """A life of this engine is over; when the next one starts (monotonic seconds, infinity for never), and what
        becomes of its entries."""
        now = time.monotonic()
        delay = self.ended(now, was_ready)
        down = f"stays down after {MAX_FAILED_STARTS} failed starts in a row"
        then = down if delay is None else f"is started again in {delay:g} s"
        logger.error("%s ended and %s: %s", name, then, cause.message)
        changed = {"state": "failed" if delay is None else "waiting", "cause": cause, "last_cause": cause}
        return math.inf if delay is None else now + delay, changed

    def ended(self, now: float, was_ready: bool) -> float | None:
        """A life ended at `now` (monotonic seconds); the delay before the next start, None for never."""
        self._failed_starts = 0 if was_ready else self._failed_starts + 1
        if self._failed_starts >= MAX_FAILED_STARTS:
            return None
        delay = 1.0 if now - self._last_end > FORGIVE_SECONDS else self._delay
        delay = min(delay, MAX_DELAY)
        self._last_end, self._delay = now, 2.0 * delay
        return delay


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What a supervisor gives all of its groups.

    Attributes:
        runtime_dir: folder of the deployment.
        keys: folder of what `CurveServer` loads, for tcp.
        address: None for ipc, or "tcp://HOST", or "tcp://HOST:PORT".
        server_key: CURVE public key, empty on ipc.
        limits: how long things may take.
        selector: gets descriptors, with the method to call as data.
        on_phase: called with (index, phase, fraction) while ranks that serve start.
        on_output: called with a rank's name and each line that it prints.
    """

    runtime_dir: Path
    keys: Path
    address: str | None
    server_key: str
    limits: Limits
    selector: selectors.BaseSelector
    on_phase: Callable[[int, str, float], None]
    on_output: Callable[[str, str], None]


class EngineGroup(ABC):
    """What a supervisor runs, in its thread: a `Group`, or what stands for one that runs elsewhere.

    Attributes:
        entries: lines of the deployment, one for each rank that serves; replaced, never changed.
        resolved: what rank 0 resolved at start.
        failure: set when the first start failed.
    """

    def __init__(self, entries: tuple[EngineEntry, ...], context: GroupContext) -> None:
        self.entries = entries
        self.failure: WavecoreError | None = None
        self.resolved: Mapping[str, Any] = {}
        self._context, self._limits, self._backoff = context, context.limits, Backoff()
        self._was_ready = self._stopping = False
        self._spawn_at = self._kill_at = self._ready_by = math.inf

    @property
    def state(self) -> str:
        """Of all its entries."""
        return self.entries[0].state

    @abstractmethod
    def spawn(self) -> None:
        """Start a life."""

    @abstractmethod
    def stop(self, drain: float) -> None:
        """End it, after at most `drain` seconds of finishing requests; never start it again."""

    @abstractmethod
    def destroy(self) -> None:
        """End it at once."""

    @abstractmethod
    def tick(self) -> None:
        """Deadlines; call it every stall.TICK_SECONDS."""


class Group(EngineGroup):
    """Ranks on this host.

    Args:
        index: of the engine; of the first one, where several ranks serve.
        specs: what to run, by rank.
    """

    def __init__(self, index: int, specs: Sequence[ChildSpec], context: GroupContext) -> None:
        self._specs, self._serving = tuple(specs), serving_ranks(specs)
        entry = EngineEntry(index, server_key=context.server_key, stage=specs[0].stage)
        super().__init__(tuple(replace(entry, index=index + i) for i in range(len(self._serving))), context)
        self._ranks: list[RankProcess] = []  # of this life, until the next one
        self._watch = GroupWatch([], 0.0, 0.0)  # of this life
        self._first: RankProcess | None = None  # that failed, or ended
        self._is_over = True  # this life is: its cause is told, though ranks may still be on their way out
        self._is_ready = False  # in this life
        self._everywhere: dict[int, RankEntry] = {}  # ranks of all hosts, of an engine that lies on several

    def spawn(self) -> None:
        self._spawn_at = self._kill_at = math.inf
        self._ready_by = time.monotonic() + self._limits.ready
        self._ranks, self._first, self._is_ready, self._is_over = [], None, False, False
        self._everywhere = {}
        try:
            self._spawn_ranks()
        except OSError as error:  # no descriptors, memory or process ids just now
            rank = len(self._ranks)
            self._end_ranks()
            self._died(Cause("resource", f"{self._name(rank)} could not be started: {error}", "start", rank))
        else:
            pages = [(rank.entry.pid, rank.child.progress) for rank in self._ranks]
            self._watch = GroupWatch(pages, self._limits.idle, self._limits.step)
            self._change(state="restarting" if self._was_ready else "starting")

    def stop(self, drain: float) -> None:
        """End all ranks, after at most `drain` seconds of finishing requests; never start them again."""
        self._stopping, self._spawn_at = True, math.inf
        if not self._alive:
            self._change(state="stopped")
        elif self._is_over or self.state not in ("ready", "draining"):
            self._ready_by = math.inf
            self._end_ranks()  # they are still loading: there is nothing to end in order
        else:  # workers go on as long as they are needed
            for rank in self._serving:
                self._ranks[rank].child.signal(signal.SIGTERM if drain > 0 else signal.SIGINT)
            self._kill_at = min(self._kill_at, time.monotonic() + drain + self._limits.grace)
            self._change(state="draining")

    def destroy(self) -> None:
        self._end_ranks()
        for rank in self._ranks:
            rank.reap()

    def tick(self) -> None:
        now = time.monotonic()
        if now >= self._kill_at:
            self._end_ranks()
        if self._is_over:
            if now >= self._spawn_at and not self._alive:
                self._change(restarts=self.entries[0].restarts + 1)
                self.spawn()
        elif self._kill_at < math.inf:
            return
        elif stuck := self._watch.tick():  # one that starts has no work, and so only where it is stopped
            self._give_up(self._ranks[stuck[0]], "stuck", f"was stuck and has been ended: {stuck[1]}")
        elif not self._is_ready and now >= self._ready_by:
            # Those that wait for it came further, so they said something after it
            late = min((rank for rank in self._ranks if rank.endpoints is None), key=lambda rank: rank.since)
            advice = f"{self._specs[0].slow_start_advice}, or " if self._specs[0].slow_start_advice else ""
            reason = f"was not ready after {self._limits.ready:g} s (phase: {late.phase})"
            self._give_up(late, "start", f"{reason}; {advice}see its last output for what it waits for")

    # --- one life -------------------------------------------------------------------------------------------------

    @property
    def _is_alone(self) -> bool:
        """Rank 0 has no workers."""
        return len(self._specs) == 1

    @property
    def _ends_in_order(self) -> bool:
        """The first rank to end served clients, and had nothing left to do."""
        first = self._first
        if first is None or first.cause is None or self._ranks.index(first) not in self._serving:
            return False
        return first.cause.status == 0

    @property
    def _alive(self) -> bool:
        return any(rank.cause is None for rank in self._ranks)

    def _spawn_ranks(self) -> None:
        with contextlib.ExitStack() as until_spawned:
            shared = [] if self._is_alone else group_memory.create(len(self._specs), until_spawned)
            for rank, spec in enumerate(self._specs):
                entry = self._entry_of(rank)
                words = [*spec.argv, *self._argv(entry), *([] if self._is_alone else ["--rank", str(rank)])]
                rank_process = RankProcess(
                    self._specs[0].first_rank + rank,
                    replace(spec, name=self._name(rank), argv=words, fds=[*spec.fds, *shared]),
                    selector=self._context.selector,
                    on_phase=partial(self._context.on_phase, entry.index) if rank in self._serving else lambda *_: None,
                    on_change=self._on_change,
                    on_output=partial(self._context.on_output, self._name(rank)),
                )
                self._ranks.append(rank_process)

    def _argv(self, entry: EngineEntry) -> list[str]:
        """What tells a rank which engine it is of, and where that listens."""
        argv = ["--index", str(entry.index), "--keys", str(self._context.keys)]
        argv += ["--input", entry.input or self._bind(entry.index, "in")]
        return [*argv, "--output", entry.output or self._bind(entry.index, "out")]

    def _entry_of(self, rank: int) -> EngineEntry:
        """Of the rank itself, or of the engine whose worker it is."""
        return self.entries[bisect_right(self._serving, rank) - 1]

    def _on_change(self, rank: RankProcess) -> None:
        """A rank is ready, says why it fails, or has ended."""
        starts = not (self._is_ready or self._first or self._is_over or self._stopping)
        if starts and all(r.endpoints for r in self._ranks):
            self._serve()
        if self._first is None and not self._is_over and rank.failed:
            self._first = self._failed_first(rank)
            for number, other in enumerate(self._ranks):
                if other is not self._first and not (self._ends_in_order and number in self._serving):
                    other.kill()
            self._kill_at = min(self._kill_at, time.monotonic() + self._limits.grace)
        leaving = self._ends_in_order and any(self._ranks[number].cause is None for number in self._serving)
        if self._first is not None and not leaving:
            self._tell(self._first)
        self._change(state="stopped" if self._stopping and not self._alive else self.state)

    def _serve(self) -> None:
        """All ranks are ready."""
        self.resolved = self._ranks[0].resolved
        self._is_ready = self._was_ready = True
        said = [self._ranks[rank].endpoints for rank in self._serving]
        self._everywhere = {rank.rank: rank for its in said if its is not None for rank in its.ranks}
        self.entries = tuple(
            replace(entry, epoch=its.epoch, input=its.input, output=its.output)
            for entry, its in zip(self.entries, said, strict=True)
            if its is not None
        )
        self._change(state="ready", cause=None)

    def _failed_first(self, rank: RankProcess) -> RankProcess:
        """Who failed first when this is the first rank of which we hear; see the head of this file."""
        if rank.reason is None:
            return rank
        for each in self._ranks:
            each.read_status()
        silent = (each for each in self._ranks if each.reason is None and each.child.is_ending)
        return next(silent, min(self._ranks, key=lambda each: each.failed_at))

    def _tell(self, first: RankProcess) -> None:
        """Why this life is over, as soon as that is known, and again when it is also known how that rank ended."""
        early = first.failed_at < math.inf and not self._is_alone  # who is alone tells its clients itself
        cause = first.reason if early and first.cause is None else first.cause
        if cause is None:
            return
        says_who = self._is_alone or cause.traceback  # what a rank reports itself does
        cause = cause if says_who else cause.located()
        if not self._is_over:
            self._died(cause)
        elif self.entries[0].cause is not None:
            self._change(cause=cause)

    def _give_up(self, rank: RankProcess, code: str, reason: str) -> None:
        """Take down the stacks of all ranks, then, in the next tick, end them."""
        message = f"{self._name(self._ranks.index(rank))} (pid {rank.entry.pid}) {reason}"
        logger.error("%s", message)
        self._first, self._kill_at = rank, time.monotonic()
        for each in self._ranks:
            each.give_up(Cause(code, message, rank.phase))

    def _end_ranks(self) -> None:
        for rank in self._ranks:
            rank.kill()

    def _died(self, cause: Cause) -> None:
        """This life is over. Plan the next one, or give up."""
        self._is_over, self._ready_by, self._everywhere = True, math.inf, {}
        if self._stopping:
            in_order = cause.code == "exit" and cause.status <= 0
            self._change(cause=None if in_order else cause)
            return
        if not self._was_ready:  # `start` raises it
            self._change(state="failed", cause=cause)
            who = f"{self._specs[0].name}: " if self._specs[0].stage else ""
            self.failure = (cause.located(who) if self._is_alone else cause).as_error()
            return
        self._spawn_at, changed = self._backoff.plan(self._specs[0].name, cause, self._is_ready)
        self._change(**changed)
        if cause.phase == "bind" and not cause.signal:  # its port was taken meanwhile: take a new one
            self._change(input="", output="")

    # --- words ----------------------------------------------------------------------------------------------------

    def _change(self, **values: Any) -> None:
        """Bring all entries up to date, with these values in each."""
        ranks = tuple(rank.entry for rank in self._ranks)
        of_each = [ranks[first:end] for first, end in pairwise([*self._serving, len(self._specs)])]
        self.entries = tuple(
            replace(entry, pid=own[0].pid if own else entry.pid, ranks=self._with_others(own), **values)
            for entry, own in zip(self.entries, of_each, strict=True)
        )

    def _with_others(self, own: tuple[RankEntry, ...]) -> tuple[RankEntry, ...]:
        """And those of other hosts, if there are any."""
        if not (known := self._everywhere):
            return own
        here = {rank.rank: replace(rank, host=known[rank.rank].host) for rank in own}
        return tuple((known | here).values())

    def _name(self, rank: int) -> str:
        name, first = self._specs[rank].name, self._specs[0].first_rank
        return f"{name} rank {first + rank}" if first or not self._is_alone else name

    def _bind(self, index: int, which: str) -> str:
        if self._context.address:
            return engine_ports(self._context.address, index)[which == "out"]
        return f"ipc://{self._context.runtime_dir}/{socket_name(index, which)}"


def serving_ranks(specs: Sequence[ChildSpec]) -> list[int]:
    """Those of a group that clients connect to."""
    return [rank for rank, spec in enumerate(specs) if rank == 0 or spec.serves]


def socket_name(index: int, end: str) -> str:
    """The file of an engine's ipc socket; its ends are "in" and "out"."""
    return f"engine{index}.{end}"
