"""Clients of soak.py, each a program of its own that does to the library what programs do.

    python scripts/soak_clients.py KIND RUNTIME_DIR SEED

Exit status 0: all that it was given was right. 3: the engine died each time that it tried. Anything else is a broken
promise, and so is one that does not end.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from scripted_tokens import right_tokens
from slow_link import SlowLink

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead, Overloaded, StartError, WavecoreError

ENGINE_DIED = 3
REPAIR_SECONDS = 10.0
TRIES = 4  # after the engine's death in the middle
STREAMS = 40  # that a client begins
LINK_RATE = 200_000  # bytes a second


class Broken(Exception):
    """A promise was."""


def prompt_of(chance: random.Random) -> list[int]:
    return [chance.randrange(1, 1000) for _ in range(chance.choice((1, 5, 40, 120)))]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0)


def check(prompt: list[int], tokens: list[int], count: int) -> None:
    if tokens != right_tokens(prompt, count):
        raise Broken(f"wrong tokens after {prompt[:5]}...: {len(tokens)} of {count}")


def attach(runtime_dir: Path) -> LLM:
    """A file that a cleaner took is there again within seconds."""
    until = time.monotonic() + REPAIR_SECONDS
    while True:
        try:
            return LLM.connect(runtime_dir)
        except StartError:
            if time.monotonic() > until:
                raise
            time.sleep(0.2)


def read(llm: LLM, prompt: list[int], count: int) -> None:
    tokens: list[int] = []
    for output in llm.stream({"prompt_token_ids": prompt}, greedy(count)):
        tokens += output.outputs[0].token_ids
    check(prompt, tokens, count)


def forking(runtime_dir: Path, chance: random.Random) -> None:
    """Forks in the middle of streams. The child uses what it inherited, gets errors, and ends as programs end."""
    with attach(runtime_dir) as llm:
        for _ in range(4):
            prompt, tokens = prompt_of(chance), list[int]()
            stream = llm.stream({"prompt_token_ids": prompt}, greedy(60))
            first = next(stream)
            tokens += first.outputs[0].token_ids
            child = os.fork()
            if child == 0:
                sys.exit(_use_in_a_fork(llm, stream, first.finished))
            for output in stream:
                tokens += output.outputs[0].token_ids
            check(prompt, tokens, 60)
            if status := os.waitpid(child, 0)[1]:
                raise Broken(f"the fork ended with status {status}")


def _use_in_a_fork(llm: LLM, stream: Iterator[Any], finished: bool) -> int:
    """0 where each use ends as it should: with an error, or the stream with all that had come before."""
    wrong = 0
    with contextlib.suppress(WavecoreError):
        for output in stream:
            finished = output.finished
        wrong += not finished
    with contextlib.suppress(WavecoreError):
        llm.generate([1], greedy(1), use_tqdm=False)
        wrong += 1
    llm.shutdown()
    return wrong


def collected(runtime_dir: Path, chance: random.Random) -> None:
    """Threads leave streams in cycles for the collector, which may close them in any thread, at any moment."""
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        mine, kept = random.Random(seed), list[Exception]()
        try:
            for _ in range(STREAMS):
                prompt = prompt_of(mine)
                try:
                    for output in llm.stream({"prompt_token_ids": prompt}, greedy(60)):
                        check(prompt, list(output.outputs[0].token_ids), len(output.outputs[0].token_ids))
                        raise KeyError("the program's own")
                except KeyError as error:
                    error.args = (error,)  # a cycle that holds the frame, and so the stream
                    kept = [error]
            read(llm, prompt_of(mine), 20)
        except BaseException as error:
            faults.append(error)
        del kept

    gc.set_threshold(50)
    with attach(runtime_dir) as llm:
        threads = [threading.Thread(target=work, args=(chance.random(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for fault in faults:
        raise fault


def signalled(runtime_dir: Path, chance: random.Random) -> None:
    """Works until a signal comes; its handler shuts the client down, wherever the main thread stands."""
    llm = attach(runtime_dir)
    stopped = False

    def stop(*_: object) -> None:
        nonlocal stopped
        stopped = True
        llm.shutdown()

    signal.signal(signal.SIGTERM, stop)
    print("ready", flush=True)
    try:
        while not stopped:
            prompts = [prompt_of(chance) for _ in range(8)]
            outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                if output.error is None:
                    check(prompt, list(output.outputs[0].token_ids), 20)
                elif isinstance(output.error, EngineDead):
                    raise output.error
                elif not stopped:
                    raise Broken(f"a request failed: {output.error}")
    except WavecoreError:
        if not stopped:
            raise
    finally:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # until the next try's
        if stopped:
            sys.exit(0)


def slow_link(runtime_dir: Path, chance: random.Random) -> None:
    """Sits behind links that let little through and break again and again."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        there = Path(folder)
        there.chmod(0o700)
        (there / "lock").symlink_to(runtime_dir / "lock")
        attach(runtime_dir).shutdown()
        cut_after = partial(chance.randrange, 20_000, 200_000)
        entries = json.loads((runtime_dir / "deployment.json").read_text())["engines"]
        links = {
            e[side]: SlowLink(e[side], f"ipc://{there}/{e['index']}.{side}", LINK_RATE, cut_after)
            for e in entries
            for side in SIDES
        }
        for link in links.values():
            stack.callback(link.close)
        done = threading.Event()
        copy_deployment(runtime_dir, there, links)
        watch = threading.Thread(target=_follow, args=(done, lambda: copy_deployment(runtime_dir, there, links)))
        watch.start()
        stack.callback(watch.join)  # it writes into the folder, which goes with this block
        stack.callback(done.set)
        with attach(there) as llm:
            for _ in range(10):
                read(llm, [chance.randrange(1, 1000) for _ in range(1000)], 60)


SIDES = ("input", "output")


def copy_deployment(source: Path, folder: Path, links: Mapping[str, SlowLink]) -> None:
    """deployment.json with the links' addresses; without a word where the disk or the supervisor has none just now."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        deployment = json.loads((source / "deployment.json").read_text())
        for entry in deployment["engines"]:
            entry |= {side: links[entry[side]].address for side in SIDES if entry[side] in links}
        (folder / ".new").write_text(json.dumps(deployment))
        (folder / ".new").rename(folder / "deployment.json")


def _follow(done: threading.Event, copy: Callable[[], None]) -> None:
    while not done.wait(0.05):
        copy()


KINDS: Mapping[str, Callable[[Path, random.Random], None]] = {
    kind.__name__: kind for kind in (forking, collected, signalled, slow_link)
}


def main() -> int:
    faulthandler.enable()
    kind, runtime_dir, seed = sys.argv[1:]
    chance = random.Random(int(seed))
    for _ in range(TRIES):
        try:
            KINDS[kind](Path(runtime_dir), chance)
            return 0
        except (EngineDead, Overloaded) as error:  # dead, or told to end
            print(f"{kind}: {error}", file=sys.stderr)
            time.sleep(1)
    return ENGINE_DIED


if __name__ == "__main__":
    sys.exit(main())
