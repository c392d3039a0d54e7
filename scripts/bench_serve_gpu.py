"""The OpenAI servers of wavecore and vLLM under the same load, one after the other on one GPU.

    python scripts/bench_serve_gpu.py FOLDER ... --peer-path SITE [--json FILE] [--only wavecore]

`make_checkpoint.py` makes the folders; SITE is where vLLM is installed when it is not importable as it is. Both servers
get the same flags and the same tokenizer, which this script writes: byte-level BPE of the model's size, in which each
token is a word, so that each one's text is an event. Prompts are token ids of seeded lengths (64 to 512 tokens, and 64
to 192 of output, temperature 0.6); none comes twice, so no prefix cache helps.

vLLM is measured first: after a warm-up, whose rate says how many requests take `--seconds`, at each of `--concurrency`
(a stream begins when another ends), and at Poisson times at half the best of these rates. wavecore then gets the same
requests at the same times. Last, `LLM.generate` asks wavecore's engine, to which it attaches, for as much as the
largest concurrency had. The load comes from `--clients` processes with the code of `wavecore bench serve`; how late
these woke up is shown, since a client that is late has measured itself.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from bench_gpu import machine
from bench_peer_vllm import ENVIRONMENT
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from wavecore.frontend.cli.bench import measure
from wavecore.frontend.cli.bench_serve import request_body
from wavecore.frontend.cli.workload import WorkItem, random_work
from wavecore.frontend.llm import LLM
from wavecore.frontend.load.load_run import LoadRun, report, run_load

COMMANDS = {
    "vllm": ["-m", "vllm.entrypoints.openai.api_server", "--disable-uvicorn-access-log", "--model"],
    "wavecore": ["-m", "wavecore.frontend.cli.main", "serve"],
}
SETTINGS: Mapping[
    str, Any
] = {  # the flags are called the same; 8,192 tokens a step is what vLLM's server takes by itself
    "dtype": "bfloat16",
    "max_model_len": 4096,
    "max_num_seqs": 512,
    "max_num_batched_tokens": 8192,
    "gpu_memory_utilization": 0.85,
    "served_model_name": "bench",
}
INPUTS, OUTPUTS, TEMPERATURE = (64, 512), (64, 192), 0.6
WARM_UP_REQUESTS = 512
START_SECONDS, END_SECONDS = 300.0, 30.0
COLUMNS = {
    "first token ms: median": ("ttft_ms", "p50"),
    "99 %": ("ttft_ms", "p99"),
    "between tokens ms: median": ("inter_event_ms", "p50"),
    "99 %, too": ("inter_event_ms", "p99"),
    "output tokens/s": ("output_tokens_per_second",),
    "client late ms, 99 %": ("client_lag_ms", "p99"),
}


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer in Hugging Face form whose `vocab_size` tokens are the bytes and numbered words."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(f"Ġw{i}" for i in range(vocab_size))][:vocab_size]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def work_of(count: int, seed: int) -> list[WorkItem]:
    return random_work(count, INPUTS, OUTPUTS, TEMPERATURE, seed=seed)


class Server:
    """A server in a process group of its own, from its start until it is ready; its words go into a file of `folder`.

    Attributes:
        ready_after: seconds from its start until it was healthy.
        runtime_dir: of wavecore's engine.
    """

    def __init__(
        self, name: str, model: Path, settings: Mapping[str, Any], folder: Path, peer_path: str | None
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:  # vLLM does not tell which port it took
            port = probe.getsockname()[1]
        environment = dict(os.environ)
        self.url, self.runtime_dir = f"http://127.0.0.1:{port}/v1/completions", folder / "runtime"
        chosen = {**settings, "host": "127.0.0.1", "port": port, "tokenizer": folder}
        if name == "vllm":
            environment = {**ENVIRONMENT, **environment}
            if peer_path:
                environment["PYTHONPATH"] = os.pathsep.join(filter(None, (peer_path, environment.get("PYTHONPATH"))))
        else:
            chosen["runtime_dir"] = self.runtime_dir
        # -P: folders here are called like other packages (`kernels`), which vLLM must not take for them
        command = [sys.executable, "-P", *COMMANDS[name], str(model)]
        for setting, value in chosen.items():
            command += [f"--{setting.replace('_', '-')}", str(value)]
        self._name, self._log = name, folder / f"{name}.log"
        started = time.monotonic()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            while not self._is_healthy(f"http://127.0.0.1:{port}/health"):
                if self._process.poll() is not None or time.monotonic() > started + START_SECONDS:
                    said = self._log.read_text()  # of several processes, of which the last to speak knows least
                    errors = "\n".join([line for line in said.splitlines() if "Error" in line][-20:])
                    raise SystemExit(f"{name} did not start:\n{errors}\n...\n{said[-3000:]}")
                time.sleep(0.1)
        except BaseException:
            self.close()
            raise
        self.ready_after = time.monotonic() - started

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_healthy(self, url: str) -> bool:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5):
                return True
        except OSError:
            return False

    def close(self) -> None:
        """Drain it; what is left of its group after a while is killed."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{self._name} did not end within {END_SECONDS:.0f} s", flush=True)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def make_load() -> None:
    """What a process of the load does: a run for each line of standard input, the arguments of `run_load`."""
    # Not standard output itself: under PYTHONUNBUFFERED it loses what a pipe does not take at once.
    with os.fdopen(os.dup(1), "w") as out:
        print("ready", file=out, flush=True)
        for arguments in sys.stdin:
            run = uvloop.run(run_load(**json.loads(arguments)))
            print(msgspec.json.encode(run).decode(), file=out, flush=True)


class Load:
    """Processes that ask a server, each for its share of the requests."""

    def __init__(self, clients: int) -> None:
        command = [sys.executable, __file__, "--make-load"]
        self._clients = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(clients)
        ]
        for client in self._clients:
            self._answer(client)

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.kill()
            client.communicate()

    def _answer(self, client: subprocess.Popen[str]) -> str:
        assert client.stdout is not None
        if not (text := client.stdout.readline()):
            raise SystemExit(f"a process of the load ended with status {client.wait()}")
        return text

    def run(self, url: str, work: Sequence[WorkItem], rate: float = 0.0, concurrency: int = 0) -> dict[str, Any]:
        """Figures as those of `wavecore bench serve`. Poisson processes add up to one; each client draws its own.

        Raises:
            SystemExit: a request failed.
        """
        n = len(self._clients)
        bodies = [request_body(item, "bench", chat=False) for item in work]
        for i, client in enumerate(self._clients):
            share = {"bodies": bodies[i::n], "rate": rate / n, "concurrency": (concurrency + i) // n, "seed": i}
            print(json.dumps({"url": url, **share}), file=client.stdin, flush=True)
        runs = [msgspec.json.decode(self._answer(client), type=LoadRun) for client in self._clients]
        samples = [sample for run in runs for sample in run.samples]
        lags = [lag for run in runs for lag in run.lags]
        figures = report(LoadRun(samples, max(run.seconds for run in runs), lags), {})
        if figures["failed"]:
            raise SystemExit(f"{figures['failed']} requests failed: {figures['errors']}")
        return figures


class Comparison:
    """One model on both servers.

    Attributes:
        rows: [load, server, figures] of each measurement.
    """

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        self.model, self._args = model, args
        self.rows: list[tuple[str, str, dict[str, Any]]] = []
        self.ready: dict[str, float] = {}
        self._count, self._rate = 0, 0.0  # requests of a point; a second at Poisson times

    def run(self, load: Load) -> None:
        """Measure; a row is printed as soon as it is there."""
        vocab_size = json.loads((self.model / "config.json").read_text())["vocab_size"]
        for name in self._args.only or COMMANDS:
            settings = {**SETTINGS, **(self._args.peer_settings if name == "vllm" else self._args.settings)}
            with tempfile.TemporaryDirectory(prefix="bench-serve-") as folder:
                write_tokenizer(Path(folder), vocab_size)
                with Server(name, self.model, settings, Path(folder), self._args.peer_path) as server:
                    self.ready[name] = server.ready_after
                    print(f"{self.model.name}: {name} ready after {server.ready_after:.1f} s", flush=True)
                    self._points(name, server, load)
                    if name == "wavecore":
                        self._offline(server)

    def _points(self, name: str, server: Server, load: Load) -> None:
        most = max(self._args.concurrency)
        work = work_of(self._args.warm_up, seed=0)
        self._add("warm-up", name, load.run(server.url, work, concurrency=most))
        self._count = self._count or round(self._args.seconds * self._requests_a_second("warm-up"))
        for seed, streams in enumerate(self._args.concurrency, 1):
            found = load.run(server.url, work_of(max(self._count, 2 * streams), seed), concurrency=streams)
            self._add(f"{streams} streams", name, found)
        self._rate = self._rate or max(self._requests_a_second(f"{n} streams") for n in self._args.concurrency) / 2
        work = work_of(max(1, round(self._rate * self._args.seconds)), seed=100)
        self._add(f"{self._rate:.1f} requests/s", name, load.run(server.url, work, rate=self._rate))

    def _requests_a_second(self, load: str) -> float:
        return next(float(figures["requests_per_second"]) for name, _, figures in self.rows if name == load)

    def _offline(self, server: Server) -> None:
        most = max(self._args.concurrency)
        with LLM.connect(server.runtime_dir) as llm:
            seconds = measure(llm, work := work_of(max(self._count, 2 * most), seed=200)).seconds
        figures = {"output_tokens_per_second": sum(item.max_tokens for item in work) / seconds}
        self._add(f"{most} streams", "LLM.generate", figures)

    def _add(self, load: str, name: str, figures: dict[str, Any]) -> None:
        self.rows.append((load, name, figures))
        print(line([self.model.name, load, name, *cells(figures)]), flush=True)

    def ratios(self) -> list[str]:
        """Of each load, lines of wavecore's figures over vLLM's and over those of `LLM.generate`."""
        figures = {(load, name): found for load, name, found in self.rows}
        lines = []
        for load, peer in figures:
            if peer != "wavecore" and (ours := figures.get((load, "wavecore"))):
                numbers = quotients(ours, figures[load, peer])
                lines.append(line([self.model.name, load, f"wavecore / {peer}", *numbers]))
        return lines


def values_of(figures: Mapping[str, Any]) -> list[float | None]:
    """A number a column, None where it was not measured."""
    found: list[Any] = []
    for first, *rest in COLUMNS.values():
        value = figures.get(first)
        found.append(value.get(rest[0]) if rest and value is not None else value)
    return found


def cells(figures: Mapping[str, Any]) -> list[str]:
    return ["" if value is None else f"{value:,.0f}" if value > 999 else f"{value:.1f}" for value in values_of(figures)]


def quotients(ours: Mapping[str, Any], others: Mapping[str, Any]) -> list[str]:
    pairs = list(zip(values_of(ours), values_of(others), strict=True))[:-1]  # not of how late the client was
    return [*(f"{a / b:.2f}" if a is not None and b else "" for a, b in pairs), ""]


def line(values: Sequence[str]) -> str:
    return f"| {' | '.join(values)} |"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", help="folders with config.json and weights")
    parser.add_argument("--peer-path", help="folder that holds vLLM")
    parser.add_argument("--only", choices=COMMANDS, action="append", help="a server")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--seconds", type=float, default=8.0, help="a point, at the warm-up's rate")
    parser.add_argument("--warm-up", type=int, default=WARM_UP_REQUESTS, help="requests")
    parser.add_argument("--clients", type=int, default=4, help="processes that make the load")
    parser.add_argument("--settings", type=json.loads, default={}, help="of wavecore, JSON")
    parser.add_argument("--peer-settings", type=json.loads, default={}, help="of vLLM, JSON")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--make-load", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.make_load:
        make_load()
        return
    print(
        f"{machine()}\n\n{line(['model', 'load', 'server', *COLUMNS])}\n|---|---|---|{'---:|' * len(COLUMNS)}",
        flush=True,
    )
    found = []
    with Load(args.clients) as load:
        for model in args.models:
            comparison = Comparison(model, args)
            found.append(comparison)
            try:
                comparison.run(load)
            finally:
                print("\n".join(comparison.ratios()), flush=True)
                if args.json:
                    rows = [{"model": c.model.name, "ready": c.ready, "rows": c.rows} for c in found]
                    args.json.write_text(json.dumps({"machine": machine(), "models": rows}, indent=1))


if __name__ == "__main__":
    main()
