"""Plans steps: one token budget, no phases.

A request has `computed` tokens chasing `length`; a prompt, a chunk of it, a cached prefix and a decode step are one
case. Counters advance when a step is planned and token ids follow when it came back, so a plan never waits for a
token and several steps may be in flight.

Rules: running requests first, best key first; nothing is admitted in a step where somebody had to make room; a request
is admitted only with blocks for its whole sequence. A running request that needs a block takes it from the worst one
behind it; the last in line just skips the step, and so does anybody while blocks are coming free by a transfer. When no
row can run, nobody gains by waiting for transfers: they count as landed, and the device orders what depends on them.
So the first in line always moves, and everything ends.
Knows no device, no socket and no text.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.kv_cache.manager import KVEvents
from wavecore.engine_core.plan import Admission, StepPlan, pairs, table_columns
from wavecore.engine_core.request import Request
from wavecore.engine_core.scheduling.requests import Lifecycle
from wavecore.engine_core.scheduling.step_budget import StepBudget

Rows = npt.NDArray[np.intp]
I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A plan and what `step_update` needs besides: the plan's slots as an index, ends = starts + query_lens."""

    plan: StepPlan
    slots: Rows
    ends: I32
    samples: npt.NDArray[np.bool_]
    events: KVEvents


class Scheduler:
    """Turns the state of the requests into the next step's plan."""

    def __init__(self, config: EngineConfig, life: Lifecycle) -> None:
        self.life = life
        self.budget = StepBudget(config.max_num_batched_tokens)
        self.chunked = config.enable_chunked_prefill
        self.blocked = ""  # why the head of the queue was not admitted by the last plan
        self._admitted: list[Admission] = []
        self._refused: Request | None = None  # the head of the queue found no room of ...
        self._refused_room = 0  # ... so many blocks
        self._made_room_for: Request | None = None  # others were pushed out for it: it may use the reserve

    def schedule(self) -> Scheduled | None:
        """Plan the next step; None when there is nothing to do now. It may hold swaps alone, and no row."""
        self.life.expire()
        rows, lens = self._choose()
        kv = self.life.kv
        if not len(rows) and kv.transfers:
            self.life.land(kv.events.step_id - 1)
            rows, lens = self._choose()
        if not len(rows) and not (kv.events.swap_out or kv.events.swap_in):
            return None
        return self._commit(rows, lens)

    def _choose(self) -> tuple[Rows, I32]:
        """The slots that get a row now, and their query lengths."""
        if self.life.policy.preempts:
            self._admit_urgent()
        rows, lens, left = self._running_rows()
        rows, lens, all_fit = self._grow(rows, lens)
        if all_fit:
            return self._admit(rows, lens, left)
        self.blocked = "a running request had to make room or to skip this step"
        return rows, lens

    # --- running requests -----------------------------------------------------------------------------------------

    def _running_rows(self) -> tuple[Rows, I32, int]:
        """Rows of running requests in key order, their query lengths, and the budget that is left."""
        s = self.life.slots
        rows = s.ordered()
        need = s.length[rows] - s.computed[rows]
        left = self.budget.tokens - int(need.sum())
        if left >= 0:
            return rows, need, left
        decode = need == 1
        room = self.budget.tokens - int(decode.sum())
        if room > 0:  # decode rows first, the rest to prompts, best key first
            lens = np.where(decode, need, _fill(np.where(decode, 0, need), room))
        else:  # a budget cut by lack of memory: by key alone, so that the first in line has a row
            lens = _fill(need, self.budget.tokens)
        chosen = lens > 0
        return rows[chosen], lens[chosen], 0

    def _grow(self, rows: Rows, lens: I32) -> tuple[Rows, I32, bool]:
        """Blocks for the new tokens. False when somebody had to make room or to skip the step."""
        s = self.life.slots
        kv = self.life.kv
        ends = s.computed[rows] + lens
        short = (ends > s.capacity[rows]).nonzero()[0]
        if not len(short):
            return rows, lens, True
        skipped: list[int] = []
        preempted = leaving = False
        for i in short.tolist():
            slot = int(rows[i])
            if not s.runs[slot]:
                continue  # it made room for a better one
            request = s.at(slot)
            while not kv.grow(request, slot, int(ends[i])):
                victim = self._worst()
                leaving = leaving or (victim != slot and kv.leaving > 0)
                if victim == slot or leaving:
                    skipped.append(i)
                    break
                self.life.preempt(victim, f"request {request.handle} needed a block")
                preempted = True
            s.capacity[slot] = len(request.blocks) * kv.block_size
        if not (preempted or skipped):
            return rows, lens, True
        keep = s.runs[rows]
        keep[skipped] = False
        return rows[keep], lens[keep], False

    def _worst(self) -> int:
        """The running slot with the last key; the order may hold some that just made room."""
        s = self.life.slots
        return next(slot for slot in reversed(s.order.tolist()) if s.runs[slot])

    # --- waiting requests -----------------------------------------------------------------------------------------

    def _admit(self, rows: Rows, lens: I32, left: int) -> tuple[Rows, I32]:
        """Waiting requests, in order, as long as budget, slots and blocks last."""
        s = self.life.slots
        new: list[tuple[int, int]] = []
        self.blocked = ""
        while (request := self.life.waiting.peek()) is not None:
            n = len(request.tokens)
            # A request resumed after a preemption may be longer than one step, even with chunked prefill off.
            least = 1 if self.chunked or n > self.budget.tokens else n
            if left < least:
                self.blocked = f"{left} tokens of the step's budget of {self.budget.tokens} were left"
                break
            keep_reserve = self.life.num_running and request is not self._made_room_for
            slot = self._start(request, self.life.kv.watermark if keep_reserve else 0)
            if slot is None:
                break
            if not s.runs[slot]:
                continue  # its blocks must be loaded first
            computed = int(s.computed[slot])
            length = min(n - computed, left)
            left -= length
            new.append((slot, length))
            # A request admitted later in this step may share what this row is about to write.
            self.life.kv.register(request, computed + length)
        if not new:
            return rows, lens
        added = np.array(new, np.int32)
        return np.concatenate((rows, added[:, 0])), np.concatenate((lens, added[:, 1]))

    def _start(self, request: Request, reserve: int) -> int | None:
        life = self.life
        if not life.slots.free:
            self.blocked = f"all {life.slots.num_slots} places (max_num_seqs) are taken"
            return None
        room = life.kv.device.num_free - reserve
        # Looking a long prompt up again in each step would cost; what was refused waits until there is more room.
        again = self._refused is not request or room > self._refused_room
        admission = life.start(request, reserve) if again else None
        if admission is None:
            if again:
                self._refused, self._refused_room = request, room
            self.blocked = (
                f"blocks for {len(request.tokens)} tokens are needed at once; {room + reserve} of "
                f"{life.kv.device.usable} blocks are free, {reserve} of them in reserve"
            )
            return None
        self._refused = self._made_room_for = None
        self._admitted.append(admission)
        return admission.slot

    def _admit_urgent(self) -> None:
        """A request of a better priority class than a running one does not wait for that to end."""
        s = self.life.slots
        while (request := self.life.waiting.peek()) is not None and len(victims := self._outranked(request)):
            if self._start(request, reserve=0) is not None:
                continue
            if not s.free and s.in_flight[~s.runs].any():
                return  # a slot is coming free
            if 0 < self._missing(request) <= self.life.kv.leaving:
                return  # blocks are coming free
            if not self._could_fit(request, victims):
                return  # pushing them all out would not help
            self._made_room_for = request
            cause = f"request {request.handle} of priority {request.options.priority} is more urgent"
            self.life.preempt(int(victims[-1]), cause)

    def _could_fit(self, request: Request, victims: Rows) -> bool:
        """Without the victims there would be blocks for all its tokens."""
        s = self.life.slots
        pool = self.life.kv.device
        missing = self._missing(request)
        if missing * self.life.kv.block_size > int(s.capacity[victims].sum()):
            return False
        held = Counter(block for slot in victims.tolist() for block in s.at(slot).blocks)
        return missing <= sum(pool.refs(block) == count for block, count in held.items())

    def _missing(self, request: Request) -> int:
        """Blocks for its tokens that are not free."""
        return -(-len(request.tokens) // self.life.kv.block_size) - self.life.kv.device.num_free

    def _outranked(self, request: Request) -> Rows:
        """Running slots of a worse priority class and with a worse key, worst last."""
        s = self.life.slots
        rows = s.ordered()
        major = s.major[rows]
        behind = (major > request.major) | ((major == request.major) & (s.minor[rows] > request.minor))
        victims: Rows = rows[behind & (s.priority[rows] > request.options.priority)]
        return victims

    # --- the plan -------------------------------------------------------------------------------------------------

    def _commit(self, rows: Rows, lens: I32) -> Scheduled:
        """Advance the counters and write the plan, rows of one token first."""
        s = self.life.slots
        if (lens > 1).any():
            order = np.argsort(lens > 1, kind="stable")
            rows, lens = rows[order], lens[order]
        starts = s.computed[rows]
        ends = starts + lens
        length = s.length[rows]
        whole = ends == length
        samples = whole & s.samples[rows]
        grown = length + samples
        s.computed[rows] = ends
        s.length[rows] = grown
        s.in_flight[rows] += 1
        for i in s.prefilling[rows].nonzero()[0].tolist():
            self._count_prompt(int(rows[i]), int(lens[i]), int(ends[i]), bool(whole[i]))
        last = whole & ((grown >= s.limit[rows]) | ~samples)
        for slot in rows[last].tolist():
            s.stop(slot)
        events = self.life.kv.take_events()
        admitted, self._admitted = tuple(self._admitted), []
        plan = StepPlan(
            step_id=events.step_id,
            slots=s.order32 if rows is s.order else rows.astype(np.int32),
            starts=starts,
            query_lens=lens,
            samples=samples.view(np.uint8),
            swap_out=pairs(events.swap_out),
            swap_in=pairs(events.swap_in),
            copies=pairs(events.copies),
            admitted=admitted,
            after=self.life.kv.transfers.after,
            **table_columns(events.table),
        )
        self.life.totals.steps += 1
        return Scheduled(plan, rows, ends, samples, events)

    def _count_prompt(self, slot: int, length: int, end: int, whole: bool) -> None:
        """A row of a prompt, or of a resumed sequence, is planned."""
        s = self.life.slots
        request = s.at(slot)
        self.life.totals.prompt_tokens += length
        self.life.kv.register(request, end)
        if whole:
            s.prefilling[slot] = False
            self.life.release_forks(request)


def _fill(need: I32, budget: int) -> I32:
    """What each gets of a budget that is handed out from the front."""
    share: I32 = np.clip(budget - (np.cumsum(need) - need), 0, need).astype(np.int32)
    return share
