"""A server as its operator sees it: scrapes, the admin socket, a load test, a chat from the terminal."""

from __future__ import annotations

import io
import json
import stat
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.scripted_model import EOS, ids_of, write_model
from tests.support.waiting import until

from wavecore.frontend.cli.main import main

COMMAND = [sys.executable, "-m", "wavecore.frontend.cli.main"]
GENERATION = 1  # <|im_start|>, the first token of a conversation


@dataclass
class RunningServer:
    url: str
    folder: Path

    def scrape(self) -> dict[tuple[str, ...], float]:
        """Name and values of labels -> value."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            text = answer.read().decode()
        return {
            (s.name, *(s.labels[name] for name in sorted(s.labels))): s.value
            for family in text_string_to_metric_families(text)
            for s in family.samples
        }

    def admin(self, method: str, path: str) -> tuple[int, Any]:
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(self.folder / "admin.sock"))) as client:
            answer = client.request(method, f"http://admin{path}", timeout=30)
        return answer.status_code, answer.json() if answer.status_code < 404 or answer.status_code == 503 else None


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[tuple[RunningServer, subprocess.Popen[str]]]:
    files = write_model(model, {GENERATION: [*ids_of("Paris, of course."), EOS]})
    command = [*COMMAND, "serve", "--model", files["model"], "--tokenizer", files["tokenizer"], "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, _, folder = process.stdout.readline().removeprefix("serving at ").partition("; runtime directory: ")
        found = RunningServer(url, Path(folder.strip()))
        try:
            yield found, process
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert process.returncode == 0 and not found.folder.exists()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    flags = ("--max-num-seqs", "4", "--served-model-name", "scripted", "--block-size", "8")
    with serving(tmp_path_factory.mktemp("model"), *flags) as (found, _):
        chat = {"messages": [{"role": "user", "content": "hi"}]}  # the process of its template stays
        httpx.post(f"{found.url}/v1/chat/completions", json=chat, timeout=60).raise_for_status()
        yield found


Run = Callable[..., "Done"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """A command, in this process: a client needs none of its own."""

    def run(*args: str, stdin: str = "") -> Done:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        code = main(args)
        return Done(code, *capsys.readouterr())

    return run


def test_a_load_test_and_what_the_server_counts(server: RunningServer, tmp_path: Path, run: Run) -> None:
    before = server.scrape()
    work = [{"prompt_token_ids": [5, 6, 7], "max_tokens": 4}, {"prompt": "abc", "max_tokens": 6}] * 5
    (tmp_path / "work.json").write_text(json.dumps(work))
    figures = tmp_path / "figures.json"
    done = run("bench", "serve", server.url, "--workload", str(tmp_path / "work.json"), "--request-rate", "200",
               "--output-json", str(figures), "--goal-e2e-ms", "60000")  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(figures.read_text())
    assert (found["requests"], found["failed"], found["output_tokens"], found["goodput_share"]) == (10, 0, 50, 1.0)
    assert found["prompt_tokens"] == 5 * 3 + 5 * len(ids_of("abc"))
    for words in ("requests                  10", "ttft_ms", "(p50 / p90 / p99 / max)", "client_lag_ms"):
        assert words in done.stdout
    ended = ("wavecore_requests_ended_total", "0", "length", "scripted")
    until(lambda: server.scrape()[ended] - before.get(ended, 0) == 10, "the engine's numbers")
    after = server.scrape()
    answered = ("wavecore_http_requests_total", "0", "/v1/completions", "200")
    assert after[answered] - before.get(answered, 0) == 10
    assert after["vllm:time_to_first_token_seconds_count", "0", "scripted"] >= 10
    assert after["wavecore_http_requests_in_flight", "0"] == 1  # the scrape itself


@pytest.mark.slow
def test_the_picture_of_a_load_test(server: RunningServer, tmp_path: Path) -> None:
    """In a process of its own: matplotlib keeps the files of its fonts open."""
    work = ["--num-prompts", "3", "--max-concurrency", "1", "--input-len", "5", "--plot", str(tmp_path / "x.svg")]
    subprocess.run([*COMMAND, "bench", "serve", server.url, "--chat", *work], check=True, stdout=subprocess.DEVNULL)
    drawn = (tmp_path / "x.svg").read_text()
    for title in ("time to first token", "time a token after the first", "whole request"):
        assert f"<!-- {title} -->" in drawn


def test_chat_with_a_server(server: RunningServer, run: Run) -> None:
    done = run("chat", "--url", server.url, stdin=f"hi\n{'long ' * 300}\nagain\n/quit\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "Paris, of course.\n" * 2
    assert "status 400" in done.stderr and "max_model_len" in done.stderr


def test_load_by_chat_and_requests_that_fail(server: RunningServer, run: Run) -> None:
    done = run("bench", "serve", f"{server.url}/v1/", "--chat", "--num-prompts", "3", "--max-concurrency", "1",
               "--input-len", "5", "--output-len", "7")  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "output_tokens             21" in done.stdout
    done = run("bench", "serve", server.url, "--num-prompts", "2", "--input-len", "999")
    assert done.returncode == 5 and "2 of 2 requests failed" in done.stderr
    assert "status 400" in done.stdout


def test_arguments_that_cannot_be(server: RunningServer, run: Run) -> None:
    for args, code, words in (
        ((), 2, "http://HOST:PORT"),
        (("localhost",), 2, "http://HOST:PORT"),
        (("http://127.0.0.1:1",), 5, "no OpenAI server"),
        ((server.url, "--max-num-seqs", "3"), 2, "the one of --url has its settings already"),
        ((server.url, "--request-rate", "-1"), 2, "at least 0"),
        ((server.url, "--num-prompts", "0"), 2, "at least one request"),
        ((server.url, "--plot", "x.txt"), 2, "must end in .svg"),
    ):
        done = run("bench", "serve", *args)
        assert (done.returncode, words in done.stderr) == (code, True), done.stderr
    done = run("chat", "--url", server.url, "--attach", str(server.folder))
    assert done.returncode == 2 and "give one" in done.stderr


def test_the_operators_socket(server: RunningServer) -> None:
    mode = (server.folder / "admin.sock").stat().st_mode
    assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
    assert server.admin("GET", "/requests") == (200, {"0": []})
    settings = server.admin("GET", "/settings")[1]["0"]
    assert settings["max_num_seqs"] == {"value": 4, "origin": "set"}
    assert settings["block_size"] == {"value": 8, "origin": "set"}
    assert settings["swap_space_gib"] == {"value": 0.0, "origin": "default"}
    assert settings["max_model_len"] == {"value": 256, "origin": "resolved"}
    status, trace = server.admin("GET", "/trace")
    assert status == 200 and {"X", "C"} >= {event["ph"] for event in trace["traceEvents"]}
    memory = server.admin("GET", "/memory")[1]
    assert memory["0"]["blocks"] > 0
    assert server.admin("POST", "/reset_prefix_cache") == (200, {"0": None})
    status, refused = server.admin("POST", "/profile/start")
    assert status == 400 and "scripted model" in refused["error"]
    status, refused = server.admin("POST", "/pause")
    assert status == 400 and "run in lockstep" in refused["error"]
    assert server.admin("GET", "/reset_prefix_cache")[0] == 405
    assert server.admin("GET", "/v1/models")[0] == 404  # nothing of the other door


def test_a_scrape_tells_of_the_processes_of_all_servers(server: RunningServer) -> None:
    """Each has a socket and a number of its own, which its end frees."""
    command = [*COMMAND, "serve", "--attach", str(server.folder), "--port", "0", "--metrics-compat", "none"]
    with subprocess.Popen([*command, "--api-server-count", "2"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            other = RunningServer(process.stdout.readline().removeprefix("serving at ").split(";")[0], server.folder)
            until(lambda: (server.folder / "admin-2.sock").exists(), "its sockets")
            assert not [name for name in other.scrape() if name[0].startswith("vllm:")]
            for found in (server.scrape(), other.scrape()):
                scrapes = [found.get(("wavecore_http_requests_total", n, "/metrics", "200"), 0.0) for n in "012"]
                assert scrapes[0] > 0 and sum(scrapes[1:]) > 0
                assert [found["wavecore_http_requests_in_flight", n] for n in "012"].count(1) == 1
        finally:
            process.terminate()
            process.wait(timeout=60)
    assert [path.name for path in server.folder.glob("admin*")] == ["admin.sock"]
    assert ("wavecore_http_requests_in_flight", "1") not in server.scrape()
    assert server.admin("GET", "/requests")[0] == 200


@pytest.mark.slow
def test_pause_and_resume(tmp_path: Path) -> None:
    with serving(tmp_path, "--dp-lockstep", "-dp", "2") as (found, _):
        body = {"prompt": [7], "max_tokens": 5, "ignore_eos": True}
        assert found.admin("POST", "/pause") == (200, {"0": None})
        with ThreadPoolExecutor() as beside:
            answer = beside.submit(httpx.post, f"{found.url}/v1/completions", json=body, timeout=60)
            until(lambda: sum(map(len, found.admin("GET", "/requests")[1].values())), "the request")
            assert not answer.done()
            assert found.admin("POST", "/resume")[0] == 200
            assert answer.result().json()["usage"]["completion_tokens"] == 5


@pytest.mark.slow
def test_the_socket_is_there_again_after_the_death_of_its_process(tmp_path: Path) -> None:
    with serving(tmp_path) as (found, process):
        children = psutil.Process(process.pid).children(recursive=True)
        (api,) = [child for child in children if "api server" in " ".join(child.cmdline())]
        api.kill()
        until(lambda: not api.is_running(), "its end")
        assert found.scrape()["wavecore_engine_up", "0", "script.json"] == 1  # whoever answers is its next life
        assert found.admin("GET", "/requests") == (200, {"0": []})
