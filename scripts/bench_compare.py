"""wavecore and vLLM on the same machine, checkpoints and workloads: the table of ratios in docs/benchmarks.md.

    python scripts/bench_compare.py FOLDER ... --peer-path SITE [--only ragged-256] [--json FILE] [--curves]
    python scripts/bench_compare.py --plot FILE DOCS

`make_checkpoint.py` makes the folders; SITE is where vLLM is installed when it is not importable as it is. Each engine
is a process; the first of its kind starts with empty compile caches. Every workload runs once to warm up (graphs are
captured in that pass, and its time is told apart), then `--repeats` times; prefix caches are emptied before each. The
rows that the host decides are measured with both engines resident, in turn (A B A B), since a process keeps the pace it
has; the others with one engine after the other, with 1,024 places. `--settings` and `--peer-settings` set more, for
instance `{"tensor_parallel_size": 2}`; each engine then has the machine to itself, as it has with `--alone`. `--curves`
adds batches of 1 to 512 and contexts of 256 to 16k; `--plot` draws these (needs matplotlib).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench_gpu import SETTINGS, kv_tokens, machine
from bench_workloads import WORKLOADS, answer_requests, work_named
from floors import H200, floor_of

from wavecore.engine_core.models.families import from_config
from wavecore.frontend.cli.bench import measure
from wavecore.frontend.llm import LLM

ENGINES = ("wavecore", "vllm")
HOST_BOUND = ("single-in128-out256", "single-in8192-out16", "decode-heavy-x256", "ragged-256")
SHARED_MEMORY = 0.42  # of the GPU for each engine, when both are resident
ONCE = 10.0
"""Seconds of a pass of vLLM above which its first one counts, alone: it has made all of its graphs before it is ready,
and its later passes took as long (within 1% from 6 s on, 5% where lengths differ)."""
PLACES_1024: Mapping[str, Mapping[str, Any]] = {  # vLLM's own graphs end at 512 rows
    "wavecore": {"max_num_seqs": 1024},
    "vllm": {"max_num_seqs": 1024, "max_cudagraph_capture_size": 1024},
}
BATCHES = [f"x{n}-in128-out{tokens}" for n in (1, 4, 16, 64, 128, 256, 512) for tokens in (1, 129)]
CONTEXTS = [f"x16-in{n}-out{tokens}" for n in (256, 1024, 4096, 8192, 16000) for tokens in (1, 65)]
COLUMNS = (
    "model",
    "workload",
    "wavecore s, median (min)",
    "vLLM s",
    "vLLM / wavecore",
    "share of the floor",
    "measured",
)


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds of one workload on one model, a list an engine, without the first pass.

    Attributes:
        interleaved: both engines were resident and took turns.
        floor: seconds that no engine can go below.
    """

    model: str
    workload: str
    interleaved: bool
    floor: float
    first: dict[str, float]
    seconds: dict[str, list[float]]

    def cells(self) -> list[str]:
        ours, peers = (self.seconds.get(name, []) for name in ENGINES)
        ratio = f"{statistics.median(peers) / statistics.median(ours):.2f}" if ours and peers else ""
        share = f"{self.floor / min(ours):.0%}" if ours else ""
        how = "in turn" if self.interleaved else "one after the other"
        return [self.model, self.workload, spread(ours), spread(peers), ratio, share, how]


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} ({min(seconds):.3f})" if seconds else ""


class Engine:
    """An engine in a process of its own, with compile caches in a folder of the caller's.

    Attributes:
        ready_after: seconds from its start until it takes requests.
        first_token_after: ... until a first one was answered.
    """

    def __init__(
        self, name: str, folder: Path, settings: Mapping[str, Any], caches: str, peer_path: str | None
    ) -> None:
        environment = dict(os.environ)
        for variable in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT"):
            environment[variable] = f"{caches}/{variable.lower()}"
        script = Path(__file__)
        if name == "vllm":
            script = script.with_name("bench_peer_vllm.py")
            if peer_path:
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, (peer_path, environment.get("PYTHONPATH"))))
        started = time.monotonic()
        reading, writing = os.pipe()
        command = [
            sys.executable,
            str(script),
            str(folder),
            "--settings",
            json.dumps(settings),
            "--answers",
            str(writing),
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=sys.stderr, pass_fds=[writing], env=environment, text=True
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        self._name = name
        try:
            self._answer()
            self.ready_after = time.monotonic() - started
            self.seconds("x1-in128-out1")
            self.first_token_after = time.monotonic() - started
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()

    def seconds(self, workload: str) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{workload}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        line = self._answers.readline()
        if not line:
            raise SystemExit(f"{self._name} ended with status {self._process.wait()}")
        return json.loads(line)


def serve(folder: Path, settings: Mapping[str, Any], answers: int) -> None:
    """What the process of wavecore does."""
    with LLM(folder, **{**SETTINGS, **settings}) as llm:
        print(f"{folder.name}: {kv_tokens(llm)}", file=sys.stderr)
        answer_requests(lambda work: measure(llm, work).seconds, answers)


def rounds(
    engines: Mapping[str, Engine], workload: str, repeats: int
) -> tuple[dict[str, float], dict[str, list[float]]]:
    """A first pass of each engine, then `repeats` in turn."""
    first = {name: engine.seconds(workload) for name, engine in engines.items()}
    once = [name for name in engines if name == "vllm" and first[name] > ONCE]
    seconds = {name: [first[name]] if name in once else [] for name in engines}
    for _ in range(repeats):
        for name, engine in engines.items():
            if name not in once:
                seconds[name].append(engine.seconds(workload))
    return first, seconds


class Comparison:
    """All rows of one run, and how long its engines took to start."""

    def __init__(self, args: argparse.Namespace, caches: str) -> None:
        self.args, self._caches = args, Path(caches)
        self.rows: list[Row] = []
        self.starts: list[dict[str, Any]] = []

    def model(self, folder: Path, names: Sequence[str]) -> None:
        """Measure one model; a row is printed as soon as it is there."""
        several = self.args.settings.get("tensor_parallel_size", 1) > 1  # GPUs for an engine
        in_turn = [name for name in names if name in HOST_BOUND and not (several or self.args.alone)]
        if in_turn:
            with ExitStack() as stack:
                settings = {"gpu_memory_utilization": SHARED_MEMORY}
                both = {name: stack.enter_context(self._started(name, folder, settings)) for name in self.args.engines}
                for workload in in_turn:
                    self._add(folder, workload, True, *rounds(both, workload, self.args.repeats))
        measured = {name: (dict[str, float](), dict[str, list[float]]()) for name in names if name not in in_turn}
        for engine in self.args.engines if measured else ():
            with self._started(engine, folder, PLACES_1024[engine]) as alone:
                for name, (first, seconds) in measured.items():
                    one = rounds({engine: alone}, name, self.args.repeats)
                    first.update(one[0])
                    seconds.update(one[1])
                    print(f"{folder.name}: {engine}, {name}: {one}", file=sys.stderr)  # the row waits for the other
        for name, figures in measured.items():
            self._add(folder, name, False, *figures)

    def _started(self, name: str, folder: Path, settings: Mapping[str, Any]) -> Engine:
        more = self.args.settings if name == "wavecore" else self.args.peer_settings
        caches = self._caches / f"{folder.name}-{name}"
        state = "filled" if caches.exists() else "empty"
        caches.mkdir(exist_ok=True)
        engine = Engine(name, folder, {**settings, **more}, str(caches), self.args.peer_path)
        ready, token = engine.ready_after, engine.first_token_after
        self.starts.append({"model": folder.name, "engine": name, "caches": state, "ready": ready, "token": token})
        print(
            f"{folder.name}: {name}, {state} caches: ready after {ready:.1f} s, first token {token:.1f} s", flush=True
        )
        return engine

    def _add(
        self, folder: Path, workload: str, in_turn: bool, first: dict[str, float], seconds: dict[str, list[float]]
    ) -> None:
        path, work = folder / "config.json", work_named(workload)
        spec = from_config(json.loads(path.read_text()), path)
        prompts: list[Any] = [item.prompt for item in work]
        rates = H200.of(self.args.settings.get("tensor_parallel_size", 1))
        floor = floor_of(spec, prompts, [item.max_tokens for item in work], rates).total
        row = Row(folder.name, workload, in_turn, floor, first, seconds)
        self.rows.append(row)
        print(f"| {' | '.join(row.cells())} |", flush=True)
        if self.args.json:
            figures = {"machine": machine(), "starts": self.starts, "rows": [asdict(r) for r in self.rows]}
            self.args.json.write_text(json.dumps(figures, indent=1))


def plot(results: Path, folder: Path) -> None:
    """Two drawings a model: throughput against batch, and time of a decode step against context."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    rows = [Row(**row) for row in json.loads(results.read_text())["rows"]]
    best = {(r.model, r.workload, name): min(r.seconds[name]) for r in rows for name in r.seconds}
    for model in dict.fromkeys(r.model for r in rows):
        for title, points, axis in (
            ("tokens/s against batch, context of 128 to 256", BATCHES, "batch"),
            ("ms a decode step of 16 rows against context", CONTEXTS, "context"),
        ):
            figure, axes = pyplot.subplots(figsize=(6, 4))
            for name in ENGINES:
                pairs = [
                    curve_point(short, long, best[model, short, name], best[model, long, name])
                    for short, long in zip(points[::2], points[1::2], strict=True)
                    if (model, long, name) in best
                ]
                axes.plot(*zip(*pairs, strict=True), marker="o", label=name)
            axes.set(title=f"{model}: {title}", xlabel=axis, xscale="log", ylim=(0, None))
            axes.legend()
            figure.savefig(folder / f"{model}-{axis}.svg")


def curve_point(short: str, long: str, prompts: float, whole: float) -> tuple[int, float]:
    """(batch, tokens/s) or (context, ms a step), from the seconds of one output token and of many."""
    rows, steps = len(work_named(long)), work_named(long)[0].max_tokens - work_named(short)[0].max_tokens
    step = (whole - prompts) / steps
    return (len(work_named(long)[0].prompt), 1000 * step) if long in CONTEXTS else (rows, rows / step)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="folders with config.json and weights")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="a workload; may come several times")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--alone", action="store_true", help="measure no row in turn")
    parser.add_argument("--peer-path", help="folder that holds vLLM")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--plot", type=Path, metavar="JSON", help="draw the curves of a run into the one folder given")
    parser.add_argument("--settings", type=json.loads, default={}, help="of wavecore, JSON")
    parser.add_argument("--peer-settings", type=json.loads, default={}, help="of vLLM, JSON")
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.answers is not None:
        serve(args.models[0], args.settings, args.answers)
        return
    if args.plot:
        plot(args.plot, args.models[0])
        return
    print(f"{machine()}\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|{'---:|' * (len(COLUMNS) - 2)}", flush=True)
    names = [*(args.only or WORKLOADS), *(BATCHES + CONTEXTS if args.curves else [])]
    with tempfile.TemporaryDirectory(prefix="bench-caches-") as caches:
        comparison = Comparison(args, caches)
        for folder in args.models:
            comparison.model(folder, names)


if __name__ == "__main__":
    main()
