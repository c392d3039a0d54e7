"""A scrape, as Prometheus and routers read it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.scripted_model import write_model
from tests.support.waiting import until

from wavecore import LLM, SamplingParams
from wavecore.frontend.serve import metrics
from wavecore.frontend.serve.metrics import Metrics
from wavecore.transport.processes import deployment

DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana.json"
PARAMS = SamplingParams(max_tokens=9, ignore_eos=True)
# What vLLM's dashboards read, and the picker of llm-d and the gateway of Kubernetes.
VLLM_COUNTERS = """prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens generation_tokens
    request_success corrupted_requests admission_rejections"""
VLLM_GAUGES = "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info lora_requests_info"
VLLM_HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
    e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_inference_time_seconds request_prompt_tokens request_generation_tokens iteration_tokens_total
    request_params_n request_params_max_tokens"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(**write_model(tmp_path_factory.mktemp("model")), max_num_seqs=4) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}] * 10, PARAMS, use_tqdm=False)
        yield llm


def fetched(llm: LLM, **options: Any) -> Metrics:
    """With the numbers of now."""
    found = Metrics(llm._service.client, "some-model", **options)
    found.refresh()
    until(lambda: found._reports, "an answer")
    return found


def families(body: bytes) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(body.decode())}


def value(found: dict[str, Any], name: str, **labels: str) -> float:
    family = name.removesuffix("_total").removesuffix("_count").removesuffix("_sum")
    samples = [s for s in found[family].samples if s.name == name and labels.items() <= s.labels.items()]
    assert len(samples) == 1, f"{name}: {samples}"
    return float(samples[0].value)


def test_names_of_vllm(llm: LLM) -> None:
    found = families(fetched(llm).exposition())
    for names, kind in ((VLLM_COUNTERS, "counter"), (VLLM_GAUGES, "gauge"), (VLLM_HISTOGRAMS, "histogram")):
        for name in names.split():
            assert found[f"vllm:{name}"].type == kind, name
    stats = llm.step_stats()[0]
    labels = {"model_name": "some-model", "engine": "0"}
    for prefix in ("vllm:", "wavecore_"):
        assert value(found, f"{prefix}generation_tokens_total", **labels) == stats["output_tokens"] == 90
        assert value(found, f"{prefix}prompt_tokens_total", **labels) == 30
        assert value(found, f"{prefix}num_requests_waiting", **labels) == 0
        assert value(found, f"{prefix}kv_cache_usage_perc", **labels) == 0
        assert value(found, f"{prefix}time_to_first_token_seconds_count", **labels) == 10
        assert value(found, f"{prefix}inter_token_latency_seconds_count", **labels) == 80
        assert value(found, f"{prefix}request_generation_tokens_sum", **labels) == 90
        cache = value(found, f"{prefix}cache_config_info", **labels, block_size="16", num_gpu_blocks="1024")
        assert cache == 1
    assert value(found, "vllm:request_success_total", finished_reason="length", **labels) == 10
    assert value(found, "vllm:request_success_total", finished_reason="stop", **labels) == 0
    assert value(found, "wavecore_engine_up", **labels) == 1 and value(found, "wavecore_engine_restarts_total") == 0
    assert value(found, "wavecore_requests_refused_total", code="overloaded") == 0
    assert 0 <= value(found, "wavecore_metrics_age_seconds") < 60


def test_buckets_add_up(llm: LLM) -> None:
    for family in families(fetched(llm).exposition()).values():
        if family.type != "histogram":
            continue
        counts = [s.value for s in family.samples if s.name.endswith("_bucket") and s.labels.get("engine") == "0"]
        assert counts == sorted(counts)
        assert not counts or counts[-1] == next(s.value for s in family.samples if s.name.endswith("_count"))


def test_our_names_alone(llm: LLM) -> None:
    body = fetched(llm, vllm=False).exposition()
    assert b"vllm:" not in body
    assert "wavecore_num_requests_running" in families(body)


def test_the_dashboard_asks_for_what_is_there(llm: LLM) -> None:
    there = {s.name for f in families(fetched(llm).exposition()).values() for s in f.samples}
    there |= {"wavecore_http_requests_total"}  # nothing was served here
    panels = json.loads(DASHBOARD.read_text())["panels"]
    asked = {name for panel in panels for target in panel["targets"]
             for name in re.findall(r"wavecore_\w+", target["expr"])}  # fmt: skip
    assert len(panels) >= 12 and asked and asked <= there, asked - there


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_scrape_waits_for_no_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = fetched(llm)
    monkeypatch.setitem(metrics.THRESHOLDS, "age_seconds", 0.2)
    with stopped(deployment.read(llm.runtime_dir).engines[0].pid):
        for _ in range(3):  # the engine is asked once, until it answers
            found.refresh()
        asked = dict(found._reports)
        until(lambda: time.monotonic() - asked[0][0] > 0.3, "its numbers to age")
        found.refresh()
        scraped = families(found.exposition())
        assert found._reports == asked
    assert value(scraped, "wavecore_metrics_age_seconds") > 0.3
    assert value(scraped, "wavecore_threshold_exceeded", threshold="age_seconds") == 1
    assert value(scraped, "wavecore_threshold_exceeded", threshold="kv_cache_usage") == 0
    assert value(scraped, "wavecore_threshold", threshold="age_seconds") == 0.2
    assert "engine 0: age_seconds is above 0.2" in caplog.text and "kv_cache" not in caplog.text
    until(lambda: found._reports[0][0] > asked[0][0], "the answer")


def test_before_an_engine_has_answered(llm: LLM) -> None:
    found = Metrics(llm._service.client, "m")
    with stopped(deployment.read(llm.runtime_dir).engines[0].pid):
        found.refresh()
        scraped = families(found.exposition())
    assert value(scraped, "wavecore_engine_up", engine="0") == 1
    assert value(scraped, "vllm:cache_config_info", block_size="16") == 1
    assert not scraped["vllm:num_requests_waiting"].samples


def test_numbers_of_a_dead_engine_are_not_shown(tmp_path: Path, quick_restarts: None) -> None:
    with LLM(**write_model(tmp_path), log_level="error") as llm:
        found = fetched(llm)
        os.kill(deployment.read(llm.runtime_dir).engines[0].pid, signal.SIGKILL)
        until(lambda: not llm._service.client.engines, "the death")
        found.refresh()
        scraped = families(found.exposition())
        assert value(scraped, "wavecore_engine_up") == 0
        assert not scraped["vllm:num_requests_waiting"].samples
        until(lambda: llm._service.client.engines, "its next life")
        before = time.monotonic()
        found.refresh()
        until(lambda: found._reports[0][0] > before, "an answer")
        found.refresh()
        assert value(families(found.exposition()), "wavecore_engine_restarts_total") == 1


def test_http_is_counted_by_route_and_status(llm: LLM) -> None:
    found = Metrics(llm._service.client, "m", api_server=3)
    found.in_flight.inc()
    for route, status in (("/v1/models", 200), ("/v1/models", 503), ("other", 404), ("other", 0)):
        found.served(route, status, 0.25)
    scraped = families(found.exposition())
    answers = {(s.labels["route"], s.labels["status"]): s.value for s in scraped["wavecore_http_requests"].samples
               if s.name.endswith("_total") and s.labels["api_server"] == "3"}  # fmt: skip
    assert answers == {("/v1/models", "200"): 1, ("/v1/models", "503"): 1, ("other", "404"): 1, ("other", "0"): 1}
    assert value(scraped, "wavecore_http_request_seconds_count", route="/v1/models") == 2
    assert value(scraped, "wavecore_http_request_seconds_sum", route="other") == 0.5
    assert value(scraped, "wavecore_http_requests_in_flight", api_server="3") == 1


def test_every_number_of_the_table_is_one_of_the_engines(llm: LLM) -> None:
    """And the other way round: all histograms of the engine are shown."""
    report = llm._service.client.call("metrics").result().value
    rows = [row for rows in metrics.ROWS.values() for row in rows]
    shown = {row["key"].split(".")[1] for row in rows if row["key"].startswith("histograms.")}
    assert shown == set(report["histograms"])
    assert {row["key"].split(".")[0] for row in rows} - {"age_seconds", "exceeded"} <= set(report)
    for key in ("name", "vllm"):
        names = [row[key] for row in rows if key in row]
        assert len(names) == len(set(names))
