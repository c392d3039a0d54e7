"""What lockstep costs: agreements, the end of a wave, a rank beside which others work, an idle group.

    python scripts/bench_waves.py [--ranks 2] [--agreements 20000]

Prints a Markdown table. Scripted models, no GPU; other processes on the machine show in all of it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.parallel.wave import Vote, Wave
from wavecore.transport.curve import create_keys
from wavecore.transport.io.host_link import RankPlace
from wavecore.transport.io.vote_link import VoteLink
from wavecore.transport.processes import deployment, group_memory
from wavecore.transport.processes.group_memory import GroupMemory
from wavecore.transport.processes.stall import ProgressPage
from wavecore.transport.processes.votes import VoteBoard

STEP_SECONDS = 0.005
WAVES, TOKENS = 50, 20
IDLE_SECONDS = 5.0


Join = Callable[[int], AbstractContextManager[VoteBoard | VoteLink]]


def agree(join: Join, rank: int, count: int) -> list[float]:
    """Seconds of each agreement, from the vote to the decision."""
    with join(rank) as board:
        return agree_on(board, count)


def agree_on(board: VoteBoard | VoteLink, count: int) -> list[float]:
    wave, taken = Wave(), []
    for _ in range(count):
        start = time.perf_counter()
        vote = wave.vote(True, 1, 1, 1)
        board.publish(wave.agreements, vote)
        wave.decide([Vote(*vote) for vote in board.wait(wave.agreements)])
        taken.append(time.perf_counter() - start)
    return sorted(taken)


def bench_agreements(join: Join, ranks: int, count: int) -> tuple[str, str]:
    """Median and 99th percentile of rank 0 beside others that do nothing but vote, too."""
    others = []
    for rank in range(1, ranks):
        if not (pid := os.fork()):
            agree(join, rank, count)
            os._exit(0)
        others.append(pid)
    taken = agree(join, 0, count)
    for pid in others:
        os.waitpid(pid, 0)
    return f"{taken[count // 2] * 1e6:.1f} us", f"{taken[count * 99 // 100] * 1e6:.0f} us"


def on_one_host(ranks: int, until: ExitStack) -> Join:
    (_, memory), (_, store), *bells = group_memory.create(ranks, until)

    def join(rank: int) -> AbstractContextManager[VoteBoard]:
        page = ProgressPage(ProgressPage.create_fd())
        return nullcontext(VoteBoard(GroupMemory(rank, os.dup(memory), store, [bell for _, bell in bells], page)))

    return join


def on_several_hosts(ranks: int, keys: Path) -> Join:
    """Over tcp with CURVE, of addresses of this machine."""
    create_keys(keys)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"

    @contextmanager
    def join(rank: int) -> Iterator[VoteLink]:
        memory = GroupMemory.alone(ProgressPage(ProgressPage.create_fd()))
        place = RankPlace(address, f"127.0.0.{rank + 2}", rank, ranks)
        with closing(VoteLink(place, keys, memory, range(rank, rank + 1), lambda error: sys.exit(str(error)))) as link:
            link.meet(30)
            yield link

    return join


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
    rows: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as until:
        one, several = on_one_host(args.ranks, until), on_several_hosts(args.ranks, Path(folder) / "keys")
        for where, join in (("agreement", one), ("agreement over tcp with CURVE", several)):
            rows[f"{where}, median"], rows[f"{where}, 99th percentile"] = bench_agreements(
                join, args.ranks, args.agreements
            )
        rows |= bench_group(args.ranks, Path(folder))
    lines = [
        f"| {args.ranks} ranks in lockstep | |",
        "|---|---:|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
