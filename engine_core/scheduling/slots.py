"""The state of running requests as numpy columns, one entry a slot.

A steady decode step reads and writes whole columns and never walks requests, so its cost hardly grows with their
number. Variables called `slots` hold numbers of slots, and index these columns; `rows` are rows of a step (see `plan`).
Positions of one sequence in a slot, from left to right:

    0 ... num_prompt ...... known ......... length ....... limit
          |                 |               |              `- ends here, finish reason length
          |                 |               `- exists on the device once the steps in flight are done
          |                 `- token ids that are known here
          computed (anywhere up to length): its KV is computed, or will be by the steps in flight
"""

import numpy as np

from wavecore.engine_core.plan import I32, Index, report_values
from wavecore.engine_core.request import Request

FEW_STOP_IDS = 8


class Slots:
    """Columns [max_num_seqs]; `tokens` is [max_num_seqs, max_len], touched only as far as sequences reach."""

    def __init__(self, max_num_seqs: int, max_len: int) -> None:
        def column() -> I32:
            return np.zeros(max_num_seqs, np.int32)

        self.max_num_seqs = max_num_seqs
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.free = list(range(max_num_seqs - 1, -1, -1))
        self.tokens = np.zeros((max_num_seqs, max_len), np.int32)
        self.computed, self.known, self.length, self.limit = column(), column(), column(), column()
        self.capacity = column()  # tokens that its blocks hold
        self.next_cache = column()  # computed length at which the next block may enter the prefix map
        self.stop_from = column()  # stop ids count from this known length on (min_tokens)
        self.stop_ids = np.full((max_num_seqs, 1), -1, np.int32)
        self.in_flight = column()  # steps launched and not yet processed
        self.client = column()  # a number, see `Requests.clients`
        self.handle = np.zeros(max_num_seqs, np.uint32)
        self.last_token_at = np.zeros(max_num_seqs, np.float64)
        self.major = np.zeros(max_num_seqs, np.float64)
        self.minor = np.zeros(max_num_seqs, np.int64)
        self.priority = column()
        self.prompt_values, self.drawn_values = column(), column()  # `plan.report_values` of a position
        self.live = np.zeros(max_num_seqs, np.bool_)  # its output counts
        self.runs = np.zeros(max_num_seqs, np.bool_)  # it wants rows in further steps
        self.samples = np.zeros(max_num_seqs, np.bool_)
        self.prefilling = np.zeros(max_num_seqs, np.bool_)  # not all tokens known at its start are scheduled yet
        self.first = np.zeros(max_num_seqs, np.bool_)  # nothing was sent to the client yet
        self.order = np.zeros(0, np.intp)  # see `ordered`
        self._changed = True

    def take(self, request: Request, client: int, computed: int, capacity: int) -> int:
        """Give the request a free slot, with `computed` tokens in its blocks."""
        slot, params = self.free.pop(), request.params
        n = len(request.tokens)
        self.requests[slot] = request
        request.slot = slot
        self.tokens[slot, :n] = request.tokens
        self.computed[slot] = computed
        self.known[slot] = self.length[slot] = n
        self.limit[slot] = request.limit
        self.capacity[slot] = capacity
        self.stop_from[slot] = request.num_prompt + params.min_tokens
        self._set_stop_ids(slot, request.stop_ids)
        self.in_flight[slot] = 0
        self.client[slot] = client
        self.handle[slot] = request.handle
        self.major[slot], self.minor[slot] = request.major, request.minor
        self.priority[slot] = request.options.priority
        self.live[slot] = self.runs[slot] = self.prefilling[slot] = True
        self.samples[slot] = request.samples
        self.prompt_values[slot] = report_values(params.prompt_logprobs)
        self.drawn_values[slot] = report_values(params.logprobs)
        self.first[slot] = not request.reported
        self.last_token_at[slot] = request.last_token_at
        self._changed = True
        return slot

    def stop(self, slot: int) -> None:
        """It gets no rows any more."""
        self.runs[slot] = False
        self._changed = True

    def resume(self, slot: int) -> None:
        self.runs[slot] = True
        self._changed = True

    def ordered(self) -> Index:
        """Slots that want rows, best key first; never written to."""
        if self._changed:
            slots = np.flatnonzero(self.runs)
            self.order = slots[np.lexsort((self.minor[slots], self.major[slots]))]
            self._changed = False
        return self.order

    def vacate(self, slot: int) -> None:
        """Free the slot of a request without steps in flight; its known tokens move back into the request."""
        request = self.requests[slot]
        assert request is not None and self.in_flight[slot] == 0, f"slot {slot} is still in use"
        request.tokens = self.tokens[slot, : self.known[slot]].copy()
        request.last_token_at = float(self.last_token_at[slot])
        request.slot = -1
        self.requests[slot] = None
        self.live[slot] = self.runs[slot] = False
        self.free.append(slot)
        width = self.stop_ids.shape[1]
        # Steps compare all columns: those of a request with rarely many go with it.
        if width > FEW_STOP_IDS and len(request.stop_ids) == width:
            width = max((len(other.stop_ids) for other in self.requests if other is not None), default=1)
            self.stop_ids = self.stop_ids[:, : max(width, FEW_STOP_IDS)].copy()

    def at(self, slot: int) -> Request:
        request = self.requests[slot]
        assert request is not None, f"slot {slot} is free"
        return request

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        width = self.stop_ids.shape[1]
        if len(ids) > width:
            wider = np.full((self.max_num_seqs, len(ids)), -1, np.int32)
            wider[:, :width] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(ids)] = ids
