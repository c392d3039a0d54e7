"""The engine without sockets: requests in, one step at a time, tokens out by client.

The loop is `step`: schedule, launch, wait, update. With `depth` 2 the next step is planned and launched before the last
one's tokens are awaited, so the device never waits for the host; a stop token is then seen one step late and costs one
row. `proc` gives it threads and sockets; a client's tokens become text in the client.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.admission import check_room, request_from_add
from wavecore.engine_core.loop.recovery import recover
from wavecore.engine_core.loop.stats import Stats
from wavecore.engine_core.loop.utilities import Utilities
from wavecore.engine_core.plan import UPDATE_SECONDS, OutOfMemory, PendingStep, Runner, StepPlan, StepResult
from wavecore.engine_core.request import Request
from wavecore.engine_core.scheduling.pace import Pace
from wavecore.engine_core.scheduling.requests import Requests
from wavecore.engine_core.scheduling.scheduler import Scheduler
from wavecore.engine_core.scheduling.step_update import update
from wavecore.transport.errors import EngineDead, Overloaded, WavecoreError, from_code
from wavecore.transport.wire.messages import U32, Add, FinishReason, StepTokens

CAPTURE_SECONDS, OFTEN = 0.05, 3
"""Beside requests: between two captures, and uses without a graph that are worth one. A capture takes 11 to 22 ms; a
step that is queued kernel by kernel 10 to 14 ms, of which a graph saves 4 to 9."""


class EngineCore:
    """Scheduler and runner of one engine. Everything but `admit` belongs to one thread.

    Args:
        clock: monotonic seconds.
        expect: told, with each launch, about how many seconds the steps in flight will take; 0 for unknown.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        expect: Callable[[float], object] = lambda _: None,
    ) -> None:
        self.config = config
        self.runner = runner
        self.depth = 2 if config.async_scheduling else 1
        self.requests = Requests(config, runner.info, clock)
        self.pace = Pace(config, runner.info)
        self.scheduler = Scheduler(config, self.requests, self.pace, runner.info)
        self.stats = Stats(self.requests, log=config.log_stats)
        self.utilities = Utilities(config, self.requests, self.scheduler, runner, self.stats, self.update_weights)
        self.in_flight: deque[tuple[StepPlan, PendingStep, float]] = deque()
        self.draining = False
        self._clock, self._expect = clock, expect
        self._done_at = self._captured_at = 0.0
        self._admitted_reqs = self._admitted_bytes = 0

    # --- requests -------------------------------------------------------------------------------------------------

    def admit(self, add: Add) -> Request:
        """Check and hash a request; called in the input thread, so it only reads counters of the other one.

        Raises:
            Overloaded: the queue is full, or the engine shuts down.
            ValidationError: a value is out of bounds.
        """
        try:
            return self._admit(add)
        except WavecoreError as error:
            self.requests.histograms.refused[error.code] += 1
            raise

    def _admit(self, add: Add) -> Request:
        if self.draining:
            raise Overloaded("the engine is shutting down and takes no new requests; try another one")
        request = request_from_add(add, self.runner.info, self.config)
        queued_reqs = self._admitted_reqs - self.requests.queued_out_reqs
        queued_bytes = self._admitted_bytes - self.requests.queued_out_bytes
        check_room(request, self.config, queued_reqs, queued_bytes)
        self._admitted_reqs += request.params.n
        self._admitted_bytes += request.nbytes
        return request

    def add(self, request: Request) -> None:
        self.requests.add(request)

    def abort(self, client: bytes, handles: Sequence[int] | U32) -> None:
        """End these requests with finish reason abort; what ended already is no error."""
        mine = self.requests.by_client.get(client, {})
        if len(handles) > len(mine):  # a long list costs what the client has running, not its length
            handles = np.intersect1d(np.asarray(handles, np.uint32), np.array(list(mine), np.uint32))
        for handle in handles:
            request = mine.get(int(handle))
            if request is not None:
                self.requests.end(request, FinishReason.ABORT)

    def abort_client(self, client: bytes) -> int:
        """A client is gone: end its requests and tell nobody. Returns how many there were."""
        mine = list(self.requests.by_client.get(client, {}).values())
        for request in mine:
            self.requests.close(request, FinishReason.ABORT)
        return len(mine)

    def abort_all(self, code: str, message: str) -> None:
        """End everything with an error; the next `step` hands the ends out."""
        for request in self.requests.all():
            self.requests.end(request, FinishReason.ERROR, from_code(code, message))

    def drain(self) -> None:
        """Take no new requests; those that are here run on."""
        self.draining = True

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return not self.is_idle or self._capture_is_due()

    @property
    def is_idle(self) -> bool:
        """Its work, if it has any, is what nobody waits for: a size of steps to meet, or a capture."""
        requests = self.requests
        return not (requests.by_client or self.in_flight or requests.outputs or len(requests.kv.transfers))

    def step(self) -> tuple[dict[bytes, StepTokens], bool]:
        """One turn of the loop. Returns the output by client, and whether a step was launched."""
        start = time.perf_counter()
        plan = self._plan()
        scheduled = time.perf_counter()
        launched_one = self.launch(plan)
        launched = time.perf_counter()
        done = self.wait() if not launched_one or len(self.in_flight) >= self.depth else None
        waited = time.perf_counter()
        if done is not None:
            update(self.requests, *done)
        outputs = self.requests.outputs.take(self.requests.clients)
        size = (plan.num_rows, plan.num_tokens) if plan is not None else (0, 0)
        self.stats.turn((start, scheduled, launched, waited, time.perf_counter()), *size)
        return outputs, launched_one

    def _plan(self) -> StepPlan | None:
        """The next step: what the scheduler says, or a capture once the steps in flight are back."""
        if not self._capture_is_due():
            return self.scheduler.schedule()
        return None if self.in_flight else self._capture()

    def _capture(self) -> StepPlan:
        self._captured_at = self._clock()
        return self.scheduler.capture()

    def _capture_is_due(self) -> bool:
        """Without requests, whatever ran without a graph gets one; beside them, what runs often, now and then."""
        if self.draining:
            return False
        if not self.requests.by_client:
            return self.runner.wants_capture(1)
        return self._clock() >= self._captured_at + CAPTURE_SECONDS and self.runner.wants_capture(OFTEN)

    def launch(self, plan: StepPlan | None) -> bool:
        """Launch the plan, if there is one."""
        if plan is None:
            return False
        self._launch(plan, self.runner.launch)
        return True

    def _launch(self, plan: StepPlan, start: Callable[[StepPlan], PendingStep]) -> None:
        try:
            self.in_flight.append((plan, start(plan), self._clock()))
            self._expect(self.pace.token_seconds * sum(plan.num_tokens for plan, *_ in self.in_flight))
        except OutOfMemory as fault:
            self._recover(fault, plan)

    def wait(self) -> tuple[StepPlan, StepResult] | None:
        """Wait for the oldest step in flight; None if there is none, or it failed."""
        if not self.in_flight:
            return None
        plan, pending, launched = self.in_flight.popleft()
        try:
            result = pending.wait()
        except OutOfMemory as fault:
            self._recover_begun(fault, plan)
            return None
        if plan.num_rows:
            self.scheduler.budget.step_fitted()
            self._measure(plan, launched)
        return plan, result

    def update_weights(self, folder: str) -> None:
        """Load other weights between two steps; requests go on with the KV cache that they have.

        Args:
            folder: see `Runner.update_weights`.

        Raises:
            EngineDead: it failed, perhaps half-way.
        """
        while self.in_flight:
            if (done := self.wait()) is not None:
                update(self.requests, *done)
        self._expect(UPDATE_SECONDS)
        try:
            self.runner.update_weights(folder)
        except Exception as error:
            raise EngineDead(f"the new weights of {folder} are loaded in part: {error}") from error
        self._expect(0.0)
        self.requests.reset_prefix_cache()

    def _recover(self, fault: OutOfMemory, failed: StepPlan) -> None:
        self.in_flight.clear()
        recover(fault, failed, self.requests, self.scheduler.budget, self.runner.info)

    def _recover_begun(self, fault: OutOfMemory, failed: StepPlan) -> None:
        """A step failed that had been launched."""
        self._recover(fault, failed)

    def _measure(self, plan: StepPlan, launched: float) -> None:
        """Learn how long steps take, and from that whether swapping pays."""
        now = self._clock()
        seconds, self._done_at = now - max(launched, self._done_at), now
        self.pace.learn(plan, seconds)
        info, token_seconds = self.runner.info, self.pace.token_seconds
        if info.num_host_blocks and token_seconds:
            self.requests.kv.swap_pays = 2 * info.swap_block_seconds <= token_seconds * info.block_size
