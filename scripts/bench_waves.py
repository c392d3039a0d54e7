"""What lockstep costs: agreements, the end of a wave, a rank beside which others work, an idle group.

    python scripts/bench_waves.py [--ranks 2] [--agreements 20000]

Prints a Markdown table. Scripted models, no GPU; other processes on the machine show in all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.parallel.wave import Vote, Wave
from wavecore.transport.processes import deployment, group_memory
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage
from wavecore.transport.processes.votes import VoteBoard

STEP_SECONDS = 0.005
WAVES, TOKENS = 50, 20
IDLE_SECONDS = 5.0


def agree(rank: int, memory: int, store: int, bells: list[int], count: int) -> list[float]:
    """Seconds of each agreement, from the vote to the decision."""
    board, wave = VoteBoard(GroupMemory(rank, memory, store, bells, ProgressPage(ProgressPage.create_fd()))), Wave()
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        vote = wave.vote(True, 1, 1, 1)
        board.publish(wave.agreements, vote)
        wave.decide([Vote(*vote) for vote in board.wait(wave.agreements)])
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def bench_agreements(ranks: int, count: int) -> tuple[float, float]:
    """Median and 99th percentile, seconds, of rank 0 beside others that do nothing but vote, too."""
    with ExitStack() as stack:
        (_, memory), (_, store), *bells = group_memory.create(ranks, stack)
        numbers = [bell for _, bell in bells]
        others = []
        for rank in range(1, ranks):
            if not (pid := os.fork()):
                agree(rank, memory, store, numbers, count)
                os._exit(0)
            others.append(pid)
        taken = agree(0, os.dup(memory), store, numbers, count)
        for pid in others:
            os.waitpid(pid, 0)
    return taken[count // 2], taken[count * 99 // 100]


def passes(llm: LLM) -> list[int]:
    return [stat["steps"] + stat["dummy_steps"] for stat in llm.step_stats()]


def generate(llm: LLM, count: int, tokens: int) -> float:
    """Seconds a token."""
    prompts = [[number + 1, 2, 3] for number in range(count)]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(max_tokens=tokens, temperature=0), use_tqdm=False)
    return (time.perf_counter() - start) / tokens


def bench_group(ranks: int, folder: Path) -> dict[str, str]:
    script = folder / "script.json"
    script.write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [], "step_seconds": STEP_SECONDS}))
    settings: dict[str, Any] = {"skip_tokenizer_init": True, "disable_tqdm": True}
    with LLM(f"scripted:{script}", data_parallel_size=ranks, dp_lockstep=True, **settings) as llm:
        generate(llm, ranks, 10)
        late = []
        for _ in range(WAVES):
            before = max(passes(llm))
            generate(llm, 1, TOKENS)
            time.sleep(4 * STEP_SECONDS)
            late.append(max(passes(llm)) - before - TOKENS)
        alone, beside = generate(llm, 1, 400), generate(llm, ranks, 400)
        engines = [psutil.Process(entry.pid) for entry in deployment.read(llm.runtime_dir).engines]
        used = [sum(engine.cpu_times()[:2]) for engine in engines]
        time.sleep(IDLE_SECONDS)
        idle = [sum(engine.cpu_times()[:2]) - before for engine, before in zip(engines, used, strict=True)]
    return {
        f"forward passes after the last output, most of {WAVES} waves": str(max(late)),
        f"a token of one busy rank, steps of {STEP_SECONDS * 1e3:g} ms": f"{alone * 1e3:.2f} ms",
        "a token with all ranks busy": f"{beside * 1e3:.2f} ms",
        "CPU of an idle rank, the busiest": f"{max(idle) / IDLE_SECONDS:.1%}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--agreements", type=int, default=20_000)
    args = parser.parse_args()
    median, late = bench_agreements(args.ranks, args.agreements)
    rows = {"agreement, median": f"{median * 1e6:.1f} us", "agreement, 99th percentile": f"{late * 1e6:.0f} us"}
    with tempfile.TemporaryDirectory() as folder:
        rows |= bench_group(args.ranks, Path(folder))
    lines = [
        f"| {args.ranks} ranks in lockstep | |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
