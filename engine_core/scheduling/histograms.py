"""How long requests take and how large they are, counted since the start: histograms as Prometheus has them.

A steady decode step costs one add: all its rows had their last token in the step before, so their gaps are one number.
All times are of the engine's clock, from the moment when a request enters the queue.
"""

import json
from bisect import bisect_left
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from wavecore.engine_core.request import Request
from wavecore.transport.errors import WavecoreError
from wavecore.transport.wire.messages import FinishReason

F64 = npt.NDArray[np.float64]


_TABLE = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
_EDGES = {kind: tuple(map(float, edges)) for kind, edges in _TABLE["edges"].items()}
EDGES: dict[str, tuple[float, ...]] = {name: _EDGES[kind] for name, kind in _TABLE["requests"].items()}
"""Of the histograms of requests, by name."""
PHASE_SECONDS, TOKENS = _EDGES["phase_seconds"], _EDGES["tokens"]


class Histogram:
    """Counts of values between edges.

    Attributes:
        edges: ascending; a value that equals one counts below it.
        counts: one more than edges: the last has no upper edge.
        total: of all values.
    """

    __slots__ = ("counts", "edges", "total")

    def __init__(self, edges: tuple[float, ...]) -> None:
        self.edges = edges
        self.counts = [0] * (len(edges) + 1)
        self.total = 0.0

    def add(self, value: float, count: int = 1) -> None:
        """The same value so often."""
        self.counts[bisect_left(self.edges, value)] += count
        self.total += value * count

    def add_each(self, values: F64) -> None:
        found = np.bincount(np.searchsorted(self.edges, values), minlength=len(self.counts))
        self.counts = [old + new for old, new in zip(self.counts, found.tolist(), strict=True)]
        self.total += float(values.sum())

    def report(self) -> dict[str, Any]:
        """As it travels."""
        return {"edges": list(self.edges), "counts": self.counts.copy(), "sum": self.total}


class RequestHistograms:
    """What `Requests` and `step_update` tell of requests. Each choice counts as a request, but its parameters once.

    Attributes:
        by_name: the histograms, see EDGES.
        ended: choices by finish reason. failed: those of them that ended with an error, by its code.
        refused: requests at the door, by code; written by the input thread.
    """

    def __init__(self) -> None:
        self.by_name = {name: Histogram(edges) for name, edges in EDGES.items()}
        self.ended, self.failed, self.refused = Counter[str](), Counter[str](), Counter[str]()
        self._last_step = 0.0  # when the step before drew its tokens

    def started(self, request: Request) -> None:
        """It has a slot for the first time."""
        self.by_name["request_queue_time_seconds"].add(request.started_at - request.arrival)

    def first_token(self, request: Request) -> None:
        self.by_name["time_to_first_token_seconds"].add(request.first_token_at - request.arrival)
        self.by_name["request_prefill_time_seconds"].add(request.first_token_at - request.started_at)

    def next_tokens(self, before: F64, now: float) -> None:
        """Rows drew a token `now`, and their last one at `before`, float64 [rows]."""
        gaps = self.by_name["inter_token_latency_seconds"]
        if (before == self._last_step).all():
            gaps.add(now - self._last_step, len(before))
        else:
            gaps.add_each(now - before)
        self._last_step = now

    def end(self, request: Request, finish: FinishReason, error: WavecoreError | None) -> None:
        """A request ended; `answered` tells of those that got their answer."""
        self.ended[finish.name.lower()] += 1
        if error is not None:
            self.failed[error.code] += 1
        if request.choice == 0:
            self.by_name["request_params_n"].add(request.params.n)
            if request.params.max_tokens is not None:
                self.by_name["request_params_max_tokens"].add(request.params.max_tokens)

    def answered(self, request: Request, last_token_at: float, num_tokens: int, now: float) -> None:
        """A request ended as it should.

        Args:
            last_token_at: when its last token was drawn; 0 where nothing is.
            num_tokens: of the output.
        """
        self.by_name["e2e_request_latency_seconds"].add(now - request.arrival)
        self.by_name["request_inference_time_seconds"].add(now - request.started_at)
        self.by_name["request_prompt_tokens"].add(request.num_prompt)
        self.by_name["request_generation_tokens"].add(num_tokens)
        decode = last_token_at - request.first_token_at
        if request.first_token_at:
            self.by_name["request_decode_time_seconds"].add(decode)
        if num_tokens > 1:
            self.by_name["request_time_per_output_token_seconds"].add(decode / (num_tokens - 1))
