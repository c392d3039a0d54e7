"""`wavecore bench`. Offline: throughput and latency of a batch, and where the engine's steps spend their time.

The phases of the engine's loop, host time each:

    schedule   plan the next step
    launch     queue it on the device. What makes the host wait meanwhile counts too: a kernel that is loaded at its
               first use, a full queue of launches, memory that is allocated. On a CPU the plan is only noted
    wait       until the tokens of the oldest step in flight are here; on a CPU this computes the step
    update     append the tokens, find the ends, hand out
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.cli import bench_serve
from wavecore.frontend.cli.generate import open_llm
from wavecore.frontend.cli.parser import CommandParser
from wavecore.frontend.cli.workload import WorkItem, chosen_work
from wavecore.frontend.llm import LLM

SECONDS = "_seconds"


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What a batch took.

    Attributes:
        seconds: wall time of the batch.
        input_tokens, output_tokens: of all requests together.
        ttft: seconds to the first token, one a request.
        tpot: seconds a token after the first, one a request of two tokens or more.
        counters: what the counters of `LLM.step_stats` and the seconds of each phase rose by, for each engine;
            "engine" is its number.
    """

    seconds: float
    input_tokens: int
    output_tokens: int
    ttft: list[float]
    tpot: list[float]
    counters: list[dict[str, float]]

    def lines(self) -> list[str]:
        total = self.input_tokens + self.output_tokens
        lines = [
            f"requests              {len(self.ttft):>12}",
            f"seconds               {self.seconds:>12.3f}",
            f"input tokens          {self.input_tokens:>12}",
            f"output tokens         {self.output_tokens:>12}",
            f"output tokens/s       {self.output_tokens / self.seconds:>12.1f}",
            f"total tokens/s        {total / self.seconds:>12.1f}",
        ]
        for name, values in (("time to first token", self.ttft), ("time per token", self.tpot)):
            if values:
                ms = " / ".join(f"{1000 * p:.1f}" for p in np.percentile(values, (50, 90, 99)))
                lines.append(f"{name:<22}{ms} ms (p50 / p90 / p99)")
        for rose in self.counters:
            steps = max(1, rose["steps"])
            shown = {name: f"{rose[name]:.0f}" for name in ("steps", "preemptions")}
            shown |= {f"{n}, a step": f"{1000 * seconds / steps:.3f} ms" for n, seconds in phase_seconds(rose).items()}
            lines += [f"engine {rose['engine']} {name:<20} {value}" for name, value in shown.items()]
        return lines


def run(args: Sequence[str]) -> int:
    kinds = {"offline": _offline, "serve": bench_serve.run}
    if not args or args[0] not in kinds:
        usage = "usage: wavecore bench offline [--SETTING VALUE ...], or wavecore bench serve URL [--OPTION VALUE ...]"
        print(usage, file=sys.stderr)
        return 0 if args and args[0] in ("-h", "--help") else 2
    return kinds[args[0]](args[1:])


def _offline(args: Sequence[str]) -> int:
    about, options = (
        "Measures one batch of requests; end-of-sequence is ignored.",
        ("attach", "workload", "bench offline"),
    )
    values = CommandParser("wavecore bench offline", "", about, options=options).parse(args)
    with open_llm(values) as llm:
        work = chosen_work(values, llm.vocab_size)
        warm_up(llm, work)
        report = min((measure(llm, work) for _ in range(max(1, values.repeats))), key=lambda r: r.seconds)
    print("\n".join(report.lines()))
    if values.output_json:
        Path(values.output_json).write_text(json.dumps(asdict(report), indent=1), encoding="utf-8")
    return 0


def warm_up(llm: LLM, work: Sequence[WorkItem]) -> None:
    """A prompt step and a decode step of a few requests, so that nothing is used for the first time later."""
    measure(llm, [WorkItem(item.prompt, 2) for item in work[:4]])


def measure(llm: LLM, work: Sequence[WorkItem]) -> BenchReport:
    """Run a batch once, from an empty prefix cache.

    Raises:
        WavecoreError: a request failed.
    """
    prompts: list[Any] = [item.prompt for item in work]
    plain = SamplingParams(ignore_eos=True, detokenize=False)
    params = [plain.clone(max_tokens=item.max_tokens, temperature=item.temperature) for item in work]
    llm.reset_prefix_cache()
    before = llm.step_stats()
    started = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False, raise_on_error=True)
    seconds = time.monotonic() - started
    after = {stats["engine"]: stats for stats in llm.step_stats()}
    return BenchReport(
        seconds,
        sum(len(o.prompt_token_ids) for o in outputs),
        sum(len(c.token_ids) for o in outputs for c in o.outputs),
        [o.metrics.first_token_latency or 0.0 for o in outputs],
        [t for o in outputs if (t := o.metrics.time_per_token) is not None],
        [_rise(stats, after[stats["engine"]]) for stats in before if stats["engine"] in after],
    )


def _rise(before: dict[str, Any], after: dict[str, Any]) -> dict[str, float]:
    """Of whole numbers, which are counters but for a few that are 0 before and after, and of seconds."""
    counted = [name for name, value in before.items() if isinstance(value, int) or name.endswith(SECONDS)]
    return {name: after[name] - before[name] for name in counted} | {"engine": after["engine"]}


def phase_seconds(counters: dict[str, float]) -> dict[str, float]:
    """Seconds in each phase of the loop."""
    return {name.removesuffix(SECONDS): value for name, value in counters.items() if name.endswith(SECONDS)}
