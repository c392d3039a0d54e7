"""What a scrape of `/metrics` shows: the engines' numbers, and those of this API process.

The engines' are fetched each second (`refresh`) and a scrape is answered from memory, with their age: it never waits
for an engine. `metrics.json` names them, and as vLLM does where the same is meant, so that its dashboards and routers
(llm-d's picker, the inference gateway of Kubernetes) find what they look for: "model server protocol" at
https://gateway-api-inference-extension.sigs.k8s.io.
"""

import asyncio
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from wavecore.frontend.client.client import EngineClient
from wavecore.transport.errors import WavecoreError
from wavecore.transport.io.complaints import Complaints
from wavecore.transport.processes.deployment import EngineEntry
from wavecore.transport.processes.places import read_place
from wavecore.transport.wire.messages import Result

logger = logging.getLogger(__name__)

ROWS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("metrics.json").read_text("utf-8"))
"""Kind -> metrics. `key`: of the utility `metrics`, "KEY.KEY" in a mapping. `name`, `vllm`: ours and vLLM's, where it
has one. `label`: of a mapping, what its keys are; `known` ones are shown from the start."""
FACTS = ROWS.pop("facts")
"""What no engine has counted: `key`: of `Metrics._facts`."""
KINDS = {"counters": CounterMetricFamily, "gauges": GaugeMetricFamily, "histograms": HistogramMetricFamily}
PREFIXES = {"name": "wavecore_", "vllm": "vllm:"}
LABELS = ("model_name", "engine")
CACHE = ("block_size", "num_blocks", "num_host_blocks")  # of what an engine resolved
HTTP_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
THRESHOLDS = {"kv_cache_usage": 0.95, "queue_usage": 0.8, "age_seconds": 5.0}
"""What is above them is shown and logged."""
REFRESH_SECONDS = 1.0
CALL_SECONDS = 10.0
CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
"""Whatever a scraper would rather have: in OpenMetrics prometheus-client 0.26 writes `vllm_` for `vllm:`."""


class _Families(Collector):
    """Metrics that are there already, as prometheus-client takes them."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


class Metrics(Collector):
    """One of each API process; a collector of prometheus-client's.

    Args:
        client: of all engines.
        model_name: label of every number of an engine.
        api_server: number of this process, a label of what it counts itself.
        vllm: show vLLM's names, too.
    """

    def __init__(self, client: EngineClient, model_name: str, api_server: int = 0, vllm: bool = True) -> None:
        self._client, self._model_name = client, model_name
        self._prefixes = {key: prefix for key, prefix in PREFIXES.items() if vllm or key != "vllm"}
        self._reports: dict[int, tuple[float, dict[str, Any]]] = {}  # when, monotonic seconds; and what was said
        self._asked: set[int] = set()
        self._entries: list[EngineEntry] = []
        self._complaints = Complaints(logger)
        self._http = registry = CollectorRegistry(auto_describe=False)
        self._own = {"api_server": str(api_server)}
        names = ["api_server", "route", "status"]
        self._answers = Counter("wavecore_http_requests", "Answers.", names, registry=registry)
        self._seconds = Histogram(
            "wavecore_http_request_seconds", "Of whole answers.", names[:2], registry=registry, buckets=HTTP_SECONDS
        )
        in_flight = Gauge("wavecore_http_requests_in_flight", "Begun, not ended.", names[:1], registry=registry)
        self.in_flight = in_flight.labels(**self._own)

    async def run(self) -> None:
        """Refresh each second, until cancelled."""
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_SECONDS)

    def refresh(self) -> None:
        """Ask every engine that owes no answer; waits for none. Log what is above its threshold."""
        with suppress(WavecoreError):  # gone, or just being written
            self._entries = [entry for place in self._client.places for entry in read_place(place).engines]
        for index in set(self._client.engines) - self._asked:
            with suppress(WavecoreError):  # it has just ended
                call = self._client.call("metrics", engine=index, timeout=CALL_SECONDS)
                self._asked.add(index)
                call.add_done_callback(partial(self._keep, index))
        for index, numbers in self._numbers():
            for name in (name for name, is_above in numbers["exceeded"].items() if is_above):
                self._complaints.add(f"engine {index}: {name} is above {THRESHOLDS[name]}", "see /metrics")

    def _keep(self, index: int, call: Future[Result]) -> None:
        if call.exception() is None:
            self._reports[index] = time.monotonic(), call.result().value
        self._asked.discard(index)

    def _numbers(self) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Of the engines that take requests; what others said last would mislead a router."""
        queue, up = int(self._client.resolved.get("max_num_queued_reqs", 1)), self._client.engines
        for index, (taken, report) in sorted(self._reports.copy().items()):
            age = time.monotonic() - taken
            values = (report["cache_usage"], report["waiting"] / queue, age)
            if index in up:
                limits = zip(THRESHOLDS.items(), values, strict=True)
                exceeded = {name: value > limit for (name, limit), value in limits}
                yield index, {**report, "age_seconds": age, "exceeded": exceeded}

    def served(self, route: str, status: int, seconds: float) -> None:
        """An answer has ended."""
        self._answers.labels(**self._own, route=route, status=str(status)).inc()
        self._seconds.labels(**self._own, route=route).observe(seconds)

    # --- a scrape -------------------------------------------------------------------------------------------------

    def http(self) -> str:
        """What this process has counted of HTTP."""
        return generate_latest(self._http).decode()

    def exposition(self, others: Sequence[str] = ()) -> bytes:
        """The body of an answer, of CONTENT_TYPE. Takes milliseconds; in any thread.

        Args:
            others: what `http` gives in the other API processes.
        """
        families: dict[str, Metric] = {}
        for text in (self.http(), *others):
            for family in text_string_to_metric_families(text):
                families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                families[family.name].samples += family.samples
        return generate_latest(self) + generate_latest(_Families(families.values()))

    def collect(self) -> Iterator[Metric]:
        """For prometheus-client."""
        engines = list(self._numbers())
        for kind, rows in ROWS.items():
            for row in rows:
                samples = [sample for index, numbers in engines for sample in self._samples(row, index, numbers)]
                labels = (*LABELS, *([row["label"]] if "label" in row else []))
                yield from self._spelled(KINDS[kind], row, labels, samples)
        yield from self._facts()

    def _samples(self, row: Mapping[str, Any], index: int, numbers: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
        """Values of labels, and what to add."""
        outer, _, inner = row["key"].partition(".")
        value, labels = numbers[outer], (self._model_name, str(index))
        if "label" in row:
            for key, count in {**dict.fromkeys(row.get("known", ()), 0), **value}.items():
                yield (*labels, key), (count,)
        elif outer == "histograms":
            yield labels, (_buckets(value[inner]), value[inner]["sum"])
        else:
            yield labels, (value.get(inner, 0) if inner else value,)

    def _spelled(
        self, family: Any, row: Mapping[str, Any], labels: Sequence[str], samples: Iterable[tuple[Any, Any]]
    ) -> Iterator[Metric]:
        for key, prefix in self._prefixes.items():
            if key in row:
                metric = family(prefix + row[key], row["about"], labels=labels)
                for values, added in samples:
                    metric.add_metric(values, *added)
                yield metric

    def _facts(self) -> Iterator[Metric]:
        up, model = self._client.engines, self._model_name
        cache = [str(self._client.resolved[name]) for name in CACHE]
        samples: dict[str, list[tuple[Any, Any]]] = {
            "up": [((model, str(entry.index)), (entry.index in up,)) for entry in self._entries],
            "restarts": [((model, str(entry.index)), (entry.restarts,)) for entry in self._entries],
            "thresholds": [([name], (limit,)) for name, limit in THRESHOLDS.items()],
            "cache": [((model, str(index), *cache), (1,)) for index in up],
            "adapters": [(("0", "", ""), (time.time(),))],  # a router that asks for them wants an answer
        }
        for row in FACTS:
            yield from self._spelled(KINDS[row["kind"]], row, row["labels"], samples[row["key"]])


def _buckets(histogram: Mapping[str, Any]) -> list[tuple[str, int]]:
    edges = [*map(str, histogram["edges"]), "+Inf"]
    return list(zip(edges, accumulate(histogram["counts"]), strict=True))
