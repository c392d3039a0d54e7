"""Where the time of the loop goes and how the cache and the queue do: for `--log-stats`, `stats` and the trace."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from wavecore.engine_core.loop.trace import PHASES, StepTrace
from wavecore.engine_core.scheduling.requests import Lifecycle

logger = logging.getLogger(__name__)

LOG_SECONDS = 10.0
SCHEDULING_SHARE = 0.15  # schedule and update above this share of a step are worth a warning


class Stats:
    """Sums over turns of the loop since the start and since the last log line."""

    def __init__(self, life: Lifecycle, log: bool) -> None:
        self.trace = StepTrace()
        self._life = life
        self._log = log
        self._seconds = [0.0] * len(PHASES)
        self._logged = self._snapshot()
        self._log_at = 0.0

    def turn(self, times: tuple[float, float, float, float, float], rows: int, tokens: int) -> None:
        """One turn of the loop: its start and the end of each phase, and the size of the step it launched."""
        for i in range(len(PHASES)):
            self._seconds[i] += times[i + 1] - times[i]
        life = self._life
        gauges = (life.num_running, len(life.waiting), life.kv.device.num_free, life.totals.preemptions)
        self.trace.record(*times, rows, tokens, *gauges)
        if self._log and times[-1] >= self._log_at:
            if self._log_at:
                self._write(times[-1])
            self._log_at = times[-1] + LOG_SECONDS

    def report(self) -> dict[str, Any]:
        """Counters since the start, gauges, and the share of each phase in the loop's time."""
        life = self._life
        kv = life.kv
        return {
            **self._snapshot(),
            **self._shares(self._seconds),
            "running": life.num_running,
            "waiting": len(life.waiting),
            "cache_usage": _ratio(kv.device.usable - kv.device.num_free, kv.device.usable),
            "hit_rate": _ratio(kv.hits, kv.queries),
        }

    def _snapshot(self) -> dict[str, float]:
        kv = self._life.kv
        seconds = dict(zip((f"{name}_seconds" for name in PHASES), self._seconds, strict=True))
        return {**asdict(self._life.totals), **seconds, "cache_queries": kv.queries, "cache_hits": kv.hits}

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
        report = self.report()
        logger.info(
            "running %d, waiting %d; %.0f prompt and %.0f output tokens/s; cache %.0f%% used, %.0f%% of prompt tokens "
            "found; %d preemptions; %d steps: %s",
            report["running"],
            report["waiting"],
            gained["prompt_tokens"] / span,
            gained["output_tokens"] / span,
            100 * report["cache_usage"],
            100 * _ratio(gained["cache_hits"], gained["cache_queries"]),
            gained["preemptions"],
            gained["steps"],
            ", ".join(f"{name} {100 * shares[f'{name}_share']:.0f}%" for name in PHASES),
        )
        scheduling = shares["schedule_share"] + shares["update_share"]
        if scheduling > SCHEDULING_SHARE:
            logger.warning("scheduling takes %.0f%% of the loop, more than 15%%: the device waits", 100 * scheduling)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
