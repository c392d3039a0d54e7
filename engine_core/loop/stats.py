"""Where the time of the loop goes and how the cache and the queue do: for `--log-stats`, `stats`, `metrics`, the trace.

The trace is of the last turns, in the form of Chrome (chrome://tracing, Perfetto).
"""

import logging
from collections import deque
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from wavecore.engine_core.scheduling.histograms import PHASE_SECONDS, TOKENS, Histogram
from wavecore.engine_core.scheduling.requests import Requests

logger = logging.getLogger(__name__)

PHASES = ("schedule", "launch", "wait", "update")
GAUGES = ("rows", "tokens", "running", "waiting", "free_blocks", "preemptions")
MAX_TURNS = 1000
LOG_SECONDS = 10.0


class Stats:
    """Sums over turns of the loop since the start and since the last log line, and the last turns one by one."""

    def __init__(self, requests: Requests, log: bool) -> None:
        self._last = deque[tuple[float, ...]](maxlen=MAX_TURNS)  # times of a turn, then GAUGES
        self._turns = 0
        self._requests = requests
        self._log = log
        if log:
            logger.setLevel(logging.INFO)  # asked for by name, whatever log_level says of the rest
        self._phases = [Histogram(PHASE_SECONDS) for _ in PHASES]
        self._tokens = Histogram(TOKENS)
        self._logged = self._snapshot()
        self._log_at = 0.0

    def turn(self, times: tuple[float, float, float, float, float], rows: int, tokens: int) -> None:
        """One turn of the loop: its start and the end of each phase, and the size of the step it launched."""
        for i in range(len(PHASES)):
            self._phases[i].add(times[i + 1] - times[i])
        if rows:
            self._tokens.add(tokens)
        requests = self._requests
        gauges = (requests.num_running, len(requests.waiting), requests.kv.device.num_free, requests.totals.preemptions)
        self._last.append((*times, rows, tokens, *gauges))
        self._turns += 1
        if self._log and times[-1] >= self._log_at:
            if self._log_at:
                self._write(times[-1])
            self._log_at = times[-1] + LOG_SECONDS

    def report(self) -> dict[str, Any]:
        """Counters since the start, gauges, and the share of each phase in the loop's time."""
        requests = self._requests
        kv = requests.kv
        return {
            **self._snapshot(),
            **self._shares([phase.total for phase in self._phases]),
            "running": requests.num_running,
            "waiting": len(requests.waiting),
            "cache_usage": _ratio(kv.device.usable - kv.device.num_free, kv.device.usable),
            "hit_rate": _ratio(kv.hits, kv.queries),
        }

    def histograms(self) -> dict[str, Any]:
        """Of requests, of the phases of turns, and of steps, by name."""
        phases = {f"step_{name}_seconds": phase for name, phase in zip(PHASES, self._phases, strict=True)}
        every = {**self._requests.histograms.by_name, **phases, "iteration_tokens_total": self._tokens}
        return {name: histogram.report() for name, histogram in every.items()}

    def _snapshot(self) -> dict[str, float]:
        kv = self._requests.kv
        seconds = {f"{name}_seconds": phase.total for name, phase in zip(PHASES, self._phases, strict=True)}
        return {**asdict(self._requests.totals), **seconds, "cache_queries": kv.queries, "cache_hits": kv.hits}

    @staticmethod
    def _shares(seconds: list[float]) -> dict[str, float]:
        return {f"{name}_share": _ratio(part, sum(seconds)) for name, part in zip(PHASES, seconds, strict=True)}

    def _write(self, now: float) -> None:
        before, self._logged = self._logged, self._snapshot()
        gained = {name: value - before[name] for name, value in self._logged.items()}
        if not gained["steps"]:
            return
        span = LOG_SECONDS + now - self._log_at
        shares = self._shares([gained[f"{name}_seconds"] for name in PHASES])
        phases = ", ".join(f"{name} {shares[f'{name}_share']:.0%}" for name in PHASES)
        load = self.report()
        line = (
            f"running {load['running']}, waiting {load['waiting']}; {gained['prompt_tokens'] / span:.0f} prompt and "
            f"{gained['output_tokens'] / span:.0f} output tokens/s; cache {load['cache_usage']:.0%} used, "
            f"{_ratio(gained['cache_hits'], gained['cache_queries']):.0%} of prompt tokens found; "
            f"{gained['preemptions']} preemptions; {gained['steps']} steps: {phases}"
        )
        logger.info("%s", line)

    def chrome_trace(self) -> dict[str, Any]:
        """{"traceEvents": [...]}: one complete event a phase and one counter event a turn, oldest first."""
        events: list[dict[str, Any]] = []
        for turn, numbers in enumerate(self._last, self._turns - len(self._last)):
            times = [1e6 * seconds for seconds in numbers[: 1 + len(PHASES)]]
            gauges = dict(zip(GAUGES, numbers[len(times) :], strict=True))
            common = {"pid": 1, "tid": 1, "cat": "step"}
            for name, (start, end) in zip(PHASES, pairwise(times), strict=True):
                event = {"name": name, "ph": "X", "ts": start, "dur": end - start, **common}
                events.append({**event, "args": {"turn": turn, "rows": gauges["rows"], "tokens": gauges["tokens"]}})
            events.append({"name": "load", "ph": "C", "ts": times[0], **common, "args": gauges})
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
