"""The comparison of two servers: its tokenizer and arithmetic, and a run against a package that has vLLM's name."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import bench_serve_gpu
import pytest
from make_checkpoint import make

from wavecore.frontend.text.tokenizer_files import load_tokenizer

PEER = """
import argparse, json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
for name in ("model", "host", "tokenizer", "served-model-name", "dtype"):
    parser.add_argument(f"--{name}")
for name in ("port", "max-model-len", "max-num-seqs", "max-num-batched-tokens"):
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--gpu-memory-utilization", type=float)
parser.add_argument("--disable-uvicorn-access-log", action="store_true")
args = parser.parse_args()
assert Path(args.model, "config.json").exists() and Path(args.tokenizer, "tokenizer.json").exists()

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        assert body["model"] == args.served_model_name and body["stream"] and body["ignore_eos"]
        n = body["max_tokens"]
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": n}
        events = [{"choices": [{"text": " w"}]}] * n + [{"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(event)}\\n\\n" for event in events] + ["data: [DONE]\\n\\n"]
        self.send_response(200)
        self.end_headers()
        self.wfile.write("".join(lines).encode())

    def log_message(self, *args):
        pass

ThreadingHTTPServer.request_queue_size = 100
ThreadingHTTPServer((args.host, args.port), Handler).serve_forever()
"""


def peer(folder: Path, code: str) -> str:
    package = folder / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    (package / "api_server.py").write_text(code)
    return str(folder / "site")


def test_each_token_of_the_tokenizer_has_a_text(tmp_path: Path) -> None:
    bench_serve_gpu.write_tokenizer(tmp_path, 1000)
    tokenizer = load_tokenizer(tmp_path)
    texts = [tokenizer.decode([i]) for i in range(1000)]
    assert len(tokenizer) == 1000 and all(texts) and texts[256:258] == [" w0", " w1"]


def figures(factor: float) -> dict[str, object]:
    ms = {"p50": 2 * factor, "p99": 3000 * factor}
    return {"ttft_ms": ms, "inter_event_ms": ms, "output_tokens_per_second": factor, "client_lag_ms": {"p99": 1.0}}


def test_figures_of_one_server_over_those_of_the_other(tmp_path: Path) -> None:
    comparison = bench_serve_gpu.Comparison(tmp_path / "m", Namespace())
    comparison.rows += [("8 streams", "vllm", figures(2.0)), ("9 requests/s", "vllm", figures(2.0))]
    comparison.rows += [("8 streams", "wavecore", figures(1.0))]
    comparison.rows += [("8 streams", "LLM.generate", {"output_tokens_per_second": 4.0})]
    assert comparison.ratios() == [
        "| m | 8 streams | wavecore / vllm | 0.50 | 0.50 | 0.50 | 0.50 | 0.50 |  |",
        "| m | 8 streams | wavecore / LLM.generate |  |  |  |  | 0.25 |  |",
    ]
    assert bench_serve_gpu.cells(figures(1.0)) == ["2.0", "3,000", "2.0", "3,000", "1.0", "1.0"]


def test_a_server_that_does_not_start_is_named_with_what_it_said(tmp_path: Path) -> None:
    site = peer(tmp_path, "raise SystemExit('no such thing')")
    with pytest.raises(SystemExit, match=r"(?s)vllm did not start.*no such thing"):
        bench_serve_gpu.Server("vllm", tmp_path, {}, tmp_path, site)


def test_what_a_client_saw_may_be_larger_than_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    make("tiny", tmp_path)
    bench_serve_gpu.write_tokenizer(tmp_path, 1000)
    work = bench_serve_gpu.work_of(100, seed=0)
    settings = {"served_model_name": "bench"}
    with (
        bench_serve_gpu.Server("vllm", tmp_path, settings, tmp_path, peer(tmp_path, PEER)) as server,
        bench_serve_gpu.Load(1) as load,
    ):
        found = load.run(server.url, work, concurrency=4)
    assert found["requests"] == 100 and found["output_tokens"] == sum(item.max_tokens for item in work)


@pytest.mark.slow
def test_a_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make("tiny", tmp_path / "tiny")
    file = tmp_path / "out.json"
    command = [str(tmp_path / "tiny"), "--peer-path", peer(tmp_path, PEER), "--json", str(file), "--clients", "2"]
    command += ["--concurrency", "2", "4", "--warm-up", "6", "--seconds", "0.01"]
    bench_serve_gpu.main([*command, "--settings", json.dumps({"device": "cpu"})])
    [found] = json.loads(file.read_text())["models"]
    loads = [(load, server) for load, server, _ in found["rows"]]
    names = ["warm-up", "2 streams", "4 streams", loads[3][0]]
    assert loads == [*((n, "vllm") for n in names), *((n, "wavecore") for n in names), ("4 streams", "LLM.generate")]
    rows = {(load, server): figures for load, server, figures in found["rows"]}
    for load in names:
        ours, others = rows[load, "wavecore"], rows[load, "vllm"]
        for name in ("requests", "prompt_tokens", "output_tokens"):
            assert ours[name] == others[name] > 0  # the same work
        events = ours["output_tokens"] - ours["requests"]
        assert ours["inter_event_ms"] and ours["failed"] == 0 and events > 0
    assert found["ready"].keys() == {"vllm", "wavecore"}
    assert capfd.readouterr().out.count("wavecore / ") == 5
