"""`LLM.get_metrics`: what engines count, under vLLM's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Metric:
    name: str
    labels: dict[str, str] = field(default_factory=dict)


@dataclass
class Counter(Metric):
    """Only grows."""

    value: int = 0


@dataclass
class Gauge(Metric):
    value: float = 0.0


@dataclass
class Vector(Metric):
    """None of what is counted here is one; programs ask whether a metric is."""

    values: list[int] = field(default_factory=list)


@dataclass
class Histogram(Metric):
    """As `Vector`."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


_COUNTERS = {
    "prompt_tokens": "prompt_tokens",
    "generation_tokens": "output_tokens",
    "num_preemptions": "preemptions",
    "prefix_cache_queries": "cache_queries",
    "prefix_cache_hits": "cache_hits",
    "request_success": "finished",
}
_GAUGES = {"num_requests_running": "running", "num_requests_waiting": "waiting", "kv_cache_usage_perc": "cache_usage"}


def read_metrics(stats: Sequence[dict[str, Any]]) -> list[Metric]:
    """From `step_stats`, one entry an engine."""
    found: list[Metric] = []
    for index, engine in enumerate(stats):
        labels = {"engine": str(index)}
        found += [Counter(f"vllm:{name}", labels, int(engine[ours])) for name, ours in _COUNTERS.items()]
        found += [Gauge(f"vllm:{name}", labels, float(engine[ours])) for name, ours in _GAUGES.items()]
    return found
