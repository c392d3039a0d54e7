"""How far a reader walks: the rooms and files of a decode step and of a whole request, seen by tracing real runs.

    python scripts/trace_rooms.py            print the tables
    python scripts/trace_rooms.py --write    ... and put them into docs/walk.md

Counted are calls of the package's own Python functions (no comprehensions) in the order in which a thread makes them. A
*hop* is two calls in a row that lie in different files, or in different rooms. The step is a steady one: four requests
decode, two steps are in flight. It runs once with the scripted runner, whose own calls stand for a device and are left
out, and once with a random model of two layers on the CPU. The request is a text prompt through `LLM.generate`, on an
engine process that is warm; both processes are traced, all threads of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from documents import ALIASES, FOLDERS, ROOT, replace_part
from make_checkpoint import make
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wavecore import LLM, SamplingParams, connect
from wavecore.engine_core.__main__ import main as engine_main
from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.loop.core import EngineCore
from wavecore.engine_core.loop.proc import EngineCoreProc
from wavecore.engine_core.startup.factory import make_runner
from wavecore.transport.processes.process import ChildSpec
from wavecore.transport.processes.supervisor import Supervisor
from wavecore.transport.wire.messages import Add
from wavecore.transport.wire.tensors import from_numpy

DOCUMENT, PART = "docs/walk.md", "walk"
CALLS_FILE = "WAVECORE_TRACE_ROOMS"  # set in the traced engine: where its calls are to be written
STEADY_STEPS = 10
REQUESTS = 4
SETTINGS: dict[str, Any] = {"device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 256, "max_model_len": 256}
TEXT = "The capital of France is"
# The same counts when the files had just been moved into rooms, and nothing but their place had changed.
BEFORE = {
    "a steady step, device faked": [46, 15, 30, 5, 18],
    "a steady step, two layers on a CPU": [173, 30, 99, 10, 64],
    "a request, in the client": [306, 26, 183, 9, 52],
    "a request, in the engine (four steps)": [1076, 49, 708, 15, 384],
    "a request, both together": [1382, 66, 891, 21, 436],
}


class Call(NamedTuple):
    """One call of a function of the package; `at` is the monotonic clock, which all processes of a machine share."""

    at: float
    thread: int
    file: str


class Tracer:
    """Notes the calls of this thread, and of threads that start after `install`."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._names: dict[str, str] = {}

    def install(self) -> None:
        threading.setprofile(self._see)
        sys.setprofile(self._see)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            path = frame.f_code.co_filename
            file = self._names.get(path)
            if file is None:
                file = self._names[path] = _in_package(path)
            if file:
                self.calls.append(Call(time.monotonic(), threading.get_native_id(), file))


def _in_package(path: str) -> str:
    """The file from the root, empty where it is no file of the package."""
    real = Path(path).resolve()
    if real.suffix != ".py" or not real.is_relative_to(ROOT):
        return ""
    name = real.relative_to(ROOT).as_posix()
    return name if name.startswith((*(f"{folder}/" for folder in FOLDERS), f"{ALIASES}/")) else ""


def room_of(file: str) -> str:
    """A folder inside a top-level one; a file at such a folder's top is a room of its own."""
    parts = file.removesuffix(".py").split("/")
    return "/".join(parts[:2])


# --- the runs ---------------------------------------------------------------------------------------------------------


def steady_step(model: str) -> list[Call]:
    """The calls of one turn of the loop, in which four requests decode."""
    config = EngineConfig(model=model, num_gpu_blocks_override=100, **SETTINGS)
    core = EngineCore(config, make_runner(config, lambda _phase, _fraction: None))
    params = SamplingParams(temperature=1.0, seed=1, ignore_eos=True, max_tokens=100).to_wire()
    prompt = from_numpy(np.arange(3, 23, dtype=np.int32))
    for handle in range(REQUESTS):
        core.add(core.admit(Add(b"", bytes(16), handle + 1, handle, prompt, params)))
    for _ in range(STEADY_STEPS):
        core.step()
    tracer = Tracer()
    tracer.install()
    core.step()
    tracer.remove()
    return tracer.calls


def whole_request(model: str, folder: Path) -> tuple[list[Call], list[Call]]:
    """The calls of one request: in the client's process, and in the engine's."""
    log = folder / "calls.json"
    paths = os.pathsep.join((str(ROOT / "src"), str(ROOT / "scripts")))
    environment = {CALLS_FILE: str(log), "PYTHONPATH": paths}
    config = EngineConfig(model=model, **SETTINGS)
    tracer = Tracer()
    with Supervisor([[ChildSpec("engine 0", "trace_rooms", config.to_json(), env=environment)]]) as supervisor:
        runtime_dir = supervisor.start()
        tracer.install()
        with connect(runtime_dir) as llm:
            _generate(llm)  # what is imported and compiled once is no part of a request
            begin = time.monotonic()
            _generate(llm)
            end = time.monotonic()
        tracer.remove()
        supervisor.stop(drain=5.0)
        engine = [Call(*call) for call in json.loads(log.read_text())] if log.exists() else []
    return [_window(calls, begin, end) for calls in (tracer.calls, engine)]  # type: ignore[return-value]


def _generate(llm: LLM) -> None:
    llm.generate(TEXT, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)


def _window(calls: Iterable[Call], begin: float, end: float) -> list[Call]:
    return sorted(call for call in calls if begin <= call.at <= end)


def traced_engine(log: Path) -> int:
    """Be the engine process: what it calls while it serves goes to `log` when it ends."""
    tracer = Tracer()
    run = EngineCoreProc.run

    def traced(proc: EngineCoreProc) -> None:
        tracer.install()
        try:
            run(proc)
        finally:
            tracer.remove()
            log.write_text(json.dumps(tracer.calls))

    EngineCoreProc.run = traced  # type: ignore[assignment]
    return engine_main()


def make_model(folder: Path) -> str:
    """Two random layers, and a tokenizer that knows single bytes."""
    make("tiny", folder, "float32")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


# --- the tables -------------------------------------------------------------------------------------------------------


def counts(calls: list[Call]) -> list[int]:
    """Calls, files, hops between files, rooms, hops between rooms."""
    rooms = {call.file: room_of(call.file) for call in calls}
    by_thread = sorted(calls, key=lambda call: call.thread)  # a stable sort: each thread's calls stay in order
    pairs = [(one.file, other.file) for one, other in pairwise(by_thread) if one.thread == other.thread]
    between_files = sum(one != other for one, other in pairs)
    between_rooms = sum(rooms[one] != rooms[other] for one, other in pairs)
    return [len(calls), len(rooms), between_files, len(set(rooms.values())), between_rooms]


def way(calls: list[Call]) -> list[str]:
    """Rows of a table: each room and its files, in the order of the first visit, with the number of calls."""
    rooms: dict[str, dict[str, None]] = {}
    number = Counter(room_of(call.file) for call in calls)
    for call in calls:
        rooms.setdefault(room_of(call.file), {})[Path(call.file).stem] = None
    return [f"| {room} | {', '.join(files)} | {number[room]} |" for room, files in rooms.items()]


def tables() -> str:
    with tempfile.TemporaryDirectory(prefix="wavecore-trace-") as name:
        folder = Path(name)
        model = make_model(folder / "model")
        host, step = steady_step("scripted:"), steady_step(model)
        client, engine = whole_request(model, folder)
    rows = {
        "a steady step, device faked": counts(host),
        "a steady step, two layers on a CPU": counts(step),
        "a request, in the client": counts(client),
        "a request, in the engine (four steps)": counts(engine),
        "a request, both together": counts([*client, *engine]),
    }
    lines = ["| before -> today | calls | files | hops between files | rooms | hops between rooms |"]
    lines += ["|---|---:|---:|---:|---:|---:|"]
    for what, numbers in rows.items():
        pairs = (f"{old} -> {new}" for old, new in zip(BEFORE[what], numbers, strict=True))
        lines.append(f"| {what} | {' | '.join(pairs)} |")
    for title, calls in (
        ("A steady step, in the order of its first visits:", step),
        ("A request in the client's process:", client),
        ("... and in the engine's:", engine),
    ):
        lines += ["", title, "", "| room | files | calls |", "|---|---|---:|", *way(calls)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCUMENT}")
    arguments = parser.parse_args()
    text = tables()
    print(text, end="")
    if arguments.write:
        replace_part(DOCUMENT, PART, text)
    return 0


if __name__ == "__main__":
    engine_log = os.environ.get(CALLS_FILE)
    sys.exit(traced_engine(Path(engine_log)) if engine_log else main())
