"""An engine in a Ray actor beside one in processes of this host: its throughput, and how soon a death is heard.

    python scripts/bench_ray.py MODEL [--workload x256-in32-out256] [--rounds 5] [--deaths 3]
        [--settings '{"gpu_memory_utilization": 0.4}']

Needs Ray. Both engines are resident, on the same device, so on a GPU each gets a share of it, as above. Each has a
client of its own in this program, and they take turns (A B B A ...) after a pass to warm up. Then processes of the
actor's engine are killed (kill -9) in the middle of a stream: *heard* is when the stream raises, *answered* when the
next request is, after the restart, and *gone* is when no process of the engine is left.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from bench_workloads import work_named

from wavecore import LLM, SamplingParams, connect
from wavecore.frontend.cli.bench import measure
from wavecore.testing import deployment
from wavecore.transport.errors import EngineDead
from wavecore.transport.processes.deployment import read

SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_num_seqs": 256, "max_model_len": 2048}
BACKENDS = ("mp", "ray")
LONG, SHORT = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1500, 4))


def rates(clients: Sequence[LLM], workload: str, rounds: int) -> list[list[float]]:
    """Output tokens a second of each client in each round."""
    work = work_named(workload)
    found: list[list[float]] = [[] for _ in clients]
    for llm in clients:
        measure(llm, work)
    for turn in range(rounds):
        for i in range(len(clients))[:: 1 if turn % 2 else -1]:
            report = measure(clients[i], work)
            found[i].append(report.output_tokens / report.seconds)
    return found


def engine_of(runtime_dir: Path) -> psutil.Process:
    return psutil.Process(read(runtime_dir).engines[0].pid)


def actor_of(runtime_dir: Path) -> psutil.Process:
    actor = engine_of(runtime_dir).parent()
    assert actor is not None
    return actor


def death(runtime_dir: Path, llm: LLM, victim: Callable[[Path], psutil.Process]) -> tuple[float, float, float]:
    """Seconds from a kill until it is heard, until the engine's process is gone, and until the next answer."""
    stream = llm.stream({"prompt_token_ids": [7, 8, 9]}, LONG)
    next(stream)
    engine, killed = engine_of(runtime_dir), victim(runtime_dir)
    began = time.monotonic()
    killed.kill()
    try:
        list(stream)
        raise SystemExit("the stream ended as if nothing had happened")
    except EngineDead:
        heard = time.monotonic() - began
    psutil.wait_procs([engine], 10)
    gone = time.monotonic() - began
    llm.generate([[7, 8, 9]], SHORT, use_tqdm=False, raise_on_error=True)
    return heard, gone, time.monotonic() - began


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--workload", default="x256-in32-out256")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--deaths", type=int, default=3, help="of each kind")
    parser.add_argument("--settings", type=json.loads, default={}, help="of both engines, JSON")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        started = [
            deployment("wavecore", args.model, data_parallel_backend=backend, **{**SETTINGS, **args.settings})
            for backend in BACKENDS
        ]
        folders = [stack.enter_context(each)[0] for each in started]
        clients = [stack.enter_context(connect(folder)) for folder in folders]
        print("| engine in | output tokens/s, median (least to most) | of the process path |\n|---|---:|---:|")
        found = rates(clients, args.workload, args.rounds)
        for backend, own in zip(BACKENDS, found, strict=True):
            share = statistics.median(own) / statistics.median(found[0])
            where = "a Ray actor" if backend == "ray" else "processes"
            print(f"| {where} | {spread(own, 0)} | {share:.3f} |", flush=True)
        print("\n| killed | heard after, s | engine gone, s | answered, s |\n|---|---:|---:|---:|")
        for name, victim in {"the actor's child": engine_of, "the actor": actor_of}.items():
            deaths = [death(folders[1], clients[1], victim) for _ in range(args.deaths)]
            print(f"| {name} | {' | '.join(spread(column, 2) for column in zip(*deaths, strict=True))} |", flush=True)


if __name__ == "__main__":
    main()
