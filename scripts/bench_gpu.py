"""The table of docs/benchmarks.md: every workload on every model given, against its floor on one H200.

    python scripts/bench_gpu.py FOLDER ... [--only ragged-256] [--max-requests 512] [--repeats 3]

`make_checkpoint.py` makes the folders. One engine a model serves all of its workloads, one after the other, from an
empty prefix cache each. Every workload runs first with one output token a request, which is the time of its prompts,
then whole; the difference is the time of its decode steps. A row is printed as soon as it is measured.
With --settings '{"tensor_parallel_size": 2}' the floor is that of both GPUs, which hear of each other in no time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from bench_workloads import WORKLOADS
from floors import H200, Floor, Rates, floor_of

from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.models.spec import ModelSpec
from wavecore.frontend.cli.bench import BenchReport, measure, phase_seconds, warm_up
from wavecore.frontend.cli.workload import WorkItem
from wavecore.frontend.llm import LLM

SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 16_384,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 16_384,
    "gpu_memory_utilization": 0.85,
    "enable_prefix_caching": True,
}
PHASES = ("schedule", "launch", "wait", "update")
COLUMNS = (
    "model",
    "workload",
    "requests",
    "tokens in",
    "out",
    "s",
    "out tokens/s",
    "in + out tokens/s",
    "first token ms p50 / p99",
    "ms a token p50 / p99",
    "steps",
    "ms a step",
    " / ".join(PHASES),
    "floor s",
    "share of the floor",
    "prefill",
    "decode",
)


def cut(name: str, most: int | None) -> tuple[str, list[WorkItem]]:
    """A workload's first `most` requests, and how the table calls them."""
    work = WORKLOADS[name]()
    if most is None or most >= len(work):
        return name, work
    return f"{name}, first {most}", work[:most]


def run(llm: LLM, spec: ModelSpec, work: Sequence[WorkItem], repeats: int, rates: Rates) -> list[str]:
    """Measure one workload: the cells from "requests" on."""
    prompts: list[Any] = [item.prompt for item in work]
    floor = floor_of(spec, prompts, [item.max_tokens for item in work], rates)
    warm_up(llm, work)
    prompts_alone = [replace(item, max_tokens=1) for item in work]
    prefill = min(measure(llm, prompts_alone).seconds for _ in range(repeats))
    return cells(floor, prefill, [measure(llm, work) for _ in range(repeats)])


def cells(floor: Floor, prefill: float, reports: Sequence[BenchReport]) -> list[str]:
    """Figures of the fastest run; the seconds of all of them.

    Args:
        prefill: seconds that the prompts took alone.
    """
    best = min(reports, key=lambda report: report.seconds)
    [counters] = best.counters
    phases = phase_seconds(counters)
    steps, preemptions = round(counters["steps"]), round(counters["preemptions"])
    return [
        str(len(best.ttft)),
        f"{best.input_tokens:,}",
        f"{best.output_tokens:,}",
        " ".join(f"{report.seconds:.2f}" for report in reports),
        f"{best.output_tokens / best.seconds:,.0f}",
        f"{(best.input_tokens + best.output_tokens) / best.seconds:,.0f}",
        milliseconds(best.ttft),
        milliseconds(best.tpot),
        f"{steps:,}" + (f" ({preemptions} preemptions)" if preemptions else ""),
        f"{1000 * best.seconds / steps:.2f}",
        " / ".join(f"{phases[name] / sum(phases.values()):.0%}" for name in PHASES),
        f"{floor.total:.3f}",
        share(floor.total, best.seconds),
        share(floor.prefill, prefill),
        share(floor.decode, best.seconds - prefill),
    ]


def milliseconds(values: Sequence[float]) -> str:
    return " / ".join(f"{1000 * p:.1f}" for p in np.percentile(values, (50, 99))) if values else ""


def share(floor: float, seconds: float) -> str:
    """Empty where a difference of two runs is all noise."""
    return f"{floor / seconds:.0%}" if seconds > 0 else ""


def machine() -> str:
    """The card and what drives it, without a CUDA context in this process."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        card = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        card = "no GPU"
    return f"{card}; Python {sys.version.split()[0]}, torch {version('torch')}, triton {version('triton')}"


def kv_tokens(llm: LLM) -> str:
    """How many tokens an engine can hold."""
    resolved = llm._service.resolved
    return f"its KV cache holds {resolved['num_blocks'] * resolved['block_size']:,} tokens"


def line(values: Sequence[str]) -> None:
    print(f"| {' | '.join(values)} |", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders with config.json and weights")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="a workload; may come several times")
    parser.add_argument("--max-requests", type=int, help="cut every workload to its first requests")
    parser.add_argument("--repeats", type=int, default=1, help="the fastest counts")
    parser.add_argument("--settings", type=json.loads, default={}, help="of the engine, JSON")
    args = parser.parse_args(argv)
    chosen = {**SETTINGS, **args.settings}
    rates = H200.of(chosen.get("tensor_parallel_size", 1))
    settings = ", ".join(f"{name} {value}" for name, value in chosen.items())
    print(f"{machine()}\n\n{settings}\n")
    line(COLUMNS)
    line(["---", "---", *["---:"] * (len(COLUMNS) - 2)])
    for folder in args.models:
        path = folder / "config.json"
        spec = from_config(json.loads(path.read_text()), path)
        start = time.monotonic()
        with LLM(folder, **chosen) as llm:
            print(f"{folder.name}: ready after {time.monotonic() - start:.1f} s; {kv_tokens(llm)}", file=sys.stderr)
            for name in args.only or WORKLOADS:
                label, work = cut(name, args.max_requests)
                line([folder.name, label, *run(llm, spec, work, args.repeats, rates)])


if __name__ == "__main__":
    main()
