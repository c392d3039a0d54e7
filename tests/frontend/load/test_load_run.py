"""Requests at their times, and the figures made of them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.support.fake_openai import DONE, answer, event, serving, usage

from wavecore.frontend.load.load_run import LoadRun, Sample, report, run_load

ANSWER = answer(event("a"), event(""), event("b"), usage(3, 2), DONE)


async def test_a_request_is_due_at_its_time_whatever_the_server_does() -> None:
    """No coordinated omission: one at a time, behind a server that answers the first one last of all."""
    begun: list[dict[str, Any]] = []

    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        begun.append(body)
        await asyncio.sleep(0.2 if len(begun) == 1 else 0)
        writer.write(ANSWER)
        await writer.drain()

    async with serving(script) as server:
        run = await run_load(server.url, [{"prompt": i} for i in range(20)], rate=200.0, concurrency=1)
    draw, due = random.Random(0), 0.0
    for sample in run.samples:
        due += draw.expovariate(200.0)
        assert sample.due == due and sample.sent >= due and not sample.error
        assert sample.latencies()["ttft"] >= sample.sent - sample.due
    late = [sample.latencies()["e2e"] for sample in run.samples if 0 < sample.due < 0.1][1:]
    assert late and min(late) >= 0.1  # each of them waited for the first, and shows it


async def test_no_more_at_once_than_allowed() -> None:
    together, most, all_are_here = 0, 0, asyncio.Event()

    async def script(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal together, most
        together += 1
        most = max(most, together)
        if together == 3:
            all_are_here.set()
        await asyncio.wait_for(all_are_here.wait(), 30)
        writer.write(ANSWER)
        await writer.drain()
        together -= 1

    async with serving(script) as server:
        run = await run_load(server.url, [{}] * 12, rate=0.0, concurrency=3)
    assert most == 3 and len(run.samples) == 12
    assert all(sample.due == sample.sent and len(sample.times) == 2 for sample in run.samples)
    assert {(sample.prompt_tokens, sample.output_tokens) for sample in run.samples} == {(3, 2)}


async def test_failures_are_counted_by_what_was_said() -> None:
    async def script(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 X\r\ncontent-length: 4\r\n\r\nbusy" if body["fails"] else ANSWER)
        await writer.drain()

    async with serving(script) as server:
        run = await run_load(server.url, [{"fails": i % 2 == 0} for i in range(6)], rate=0.0, concurrency=0)
    figures = report(run, {})
    assert (figures["requests"], figures["failed"], figures["goodput_share"]) == (6, 3, 0.5)
    assert figures["errors"] == ["status 503: busy"]


def test_figures_of_made_up_requests() -> None:
    samples = [
        Sample(due=1.0, sent=1.25, times=[1.5, 1.75, 2.5], end=3.0, prompt_tokens=10, output_tokens=5),
        Sample(due=2.0, sent=2.0, times=[3.0], end=4.0, prompt_tokens=10, output_tokens=1),
        Sample(due=2.0, sent=2.0, end=2.5, error="status 500: x"),
        Sample(due=3.0, sent=3.0, end=5.0, prompt_tokens=1),  # an answer without text
    ]
    figures = report(LoadRun(samples, 10.0, [0.001, 0.011]), {"ttft": 0.5, "tpot": 0.25})
    assert figures["ttft_ms"] == {"mean": 750.0, "p50": 750.0, "p90": 950.0, "p99": 995.0, "max": 1000.0}
    assert figures["tpot_ms"]["max"] == 250.0 and figures["e2e_ms"]["max"] == 2000.0
    assert figures["inter_event_ms"]["mean"] == pytest.approx(500.0)
    assert figures["sent_late_ms"]["max"] == 250.0
    assert figures["output_tokens"] == 6 and figures["prompt_tokens"] == 21
    assert figures["output_tokens_per_second"] == pytest.approx(0.6)
    assert figures["requests_per_second"] == pytest.approx(0.3)
    assert figures["goodput_per_second"] == pytest.approx(0.2) and figures["goodput_share"] == 0.5
    assert figures["client_lagged"] and figures["client_lag_ms"]["max"] == pytest.approx(11.0)
    assert not report(LoadRun(samples, 10.0, [0.009]), {})["client_lagged"]
