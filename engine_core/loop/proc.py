"""EngineCore as a process: two IO threads, one queue, one list of calls, and the main loop.

    input socket  -> InputPump  -> input_queue                -> run_busy_loop
    output socket <- OutputPump <- calls of OutputPump.put... <- run_busy_loop

The main loop touches no socket. Of the engine's core the IO threads use two things, which change nothing there:
`core.admit` in the input thread, and the load that heartbeats carry in the output thread. Without requests all three
threads sleep, but for a tick of the IO threads each second.
"""

import contextlib
import gc
import logging
import os
import queue
import signal
import time
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from wavecore.engine_core.api.config import MEMORY_ADVICE
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.request import Request
from wavecore.transport.curve import CurveServer
from wavecore.transport.errors import EngineDead, ValidationError, WavecoreError, as_wavecore_error
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.io.input_pump import InputPump
from wavecore.transport.io.io_thread import IoThreadFailed
from wavecore.transport.io.output_pump import ClientGone, OutputPump
from wavecore.transport.processes.child import SupervisedChild
from wavecore.transport.wire.messages import Abort, TensorFrame, Utility

logger = logging.getLogger(__name__)
_NOTHING_RAN_SECONDS = 0.005
_QUIET_SECONDS = 0.01
_CALL_SECONDS = 0.005  # of a turn for utility calls; a longer call is the only one of its turn
_JOIN_SECONDS = 4.0
_BEHIND_BYTES = 32 << 20  # not read by a client that gets no more reports of many alternatives until it has
_BURST_SECONDS, _LOOK_SECONDS = 0.02, 0.0002  # that a request waits for those behind it at most; between two looks


@dataclass(frozen=True, slots=True)
class StopIn:
    """A signal arrived. Put by its handler: SimpleQueue.put may interrupt a put or get of the same thread."""

    drain: bool


class EngineCoreProc:
    """Binds the sockets; `run` serves until a signal or an error ends it.

    Args:
        core: the engine.
        child: this process's tie to its supervisor.
        resolved: goes to clients in READY.
        input_address, output_address: ipc path, or tcp address with a port or :0.
        curve: keys for tcp.
        input_queue: of what comes in; None makes one.
    """

    def __init__(
        self,
        core: EngineCore,
        child: SupervisedChild,
        *,
        resolved: Mapping[str, Any],
        input_address: str,
        output_address: str,
        curve: CurveServer | None,
        input_queue: queue.SimpleQueue[Any] | None = None,
    ) -> None:
        self.core = core
        self.input_queue: queue.SimpleQueue[Any] = queue.SimpleQueue() if input_queue is None else input_queue
        self._child, self._progress = child, child.progress
        self._epoch, self._resolved = os.urandom(16), dict(resolved)  # the epoch names this life of the engine
        self._stop_at: float | None = None  # draining: when the rest is aborted
        self._calls: dict[bytes, deque[Utility]] = {}  # not made yet, by client; the one whose turn it is comes first
        self._updater: bytes | None = None  # the client whose turn it is to change the weights of all engines
        self._complaints = Complaints(logger)
        self._output = OutputPump(
            output_address,
            epoch=self._epoch,
            resolved=self._resolved,
            load=core.requests.load,
            input_queue=self.input_queue,
            curve=curve,
        )
        core.scheduler.is_behind = self._is_behind
        self._input = InputPump(
            input_address, self._output, admit=core.admit, input_queue=self.input_queue, curve=curve
        )

    def run(self) -> None:
        """Serve. SIGTERM finishes what runs, SIGINT ends it at once; either way every request gets its end.

        Raises:
            Exception: whatever broke the engine, after clients and supervisor were told.
        """
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)
        self._input.start()
        self._output.start()
        # The output thread is no helper: when output piles up, the main loop waits for it.
        self._progress.helper(self._input.native_id)
        # What the start allocated lives as long as the process: a full collection need not look at it again.
        gc.collect()
        gc.freeze()
        endpoints = {"input": self._input.endpoint, "output": self._output.endpoint}
        self._child.report_ready({**endpoints, "epoch": self._epoch.hex(), "resolved": self._resolved})
        try:
            self.run_busy_loop()
        except Exception as error:
            cause = self._child.report_failure(error)
            logger.exception("the engine ends: %s", cause.message)
            if self._child.group is None:  # else a peer's death may have broken it, which the supervisor knows
                self._output.put_dead(cause.code, cause.message, cause.phase)
            raise
        finally:
            self._input.stop()
            self._output.stop()
            self._input.join(_JOIN_SECONDS)
            self._output.join(_JOIN_SECONDS)

    def run_busy_loop(self) -> None:
        """Drain the input, make some calls, step, hand out; until stopped and out of work."""
        core, moved = self.core, True
        while not self._is_done:
            self._process_input_queue(moved)
            self._make_calls()
            if not core.has_work or (core.is_idle and not self._is_quiet()):
                continue
            outputs, launched = core.step()
            moved = launched or bool(outputs or core.in_flight)
            if moved:
                self._progress.beat()
            if outputs:
                self._output.put(outputs)

    @property
    def _is_done(self) -> bool:
        return self._stop_at is not None and not self.core.has_work

    def _process_input_queue(self, moved: bool) -> None:
        if not self.core.has_work and not self._calls:
            self._progress.busy(False)
            self._sleep(None)
            self._progress.busy(True)
            self._await_burst()
        elif not moved and not self._calls:  # work that cannot run just now: no reason to spin
            self._sleep(_NOTHING_RAN_SECONDS)
        for _ in range(self.input_queue.qsize()):  # what comes meanwhile waits for the next turn
            self._handle(self.input_queue.get())
        if self._stop_at is not None and time.monotonic() >= self._stop_at:
            self.core.abort_all("engine_dead", "the engine was stopped before this request ended; send it again")

    def _is_behind(self, client_id: bytes) -> bool:
        """It is to read first what it has: else it would lose its requests for all that the engine had to hold."""
        if behind := self._output.held_bytes(client_id) > _BEHIND_BYTES:
            self._progress.beat()  # to wait for a client is no hang
        return behind

    def _sleep(self, seconds: float | None) -> None:
        """Until something came in, or the time is over."""
        with contextlib.suppress(queue.Empty):
            self._handle(self.input_queue.get(timeout=seconds))

    def _is_quiet(self) -> bool:
        """Nothing comes in for a moment. An idle turn may take 50 ms, for which a request that comes now would wait."""
        try:
            self._handle(self.input_queue.get(timeout=_QUIET_SECONDS))
        except queue.Empty:
            return True
        return False

    def _await_burst(self) -> None:
        """Requests that came together begin together. A step of the first few alone would hold up the others by its
        whole length, and be launched slowly, beside an input thread that works."""
        until = time.monotonic() + _BURST_SECONDS
        while self._input.busy and time.monotonic() < until:
            time.sleep(_LOOK_SECONDS)

    def _handle(self, item: Any) -> None:
        match item:
            case Request():
                self.core.add(item)
            case Abort():
                self.core.abort(item.client_id, item.handles)
            case ClientGone():
                self._calls.pop(item.client_id, None)
                if item.client_id == self._updater:
                    self._end_update()
                ended = self.core.abort_client(item.client_id)
                if ended and item.reason:
                    logger.warning("%d requests of client %s end: %s", ended, item.client_id.hex()[:8], item.reason)
            case Utility():
                self._calls.setdefault(item.client_id, deque()).append(item)
            case StopIn():
                self._stop(item)
            case IoThreadFailed():
                raise WavecoreError(f"the {item.thread} failed: {item.error}") from item.error

    def _make_calls(self) -> None:
        """A turn's share of utility calls, one of each client after the other: streams and other callers go on."""
        until = time.monotonic() + _CALL_SECONDS
        while self._calls and time.monotonic() < until:
            client_id = next(iter(self._calls))
            waiting = self._calls.pop(client_id)
            self._call(waiting.popleft())
            if waiting:
                self._calls[client_id] = waiting
            self._progress.beat()

    def _end_update(self) -> None:
        self._updater = None

    def _call(self, item: Utility) -> None:
        value: Any = None
        frames: list[TensorFrame] = []
        try:
            match item.method:
                case "begin_update" if self._updater is not None:  # else each engine could keep another client's
                    raise ValidationError("method", "another update_weights is on its way; try again when it is over")
                case "begin_update":
                    self._updater = item.client_id
                case "end_update":
                    self._end_update()
                case _:
                    value, frames = self.core.utilities.call(item.method, item.args)
        except EngineDead:
            raise
        except WavecoreError as error:
            self._output.put_result(item.client_id, item.call, error=error)
        except Exception as error:  # a failed call fails its caller, not the engine
            self._complaints.add(f"utility call {item.method} failed", traceback.format_exc(), logging.ERROR)
            self._output.put_result(item.client_id, item.call, error=as_wavecore_error(error, MEMORY_ADVICE))
        else:
            self._output.put_result(item.client_id, item.call, value, frames)

    def _stop(self, item: StopIn) -> None:
        self.core.drain()
        limit = time.monotonic() + (self.core.config.shutdown_timeout if item.drain else 0.0)
        self._stop_at = min(limit, self._stop_at or limit)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.input_queue.put(StopIn(drain=number == signal.SIGTERM))
