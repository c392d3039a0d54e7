"""The engine without sockets: requests in, one step at a time, tokens out by client.

The loop is `step`: schedule, dispatch, execute, update. With `depth` 2 the next step is planned and launched before
the last one's tokens are awaited, so the device never waits for the host; a stop token is then seen one step late and
costs one row. Knows no wire and no text; `proc` gives it threads and sockets.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop import utilities
from wavecore.engine_core.loop.admission import check_room, request_from_add
from wavecore.engine_core.loop.recovery import SMALL_STEP, most_demanding
from wavecore.engine_core.loop.stats import Stats
from wavecore.engine_core.plan import OutOfMemory, PendingStep, RequestFault, Runner, StepResult
from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling import integrity, step_output
from wavecore.engine_core.scheduling.requests import Lifecycle
from wavecore.engine_core.scheduling.scheduler import Scheduled, Scheduler
from wavecore.engine_core.scheduling.step_update import update
from wavecore.transport.errors import Overloaded, ValidationError, WavecoreError, from_code
from wavecore.transport.wire.messages import U32, Add, Columns, FinishReason, TensorFrame

logger = logging.getLogger(__name__)


class Counters(NamedTuple):
    """Read by the heartbeat and by load balancing. `tokens` = known to running and waiting requests."""

    steps: int
    running: int
    waiting: int
    tokens: int


class EngineCore:
    """Scheduler and runner of one engine. Everything but `admit` and `counters` belongs to one thread."""

    def __init__(self, config: EngineConfig, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.runner = runner
        self.depth = 2 if config.async_scheduling else 1
        self.life = Lifecycle(config, runner.info, clock)
        self.scheduler = Scheduler(config, self.life)
        self.stats = Stats(self.life, log=config.log_stats)
        self.in_flight: deque[tuple[Scheduled, PendingStep, float]] = deque()
        self.draining = False
        self._done_at = self._token_seconds = 0.0
        self._admitted_reqs = self._admitted_bytes = 0
        self._utilities: dict[str, Callable[..., Any]] = {
            "reset_prefix_cache": self.reset_prefix_cache,
            "check_integrity": self.check_integrity,
            "debug_requests": self.debug_requests,
            "memory_stats": lambda: utilities.memory_stats(self.life, self.runner.memory_stats()),
            "stats": self.stats.report,
            "export_trace": self.stats.trace.chrome,
            "attention_map": self.attention_map,
        }

    # --- requests -------------------------------------------------------------------------------------------------

    def admit(self, add: Add) -> Request:
        """Check and hash a request; called in the input thread, so it only reads counters of the other one.

        Raises:
            Overloaded: the queue is full, or the engine shuts down.
            ValidationError: a value is out of bounds.
        """
        if self.draining:
            raise Overloaded("the engine is shutting down and takes no new requests; try another one")
        request = request_from_add(add, self.runner.info, self.config)
        queued_reqs = self._admitted_reqs - self.life.queued_out_reqs
        queued_bytes = self._admitted_bytes - self.life.queued_out_bytes
        check_room(request, self.config, queued_reqs, queued_bytes)
        self._admitted_reqs += request.params.n
        self._admitted_bytes += request.nbytes
        return request

    def add(self, request: Request) -> None:
        self.life.add(request)

    def abort(self, client: bytes, handles: Sequence[int] | U32) -> None:
        """End these requests with finish reason abort; what ended already is no error."""
        mine = self.life.by_client.get(client, {})
        if len(handles) > len(mine):  # a long list costs what the client has running, not its length
            handles = np.intersect1d(np.asarray(handles, np.uint32), np.array(list(mine), np.uint32))
        for handle in handles:
            request = mine.get(int(handle))
            if request is not None:
                self.life.end(request, FinishReason.ABORT)

    def abort_client(self, client: bytes) -> int:
        """A client is gone: end its requests and tell nobody. Returns how many there were."""
        requests = list(self.life.by_client.get(client, {}).values())
        for request in requests:
            self.life.close(request)
        return len(requests)

    def abort_all(self, code: str, message: str) -> None:
        """End everything with an error; the next `step` hands the ends out."""
        for request in self.life.all():
            self.life.end(request, FinishReason.ERROR, from_code(code, message))

    def drain(self) -> None:
        """Take no new requests; those that are here run on."""
        self.draining = True

    # --- the loop -------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.life.by_client or self.in_flight or self.life.outputs or len(self.life.kv.transfers))

    def step(self) -> tuple[dict[bytes, Columns], bool]:
        """One turn of the loop. Returns the output by client, and whether a step was launched."""
        start = time.perf_counter()
        scheduled = self.scheduler.schedule()
        planned = time.perf_counter()
        launched = self.dispatch(scheduled)
        dispatched = time.perf_counter()
        done = self.execute() if not launched or len(self.in_flight) >= self.depth else None
        executed = time.perf_counter()
        if done is not None:
            update(self.life, *done)
        handed_out = self.life.outputs.take(self.life.clients)
        size = (scheduled.plan.num_rows, scheduled.plan.num_tokens) if scheduled is not None else (0, 0)
        self.stats.turn((start, planned, dispatched, executed, time.perf_counter()), *size)
        return handed_out, launched

    def dispatch(self, scheduled: Scheduled | None) -> bool:
        """Launch the plan, if there is one. Lockstep data parallelism agrees on the step's shape here first."""
        if scheduled is None:
            return False
        try:
            self.in_flight.append((scheduled, self.runner.launch(scheduled.plan), time.perf_counter()))
        except (RequestFault, OutOfMemory) as fault:
            self._recover(fault, scheduled)
        return True

    def execute(self) -> tuple[Scheduled, StepResult] | None:
        """Wait for the oldest step in flight."""
        if not self.in_flight:
            return None
        scheduled, pending, launched = self.in_flight.popleft()
        try:
            result = pending.wait()
        except (RequestFault, OutOfMemory) as fault:
            self._recover(fault, scheduled)
            return None
        if scheduled.plan.num_rows:
            self.scheduler.budget.step_fitted()
        self._measure(scheduled, launched)
        return scheduled, result

    def _measure(self, scheduled: Scheduled, launched: float) -> None:
        """Learn from steps that are mostly prompt what computing a token costs, and so whether swapping pays."""
        now = time.perf_counter()
        seconds, self._done_at = now - max(launched, self._done_at), now
        info, tokens = self.runner.info, scheduled.plan.num_tokens
        if not info.num_host_blocks or not tokens or tokens < 4 * scheduled.plan.num_rows:
            return
        weight = 0.2 if self._token_seconds else 1.0
        self._token_seconds += weight * (seconds / tokens - self._token_seconds)
        self.life.kv.swap_pays = 2 * info.swap_block_seconds <= self._token_seconds * info.block_size

    def _recover(self, fault: RequestFault | OutOfMemory, failed: Scheduled) -> None:
        """A step failed: what is in flight is void. End the request at fault and compute the others again."""
        logger.error("a step failed: %s", fault)
        error: WavecoreError = fault
        if isinstance(fault, RequestFault):
            request = self.life.slots.requests[fault.slot]
        else:
            request, error = self._at_fault(fault, failed)
        void = [failed.events, *(scheduled.events for scheduled, *_ in self.in_flight)]
        self.in_flight.clear()
        self.life.roll_back(void, "a failed step is computed again")
        if request is not None and request.state is not State.ENDED:
            self.life.end(request, FinishReason.ERROR, error)

    def _at_fault(self, fault: OutOfMemory, failed: Scheduled) -> tuple[Request | None, OutOfMemory]:
        """Steps become smaller; who must end, and with which words.

        Nobody, the first time and while steps are large. Then whose rare options need most: a guess. Without such
        options smaller steps go on to be tried, down to one token: that row has failed alone, so it is no guess that
        it cannot run.
        """
        budget, plan = self.scheduler.budget, failed.plan
        if not plan.num_rows:
            return None, fault
        budget.shrink(plan.num_tokens)
        if budget.failures == 1 or plan.num_tokens > SMALL_STEP:
            return None, fault
        rows = [self.life.slots.at(slot) for slot in failed.slots.tolist()]
        if plan.num_tokens == 1:
            return rows[0], fault
        found = most_demanding(
            zip(rows, plan.query_lens.tolist(), failed.samples.tolist(), strict=True), self.runner.info
        )
        if found is None:
            return None, fault
        request, options = found
        return request, OutOfMemory(f"{fault}; of its rows this request's needs most memory, for {options}")

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def counters(self) -> Counters:
        life = self.life
        return Counters(life.totals.steps, life.num_running, len(life.waiting), life.num_tokens)

    def utility(self, method: str, args: Mapping[str, Any]) -> tuple[Any, list[TensorFrame]]:
        """Call one of a closed set of methods by name.

        Raises:
            ValidationError: no such method, or wrong arguments.
        """
        function = self._utilities.get(method)
        if function is None:
            raise ValidationError(
                "method", f"{method!r:.80} is unknown; there are {', '.join(sorted(self._utilities))}"
            )
        try:
            inspect.signature(function).bind(**args)
        except TypeError as error:
            raise ValidationError("args", f"{method}: {error}") from None
        result = function(**args)
        return (None, [result]) if isinstance(result, TensorFrame) else (result, [])

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, for instance after a change of weights."""
        self.life.reset_prefix_cache()
        return True

    def check_integrity(self) -> bool:
        """Recount blocks, slots and queues; AssertionError names the first difference."""
        integrity.check(self.life, [scheduled.events for scheduled, *_ in self.in_flight])
        return True

    def debug_requests(self, limit: int = 1000) -> list[dict[str, Any]]:
        """State, age and reason for waiting of each request, running ones first."""
        if type(limit) is not int or limit < 0:
            raise ValidationError("limit", f"must be a whole number from 0, not {limit!r:.80}")
        return utilities.debug_requests(self.life, self.scheduler.blocked, limit)

    def attention_map(self, prompt: list[int], layer: int, head: int) -> TensorFrame:
        """Attention weights float32 [n, n] of one head over a prompt, computed aside from all requests."""
        return step_output.frame("float32", self.runner.attention_map(prompt, layer, head))

    def shutdown(self) -> None:
        self.in_flight.clear()
        self.runner.shutdown()
