"""Every request from arrival to end: who is here, in which state, and all moves between states.

    WAITING --start--> RUNNING --close--> ENDED
    WAITING --start--> LOADING --land--> RUNNING (where blocks come from the host)
    FORKING --release_forks--> WAITING (a further choice, once the first one's prompt is computed)
    RUNNING --preempt--> DRAINING --free_slots--> PREEMPTED --start--> RUNNING or LOADING
    any state --end--> ENDED

A slot is kept until the last step in flight with a row of it came back, whatever became of the request; so a plan's
slots always mean the requests they meant when it was written. Blocks are freed at once: plans run one after the other,
so the next owner writes after the last reader; transfers own theirs. What runs when is decided by `scheduler`; results
come through `step_update`.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.kv_cache.manager import NEVER, KVCacheManager
from wavecore.engine_core.plan import NewRequest, RunnerInfo
from wavecore.engine_core.request import Request, State
from wavecore.engine_core.scheduling.histograms import RequestHistograms
from wavecore.engine_core.scheduling.policy import Policy, WaitingQueue
from wavecore.engine_core.scheduling.slots import Slots
from wavecore.engine_core.scheduling.step_output import Outputs
from wavecore.engine_core.scheduling.timers import Timers
from wavecore.transport.errors import RequestTimeout, ValidationError, WavecoreError
from wavecore.transport.wire.messages import FinishReason, Load

logger = logging.getLogger(__name__)

LATE = {
    "timeout": "not done after {age:.3g} s, the request's timeout is {limit} s",
    "queue_timeout": "waited {age:.3g} s for its first step, limit {limit} s: the engine is busy; try again later",
    "first_token_timeout": "no token after {age:.3g} s, first_token_timeout is {limit} s",
    "holding": "held KV blocks for {limit} s, limit max_holding_seconds",
}
"""What a timer of a request may be for, and what is told when it rings."""


@dataclass(slots=True)
class Totals:
    """Counted since the start."""

    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_tokens: int = 0
    finished: int = 0
    waves: int = 0
    dummy_steps: int = 0


class Requests:
    """The requests of one engine and everything they hold: places in the queue, slots, blocks, timers.

    Attributes:
        timers: of (request, one of DEADLINES).
        by_client: the requests that did not end, by client and handle.
        clients: by the number that `slots.client` holds.
        sizes, size: tokens that the requests count for in the load, of each client and of all.
        queued_out_reqs, queued_out_bytes: what left the queue for the first time; they only grow.
    """

    def __init__(self, config: EngineConfig, info: RunnerInfo, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.max_holding = config.max_holding_seconds
        self.policy = Policy(config)
        self.slots = Slots(config.max_num_seqs, info.max_model_len)
        self.kv = KVCacheManager(info, prefix_caching=config.enable_prefix_caching, watermark=config.watermark)
        self.waiting = WaitingQueue()
        self.timers: Timers[tuple[Request, str]] = Timers()
        self.outputs = Outputs()
        self.totals = Totals()
        self.histograms = RequestHistograms()
        self.by_client: dict[bytes, dict[int, Request]] = {}
        self.clients: list[bytes] = []
        self.sizes: Counter[bytes] = Counter()
        self.size = 0
        self.queued_out_reqs = self.queued_out_bytes = 0
        self._number_of: dict[bytes, int] = {}
        self._free_numbers: list[int] = []  # still name their last client, whose last output may be on its way
        self._arrivals = 0

    @property
    def num_running(self) -> int:
        """Slots that are taken."""
        return self.slots.max_num_seqs - len(self.slots.free)

    def load(self, client: bytes) -> Load:
        """What a client is told for balancing. Called by other threads, so it changes nothing."""
        others, waiting = self.size - self.sizes.get(client, 0), len(self.waiting)
        room = (self.kv.device.num_free - self.kv.watermark) * self.kv.block_size - self.waiting.num_tokens
        # At least 0: the numbers may be of different moments.
        return Load(max(0, others), waiting, max(0, room) if waiting < len(self.slots.free) else 0)

    def all(self) -> list[Request]:
        return [request for mine in self.by_client.values() for request in mine.values()]

    # --- arrival --------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request; its further choices wait for its prompt. The same handle twice is one request."""
        mine = self.by_client.get(request.client, {})
        handles = range(request.handle, request.handle + request.params.n)
        if any(handle in mine for handle in handles):
            self._refuse_duplicate(request, [handle for handle in handles if handle not in mine])
            return
        mine = self.by_client.setdefault(request.client, {})
        request.arrival = self.clock()
        for choice in request.choices():
            choice.major = self.policy.major(choice.options.priority, request.arrival)
            choice.minor = self._arrivals
            self._arrivals += 1
            mine[choice.handle] = choice
            self.size += choice.size
            self.sizes[request.client] += choice.size
            for which, seconds in choice.options.deadlines.items():
                self._start_timer(choice, which, seconds)
        if request.client not in self._number_of:
            self._number_of[request.client] = self._new_number(request.client)
        self.waiting.push(request)

    def _refuse_duplicate(self, request: Request, unknown: list[int]) -> None:
        """It came twice, or it claims handles of others: those live on, the ones that are new end at once."""
        self._leaves_queue(request)
        message = f"{request.handle} with n={request.params.n} overlaps a request that is still running"
        error = ValidationError("handle", message)
        for handle in unknown:
            self.outputs.end(request.client, handle, FinishReason.ERROR, _error_extras(error))

    def _new_number(self, client: bytes) -> int:
        if self._free_numbers:
            number = self._free_numbers.pop()
            self.clients[number] = client
            return number
        self.clients.append(client)
        return len(self.clients) - 1

    def _leaves_queue(self, request: Request) -> None:
        """For the first time; what `EngineCore.admit` counts in, this counts out."""
        request.started = True
        if request.choice == 0:
            self.queued_out_reqs += request.params.n
            self.queued_out_bytes += request.nbytes

    def release_forks(self, request: Request) -> None:
        """The prompt is computed, or never will be: the further choices queue up on their own."""
        for fork in request.forks:
            fork.state = State.WAITING
            self.waiting.push(fork)
        request.forks = []

    # --- running --------------------------------------------------------------------------------------------------

    def start(self, request: Request, reserve: int) -> NewRequest | None:
        """Move a waiting request into a free slot, with blocks for all its tokens; None when they are not free.

        Args:
            reserve: blocks that must stay free.
        """
        s = self.slots
        source = request.source if self._may_share(request) else None
        allocated = self.kv.allocate(request, source, reserve)
        if allocated is None:
            return None
        self.waiting.remove(request)
        size = self.kv.block_size
        slot = s.take(request, self._number_of[request.client], allocated.tokens, len(request.blocks) * size)
        first_output_block = (len(request.tokens) // size + 1) * size
        s.next_cache[slot] = first_output_block if self.kv.prefix_caching and not request.stale else NEVER
        self.kv.events.table += [(slot, i, block) for i, block in enumerate(request.blocks)]
        if not request.started:
            request.cached_tokens = 0 if source else allocated.tokens
            request.started_at = self.clock()
            self.histograms.started(request)
            self._leaves_queue(request)
            for choice in (request, *request.forks):  # the request has started, though a fork runs a little later
                self.stop_timer(choice, "queue_timeout")
        self._start_timer(request, "holding", self.max_holding)
        request.source = None
        request.state = State.RUNNING
        if allocated.loading:
            request.state = State.LOADING
            s.stop(slot)
        more = request.choice, request.prompt_embeds, request.options.pooling or ""
        return NewRequest(slot, request.tokens, request.num_prompt, request.params, *more)

    def land(self, step_id: int) -> None:
        """Transfers of plans up to `step_id` are done, or all further plans run behind them: loaded requests run."""
        self._resume(self.kv.transfers.land(step_id))

    def _resume(self, loaded: list[Request]) -> None:
        for request in loaded:
            if request.state is State.LOADING:
                request.state = State.RUNNING
                self.slots.resume(request.slot)

    def _may_share(self, fork: Request) -> bool:
        """Its source still holds the prompt's blocks, and earlier plans compute all of them."""
        source = fork.source
        if source is None or source.stale or source.state is not State.RUNNING:
            return False
        return bool(self.slots.computed[source.slot] >= len(fork.tokens))

    def preempt(self, slot: int, cause: str, may_swap: bool = True) -> None:
        """Take the blocks of a running request; it queues again once the tokens of its steps in flight arrived."""
        s = self.slots
        request = s.at(slot)
        computed = int(s.computed[slot])
        swapped = may_swap and self.kv.swap_out(request, computed)
        if swapped:
            self.totals.swapped_tokens += computed
        else:
            self.totals.recomputed_tokens += computed
            self.kv.free(request)
        self.totals.preemptions += 1
        request.preemptions += 1
        fate = "moved to host memory" if swapped else "lost, but for what the prefix cache keeps"
        logger.info("preempted request %d: %s; %d computed tokens %s", request.handle, cause, computed, fate)
        self.stop_timer(request, "holding")
        self.release_forks(request)
        s.next_cache[slot] = NEVER
        s.stop(slot)
        request.state = State.DRAINING
        if s.in_flight[slot] == 0:
            self._requeue(slot)

    def _requeue(self, slot: int) -> None:
        request = self.slots.at(slot)
        self.slots.vacate(slot)
        request.state = State.PREEMPTED
        self.waiting.push(request)

    def free_slots(self, slots: Iterable[int]) -> None:
        """No step in flight touches these slots any more, and no further one will: requests that gave up theirs, or
        ended, leave them."""
        for slot in slots:
            request = self.slots.requests[slot]
            if request is None:
                continue
            if request.state is State.DRAINING:
                self._requeue(slot)
            elif request.state is State.ENDED:
                self.slots.vacate(slot)

    # --- end ------------------------------------------------------------------------------------------------------

    def end(self, request: Request, finish: FinishReason, error: WavecoreError | None = None) -> None:
        """End a request in any state and tell its client."""
        self.close(request, finish, error)
        self.outputs.end(request.client, request.handle, finish, {} if error is None else _error_extras(error))

    def close(self, request: Request, finish: FinishReason, error: WavecoreError | None = None) -> None:
        """Give back all that it holds. Its steps in flight run on and are ignored."""
        assert request.state is not State.ENDED, "a request ends once"
        self.histograms.end(request, finish, error)
        if finish in (FinishReason.STOP, FinishReason.LENGTH):
            num_tokens = int(self.slots.known[request.slot]) - request.num_prompt - request.options.emitted
            self.histograms.answered(request, float(self.slots.last_token_at[request.slot]), num_tokens, self.clock())
        self._forget(request)
        for which in LATE:
            self.stop_timer(request, which)
        if request.queued:
            self.waiting.remove(request)
        if not request.started:
            self._leaves_queue(request)
        if request.state is State.FORKING:
            assert request.source is not None, "a fork without source"
            request.source.forks.remove(request)
        request.source = None
        self.kv.free(request)
        request.state = State.ENDED
        self.release_forks(request)
        if request.slot >= 0:
            self.slots.live[request.slot] = False
            self.slots.stop(request.slot)
            if self.slots.in_flight[request.slot] == 0:
                self.slots.vacate(request.slot)
        self.totals.finished += 1

    def _forget(self, request: Request) -> None:
        mine = self.by_client[request.client]
        del mine[request.handle]
        self.size -= request.size
        self.sizes[request.client] -= request.size
        if not mine:
            del self.sizes[request.client]
            del self.by_client[request.client]
            self._free_numbers.append(self._number_of.pop(request.client))

    def expire(self) -> None:
        """End requests whose deadline passed."""
        for request, which in self.timers.advance(self.clock()):
            if request.state is State.ENDED:
                continue  # two of its deadlines passed at once
            age = self.clock() - request.arrival
            limit = self.max_holding if which == "holding" else getattr(request.options, which)
            self.end(request, FinishReason.TIMEOUT, RequestTimeout(LATE[which].format(age=age, limit=limit)))

    def _start_timer(self, request: Request, which: str, seconds: float | None) -> None:
        if seconds is not None:
            self.timers.insert(self.clock() + seconds, (request, which))

    def stop_timer(self, request: Request, which: str) -> None:
        self.timers.cancel((request, which))

    # --- everybody ------------------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes; running requests keep their blocks, which stay unshared from now on."""
        self.kv.reset()
        self.slots.next_cache[:] = NEVER
        for request in self.all():
            request.stale = bool(request.blocks)
            if request.host_blocks:
                self.kv.free(request)  # swapped out: computed again

    def roll_back(self, cause: str) -> None:
        """The steps that did not come back never happened: their requests queue again."""
        s = self.slots
        self._resume(self.kv.void())
        self.reset_prefix_cache()
        s.in_flight[:] = 0
        taken = [slot for slot, request in enumerate(s.requests) if request is not None]
        for slot in taken:
            if s.at(slot).state is State.RUNNING:
                self.preempt(slot, cause, may_swap=False)
        self.free_slots(taken)


def _error_extras(error: WavecoreError) -> dict[str, str]:
    return {"code": error.code, "message": str(error)}
