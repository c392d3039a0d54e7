"""`LLM.get_metrics`: what engines count, under vLLM's names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wavecore.frontend.compat import METRICS


@dataclass
class Metric:
    name: str
    labels: dict[str, str]
    value: float


class Counter(Metric):
    """Only grows."""


class Gauge(Metric):
    """As it is now."""


class Vector(Metric):
    """Nothing that is counted here; programs ask whether a metric is one."""


class Histogram(Metric):
    """As `Vector`."""


def read_metrics(stats: Sequence[Mapping[str, Any]]) -> list[Metric]:
    """From `step_stats`, one entry an engine."""
    kinds = ((Counter, METRICS["counters"]), (Gauge, METRICS["gauges"]))
    return [
        kind(f"vllm:{name}", {"engine": str(engine["engine"])}, engine[ours])
        for engine in stats
        for kind, names in kinds
        for name, ours in names.items()
    ]
