"""What a pipeline of two models costs: its throughput beside that of its slower stage alone, and what overlap saves.

    python scripts/bench_pipeline.py [--seconds 8] [--runs 96]

Engines are real processes with a scripted model, whose steps take a made-up time: 5 ms in the first stage, 10 ms in the
second, 32 slots each. *Load*: so many runs at once, each begun when another ends; counted are those that end within
the seconds behind a warm-up. *One run*: five sentences, each rewritten, with and without overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_detokenize import small_tokenizer

from wavecore import ModelPipeline

STEP_SECONDS = {"draft": 0.005, "rewrite": 0.01}
SLOTS, WARM_UP = 32, 2.0
LOAD = {"max_tokens": 32, "ignore_eos": True}
SENTENCES = (
    "Boats left the harbour. ",
    "The wind was kind. ",
    "Gulls cried. ",
    "Nobody looked back. ",
    "Winter came. ",
)
WHOLE = "".join(SENTENCES)


def pipeline(folder: Path, *stages: str, overlap: bool = False) -> ModelPipeline:
    tokenizer = small_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    made = ModelPipeline(disable_tqdm=True)
    for stage in stages:
        vocab_size, file = tokenizer.get_vocab_size(), folder / f"{stage}.json"
        # A sentence is answered with itself; any other prompt with all of them.
        ids = [tokenizer.encode(text).ids for text in (*SENTENCES, WHOLE)]
        scripts = {"*": ids[-1], **{str(own[0]): own for own in ids[:-1]}}
        script = {"vocab_size": vocab_size, "eos_token_id": vocab_size - 1, "num_blocks": 20_000, "scripts": scripts}
        file.write_text(json.dumps({**script, "step_seconds": STEP_SECONDS[stage]}))
        settings: dict[str, Any] = {"tokenizer": str(folder), "max_num_seqs": SLOTS}
        by_sentence = overlap and stage != stages[0]
        whole = "All of it: {" + ("prompt" if stage == stages[0] else "draft") + "}"
        prompt = None if by_sentence else whole
        made.add_stage(stage, f"scripted:{file}", prompt=prompt, overlap=by_sentence, **settings)
    return made


def per_second(work: Callable[[ModelPipeline, Callable[[], bool]], None], made: ModelPipeline, seconds: float) -> float:
    """Runs that end a second; `work` goes on until it is told to end."""
    ends: list[float] = []
    begin = time.monotonic() + WARM_UP

    def goes_on() -> bool:
        ends.append(time.monotonic())
        return ends[-1] < begin + seconds

    with made:
        work(made, goes_on)
    return sum(begin <= end < begin + seconds for end in ends) / seconds


def in_threads(runs: int) -> Callable[[ModelPipeline, Callable[[], bool]], None]:
    def work(made: ModelPipeline, goes_on: Callable[[], bool]) -> None:
        def one() -> None:
            while goes_on():
                made.run("Go", **LOAD)

        threads = [threading.Thread(target=one) for _ in range(runs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return work


def in_tasks(runs: int, streams: bool) -> Callable[[ModelPipeline, Callable[[], bool]], None]:
    def work(made: ModelPipeline, goes_on: Callable[[], bool]) -> None:
        async def one() -> None:
            while goes_on():
                if streams:
                    async for _ in made.astream("Go", **LOAD):
                        pass
                else:
                    await made.arun("Go", **LOAD)

        async def all_at_once() -> None:
            await asyncio.gather(*(one() for _ in range(runs)))

        asyncio.run(all_at_once())

    return work


def bench_load(runs: int, seconds: float) -> None:
    ways = {
        "threads, run": in_threads(runs),
        "tasks, arun": in_tasks(runs, False),
        "tasks, astream": in_tasks(runs, True),
    }
    print("| runs at once | driven by | slower stage alone, runs/s | both stages | ratio |\n|---:|---|---:|---:|---:|")
    for name, work in ways.items():
        with tempfile.TemporaryDirectory() as folder:
            alone = per_second(work, pipeline(Path(folder), "rewrite"), seconds)
            both = per_second(work, pipeline(Path(folder), "draft", "rewrite"), seconds)
        print(f"| {runs} | {name} | {alone:.1f} | {both:.1f} | {both / alone:.2f} |", flush=True)


def bench_one_run() -> None:
    print("\n| overlap | first rewritten text, ms | all, ms |\n|---|---:|---:|")
    for overlap in (False, True):
        firsts, wholes = [], []
        with (
            tempfile.TemporaryDirectory() as folder,
            pipeline(Path(folder), "draft", "rewrite", overlap=overlap) as made,
        ):
            for _ in range(5):
                started, first = time.monotonic(), 0.0
                for output in made.stream("Go", max_tokens=200):
                    first = first or (time.monotonic() - started if output.stage == "rewrite" else 0.0)
                firsts.append(first)
                wholes.append(time.monotonic() - started)
        first, whole = 1e3 * statistics.median(firsts), 1e3 * statistics.median(wholes)
        print(f"| {'on' if overlap else 'off'} | {first:.0f} | {whole:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="counted in each row")
    parser.add_argument("--runs", type=int, default=96, help="at once")
    args = parser.parse_args()
    bench_load(args.runs, args.seconds)
    bench_one_run()


if __name__ == "__main__":
    main()
