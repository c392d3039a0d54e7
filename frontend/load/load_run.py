"""Requests at their times, what each one's client sees, and the figures of all.

The clock of a request runs from the moment when it was due, not from when this program got to send it: a server (or a
client) that falls behind makes latencies longer, and no request is left out because others were slow.
"""

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from wavecore.frontend.load.event_stream import events
from wavecore.transport.errors import RequestError

REQUEST_SECONDS = 3600.0
LAG_TICK = 0.005
LAG_MARK = 0.010  # a program that wakes up later than this has measured itself


@dataclass(slots=True)
class Sample:
    """One request; times are seconds since the start.

    Attributes:
        due, sent: when it should have been sent, and when it was.
        times: of the events with text.
        error: why it failed; "" for an answer.
    """

    due: float
    sent: float
    times: list[float] = field(default_factory=list)
    end: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    def latencies(self) -> dict[str, float]:
        """Seconds: "e2e", "ttft" with a first token, "tpot" (a token after the first) with a second one."""
        found = {"e2e": self.end - self.due}
        if self.times:
            found["ttft"] = self.times[0] - self.due
        if self.times and self.output_tokens > 1:
            found["tpot"] = (self.times[-1] - self.times[0]) / (self.output_tokens - 1)
        return found


class LoadRun(NamedTuple):
    """Attributes:
    seconds: from the start to the last end.
    lags: by how many seconds this program woke up late, time and again.
    """

    samples: list[Sample]
    seconds: float
    lags: list[float]


async def run_load(
    url: str, bodies: Sequence[Mapping[str, Any]], rate: float, concurrency: int, api_key: str = "", seed: int = 0
) -> LoadRun:
    """Send all requests, and wait for their ends.

    Args:
        rate: requests a second, at the times of a Poisson process. 0 sends each as soon as `concurrency` allows, and it
            is due then.
        concurrency: requests at once; 0 for any number.
        seed: of the times, which are the same in each run.
    """
    draw, due = random.Random(seed), 0.0
    start = time.perf_counter()
    gate = asyncio.Semaphore(concurrency or len(bodies))
    lags: list[float] = []
    watch = asyncio.create_task(_watch_lag(lags))
    tasks = []
    for body in bodies:
        due += draw.expovariate(rate) if rate else 0.0
        tasks.append(asyncio.create_task(_one(url, body, api_key, gate, start, due if rate else None)))
    samples = await asyncio.gather(*tasks)
    watch.cancel()
    return LoadRun(samples, time.perf_counter() - start, lags)


async def _one(
    url: str, body: Mapping[str, Any], api_key: str, gate: asyncio.Semaphore, start: float, due: float | None
) -> Sample:
    if due is not None:
        await asyncio.sleep(start + due - time.perf_counter())
    async with gate:
        sent = time.perf_counter() - start
        sample = Sample(sent if due is None else due, sent)
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                async for event in events(url, body, api_key):
                    if event.text:
                        sample.times.append(time.perf_counter() - start)
                    if event.usage is not None:
                        sample.prompt_tokens = event.usage.prompt_tokens
                        sample.output_tokens = event.usage.completion_tokens
        except (RequestError, TimeoutError) as error:
            sample.error = str(error) or "no end"
        sample.end = time.perf_counter() - start
        return sample


async def _watch_lag(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_TICK
        await asyncio.sleep(LAG_TICK)
        lags.append(time.perf_counter() - due)


def report(run: LoadRun, goals: Mapping[str, float]) -> dict[str, Any]:
    """Figures of all requests. Latencies are of those that were answered; the failed ones have met no goal.

    Args:
        goals: seconds that "ttft", "tpot" and "e2e" of a good request may take at most.
    """
    samples, seconds, lags = run
    good = [sample for sample in samples if not sample.error]
    each = [sample.latencies() for sample in good]
    met = sum(all(found.get(name, 0.0) <= most for name, most in goals.items()) for found in each)
    output = sum(sample.output_tokens for sample in good)
    gaps = [gap for sample in good for gap in np.diff(sample.times).tolist()]
    return {
        "requests": len(samples),
        "failed": len(samples) - len(good),
        "errors": sorted({sample.error for sample in samples if sample.error})[:10],
        "seconds": seconds,
        "prompt_tokens": sum(sample.prompt_tokens for sample in good),
        "output_tokens": output,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": output / seconds,
        "goodput_per_second": met / seconds,
        "goodput_share": met / len(samples),
        **{f"{name}_ms": _spread([found[name] for found in each if name in found]) for name in ("ttft", "tpot", "e2e")},
        "inter_event_ms": _spread(gaps),
        "sent_late_ms": _spread([sample.sent - sample.due for sample in samples]),
        "client_lag_ms": _spread(lags),
        "client_lagged": max(lags, default=0.0) > LAG_MARK,
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Of seconds, in milliseconds."""
    if not values:
        return {}
    ms = 1e3 * np.array(values)
    marks = dict(zip(("p50", "p90", "p99"), np.percentile(ms, (50, 90, 99)).tolist(), strict=True))
    return {"mean": float(ms.mean()), **marks, "max": float(ms.max())}
