"""Plans steps: one token budget, no phases.

A request has `computed` tokens chasing `length`; a prompt, a chunk of it, a cached prefix and a decode step are one
case. Counters advance when a step is planned and token ids follow when it came back, so a plan never waits for a
token and several steps may be in flight.

Rules: running requests first, best key first; no waiting request starts in a step where somebody had to make room; a
request starts only with blocks for its whole sequence. A running request that needs a block takes it from the worst one
behind it; the last in line just skips the step, and so does anybody while blocks are coming free by a transfer. When no
row can run, nobody gains by waiting for transfers: they count as landed, and the device orders what depends on them.
So the first in line always moves, and everything ends.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import Any

import numpy as np

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.plan import I32, TABLES, Index, NewRequest, RunnerInfo, StepPlan, int_table, room_for_many
from wavecore.engine_core.request import Request
from wavecore.engine_core.scheduling.pace import Pace
from wavecore.engine_core.scheduling.requests import Requests
from wavecore.engine_core.scheduling.step_budget import StepBudget


class Reason(Enum):
    """What kept the last plan from starting the head of the queue."""

    NONE = "next_step"
    MEMORY = "memory"
    RUNNING = "running_requests"
    BUDGET = "step_budget"
    SLOTS = "slots"
    BLOCKS = "kv_blocks"


class Scheduler:
    """Turns the state of the requests into the next step's plan.

    Args:
        info: what the runner resolved.

    Attributes:
        is_behind: whether a client has yet to read so much that it gets no more reports of many alternatives for now.
        blocked_by, blocked: why the last plan did not start the head of the queue, and in words; "" where it did.
    """

    def __init__(self, config: EngineConfig, requests: Requests, pace: Pace, info: RunnerInfo) -> None:
        self.requests = requests
        self.is_behind: Callable[[bytes], bool] = lambda _client: False
        self.pace = pace
        self.slots = requests.slots
        self.kv = requests.kv
        self.budget = StepBudget(config.max_num_batched_tokens, requests.clock)
        self.chunked = config.enable_chunked_prefill
        self.blocked_by, self.blocked = Reason.NONE, ""
        self._new_requests: list[NewRequest] = []
        self._room_for_many = self._room_left = room_for_many(info)
        self._refused: Request | None = None  # the head of the queue found no room of ...
        self._refused_room = 0  # ... so many blocks
        self._made_room_for: Request | None = None  # others were pushed out for it: it may use the reserve

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None when there is nothing to do now. It may hold swaps or new requests alone, and no
        row."""
        self.requests.expire()
        if self.budget.paused:
            self._block(Reason.MEMORY, "a step of one token ran out of memory: it is tried again in a moment")
            return None
        slots, lens = self._choose()
        events = self.kv.events
        if not len(slots) and self.kv.transfers:
            self.requests.land(events.step_id - 1)
            slots, lens = self._choose()
        if not len(slots) and not (events.swap_out or events.swap_in or self._new_requests):
            return None
        return self._commit(slots, lens)

    def capture(self) -> StepPlan:
        """A step without rows in which a CUDA graph is captured. No other may be in flight."""
        return replace(self._commit(np.zeros(0, np.intp), np.zeros(0, np.int32)), captures=True)

    def _choose(self) -> tuple[Index, I32]:
        """The slots that get a row now, and the rows' query lengths."""
        if self.requests.policy.preempts:
            self._start_urgent()
        self._room_left = self._room_for_many
        slots, lens, left = self._running()
        if (self.slots.prompt_values | self.slots.drawn_values)[slots].any():
            lens = np.array([*map(self._fit_report, slots.tolist(), lens.tolist())], np.int32)
            slots, lens = slots[lens > 0], lens[lens > 0]
        slots, lens, all_fit = self._grow(slots, lens)
        if all_fit:
            return self._start_waiting(slots, lens, left)
        self._block(Reason.RUNNING, "a running request had to make room or to skip this step")
        return slots, lens

    # --- running requests -----------------------------------------------------------------------------------------

    def _running(self) -> tuple[Index, I32, int]:
        """Slots of running requests in key order, query lengths within the budget, and what is left for prompts."""
        s = self.slots
        slots = s.ordered()
        need = s.length[slots] - s.computed[slots]
        total, num_decode = int(need.sum()), len(need)
        if total > num_decode:
            num_decode = int(np.count_nonzero(need == 1))
        room = min(self.budget.tokens - num_decode, self.pace.prompt_tokens(num_decode > 0))
        left = room - (total - num_decode)
        if left >= 0:
            return slots, need, left
        decode = need == 1
        if num_decode < self.budget.tokens:  # decode rows first, the rest to prompts, best key first
            lens = np.where(decode, need, _fill(np.where(decode, 0, need), room))
        else:  # a budget cut by lack of memory: by key alone, so that the first in line has a row
            lens = _fill(need, self.budget.tokens)
        chosen = lens > 0
        return slots[chosen], lens[chosen], 0

    def _fit_report(self, slot: int, length: int) -> int:
        """How many of a row's tokens run now: as many as the step's output has room for, if they report many
        alternatives, and none while the client has too much to read. What it draws is counted before it is drawn."""
        s, request = self.slots, self.slots.at(slot)
        each, drawn = int(s.prompt_values[slot]), int(s.drawn_values[slot])
        if not each + drawn:
            return length
        each = max(1, each) if s.computed[slot] < request.num_prompt - 1 else 1
        fit = 0 if self.is_behind(request.client) else max(0, min(length, (self._room_left - drawn) // each))
        self._room_left -= fit and fit * each + drawn
        return fit

    def _grow(self, slots: Index, lens: I32) -> tuple[Index, I32, bool]:
        """Blocks for the new tokens. False when somebody had to make room or to skip the step."""
        s, kv = self.slots, self.kv
        ends = s.computed[slots] + lens
        short = (ends > s.capacity[slots]).nonzero()[0]
        if not len(short):
            return slots, lens, True
        skipped: list[int] = []
        preempted = leaving = False
        for row in short.tolist():
            slot = int(slots[row])
            if not s.runs[slot]:
                continue  # it made room for a better one
            request = s.at(slot)
            while not kv.grow(request, slot, int(ends[row])):
                victim = self._worst()
                leaving = leaving or (victim != slot and kv.leaving > 0)
                if victim == slot or leaving:
                    skipped.append(row)
                    break
                self.requests.preempt(victim, f"request {request.handle} needed a block")
                preempted = True
            s.capacity[slot] = len(request.blocks) * kv.block_size
        if not (preempted or skipped):
            return slots, lens, True
        keep = s.runs[slots]
        keep[skipped] = False
        return slots[keep], lens[keep], False

    def _worst(self) -> int:
        """The running slot with the last key; the order may hold some that just made room."""
        return next(slot for slot in reversed(self.slots.order.tolist()) if self.slots.runs[slot])

    # --- waiting requests -----------------------------------------------------------------------------------------

    def _start_waiting(self, slots: Index, lens: I32, left: int) -> tuple[Index, I32]:
        """Waiting requests, in order, as long as budget, slots and blocks last."""
        s = self.slots
        new: list[tuple[int, int]] = []
        self._block(Reason.NONE, "")
        while (request := self.requests.waiting.peek()) is not None:
            n = len(request.tokens)
            # A request resumed after a preemption may be longer than one step, even with chunked prefill off.
            least = 1 if self.chunked or n > self.budget.tokens else n
            if left < least:
                words = f"{left} prompt tokens of the step's budget of {self.budget.tokens} were left"
                self._block(Reason.BUDGET, words)
                break
            keep_reserve = self.requests.num_running and request is not self._made_room_for
            slot = self._start(request, self.kv.watermark if keep_reserve else 0)
            if slot is None:
                break
            if not s.runs[slot]:
                continue  # its blocks must be loaded first
            computed = int(s.computed[slot])
            length = self._fit_report(slot, min(n - computed, left))
            if not length:
                continue  # others of this step report too much
            left -= length
            new.append((slot, length))
            # A request that starts later in this step may share what this row is about to write.
            self.kv.register(request, computed + length)
        if not new:
            return slots, lens
        added = np.array(new, np.int32)
        return np.concatenate((slots, added[:, 0])), np.concatenate((lens, added[:, 1]))

    def _start(self, request: Request, reserve: int) -> int | None:
        """The slot that the request now has; None, and `blocked` says why, while there is no room for it."""
        if not self.slots.free:
            self._block(Reason.SLOTS, f"all {self.slots.max_num_seqs} slots (max_num_seqs) are taken")
            return None
        room = self.kv.device.num_free - reserve
        # Looking a long prompt up again in each step would cost; what was refused waits until there is more room.
        again = self._refused is not request or room > self._refused_room
        new = self.requests.start(request, reserve) if again else None
        if new is None:
            if again:
                self._refused, self._refused_room = request, room
            free = f"{room + reserve} of {self.kv.device.usable} blocks are free, {reserve} of them in reserve"
            self._block(Reason.BLOCKS, f"blocks for {len(request.tokens)} tokens are needed at once; {free}")
            return None
        self._refused = self._made_room_for = None
        self._new_requests.append(new)
        return new.slot

    def _block(self, reason: Reason, words: str) -> None:
        self.blocked_by, self.blocked = reason, words

    def _start_urgent(self) -> None:
        """A request of a better priority class than a running one does not wait for that to end."""
        s = self.slots
        while (request := self.requests.waiting.peek()) is not None and len(victims := self._outranked(request)):
            if self._start(request, reserve=0) is not None:
                continue
            if not s.free and s.in_flight[~s.runs].any():
                return  # a slot is coming free
            if 0 < self._missing(request) <= self.kv.leaving:
                return  # blocks are coming free
            if not self._could_fit(request, victims):
                return  # pushing them all out would not help
            self._made_room_for = request
            cause = f"request {request.handle} of priority {request.options.priority} is more urgent"
            self.requests.preempt(int(victims[-1]), cause)

    def _could_fit(self, request: Request, victims: Index) -> bool:
        """Without the victims there would be blocks for all its tokens."""
        s, pool = self.slots, self.kv.device
        missing = self._missing(request)
        if missing * self.kv.block_size > int(s.capacity[victims].sum()):
            return False
        held = Counter(block for slot in victims.tolist() for block in s.at(slot).blocks)
        return missing <= sum(pool.refs(block) == count for block, count in held.items())

    def _missing(self, request: Request) -> int:
        """Blocks for its tokens that are not free."""
        return -(-len(request.tokens) // self.kv.block_size) - self.kv.device.num_free

    def _outranked(self, request: Request) -> Index:
        """Running slots of a worse priority class and with a worse key, worst last."""
        s = self.slots
        slots = s.ordered()
        major = s.major[slots]
        behind = (major > request.major) | ((major == request.major) & (s.minor[slots] > request.minor))
        victims: Index = slots[behind & (s.priority[slots] > request.options.priority)]
        return victims

    # --- the plan -------------------------------------------------------------------------------------------------

    def _commit(self, slots: Index, lens: I32) -> StepPlan:
        """Advance the counters and write the plan, rows of one token first."""
        s = self.slots
        if (lens > 1).any():
            order = np.argsort(lens > 1, kind="stable")
            slots, lens = slots[order], lens[order]
        starts = s.computed[slots]
        ends = starts + lens
        length = s.length[slots]
        whole = ends == length
        samples = whole & s.samples[slots]
        grown = length + samples
        s.computed[slots] = ends
        s.length[slots] = grown
        s.in_flight[slots] += 1
        for row in s.prefilling[slots].nonzero()[0].tolist():
            self._count_prompt(int(slots[row]), int(lens[row]), int(ends[row]), bool(whole[row]))
        last = whole & ((grown >= s.limit[slots]) | ~samples)
        for slot in slots[last].tolist():
            s.stop(slot)
        events = self.kv.take_events()
        new_requests, self._new_requests = tuple(self._new_requests), []
        self.requests.totals.steps += 1
        tables: dict[str, Any] = {name: int_table(getattr(events, name), width) for name, width in TABLES.items()}
        after = self.kv.transfers.after
        return StepPlan(events.step_id, slots, starts, lens, samples, new_requests, **tables, after=after)

    def _count_prompt(self, slot: int, length: int, end: int, whole: bool) -> None:
        """A row of a prompt, or of a resumed sequence, is planned."""
        request = self.slots.at(slot)
        self.requests.totals.prompt_tokens += length
        self.kv.register(request, end)
        if whole:
            self.slots.prefilling[slot] = False
            self.requests.release_forks(request)


def _fill(need: I32, budget: int) -> I32:
    """What each gets of a budget that is handed out from the front."""
    share: I32 = np.clip(budget - (np.cumsum(need) - need), 0, need).astype(np.int32)
    return share
