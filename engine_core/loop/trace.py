"""Ring buffer of the last turns of the loop, and their export as a Chrome trace (chrome://tracing, Perfetto)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

PHASES = ("schedule", "launch", "wait", "update")
GAUGES = ("rows", "tokens", "running", "waiting", "free_blocks", "preemptions")
MAX_TURNS = 1000


class StepTrace:
    """Costs a turn one row of numbers; the events are made when somebody asks."""

    def __init__(self) -> None:
        self._ring = np.zeros((MAX_TURNS, 1 + len(PHASES) + len(GAUGES)))
        self._count = 0

    def record(self, *values: float) -> None:
        """Start of the turn and end of each phase (seconds of one clock), then the gauges."""
        self._ring[self._count % MAX_TURNS] = values
        self._count += 1

    def last(self) -> npt.NDArray[np.float64]:
        """The values of the latest `record`."""
        row: npt.NDArray[np.float64] = self._ring[(self._count - 1) % MAX_TURNS]
        return row

    def chrome(self) -> dict[str, Any]:
        """{"traceEvents": [...]}: one complete event a phase and one counter event a turn, oldest first."""
        first = max(0, self._count - MAX_TURNS)
        events: list[dict[str, Any]] = []
        for turn in range(first, self._count):
            times = self._ring[turn % MAX_TURNS, : 1 + len(PHASES)] * 1e6
            gauges = dict(zip(GAUGES, self._ring[turn % MAX_TURNS, 1 + len(PHASES) :].tolist(), strict=True))
            common = {"pid": 1, "tid": 1, "cat": "step"}
            for name, start, end in zip(PHASES, times.tolist(), times[1:].tolist(), strict=False):
                event = {"name": name, "ph": "X", "ts": start, "dur": end - start, **common}
                events.append({**event, "args": {"turn": turn, "rows": gauges["rows"], "tokens": gauges["tokens"]}})
            events.append({"name": "load", "ph": "C", "ts": float(times[0]), **common, "args": gauges})
        return {"traceEvents": events, "displayTimeUnit": "ms"}
