"""The server's processes: how they start and end, and what clients see when one dies."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.support.environment import environment
from tests.support.scripted_model import write_model
from tests.support.served import COMMAND, Served, served
from tests.support.waiting import until

import wavecore
from wavecore.frontend.cli import serve
from wavecore.transport.errors import ConfigError

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {"prompt": [9], "max_tokens": 200, "ignore_eos": True, "stream": True}  # four seconds


@pytest.fixture(scope="module")
def slow_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    files = write_model(tmp_path_factory.mktemp("model"), step_seconds=0.02, faults={"raise_at_step": 10**9})
    return [files["model"], "--tokenizer", files["tokenizer"]]


@pytest.fixture(scope="module")
def slow(slow_files: list[str], runtime_folder: Path) -> Iterator[Served]:
    flags = ["--max-num-seqs", "4", "--max-num-queued-reqs", "8", "--write-timeout", "1"]
    # Chunks hold the model's name: with a long one a reader that stops fills the system's buffers soon.
    with served(*slow_files, *flags, "--served-model-name", "m" * 16_000) as server:
        yield server


class Reader(threading.Thread):
    """Reads a stream to its end, whatever that is."""

    def __init__(self, server: Served, body: dict[str, Any]) -> None:
        super().__init__()
        self.server, self.body = server, body
        self.begun = threading.Event()
        self.status = 0
        self.lines: list[str] = []
        self.fault: Exception | None = None
        self.start()
        assert self.begun.wait(30)

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.server.url + COMPLETIONS, json=self.body, timeout=60) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    self.begun.set()
                    self.lines += [line] if line else []
        except httpx.HTTPError as error:
            self.fault = error
        self.begun.set()


@contextlib.contextmanager
def _connected(server: Served) -> Iterator[wavecore.LLM]:
    llm = wavecore.connect(server.runtime_dir)
    try:
        yield llm
    finally:
        llm.shutdown()


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    command, env = [*COMMAND, *flags], environment()
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=False)


# --- the start --------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken(scripted_files: list[str]) -> None:
    """Told before the model is loaded, with who holds it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = run(*scripted_files, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 3
    assert f"(pid {os.getpid()})" in done.stderr and "Traceback" not in done.stderr


def test_a_unix_socket(scripted_files: list[str], tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))  # as a server leaves it that was killed
    command = [*COMMAND, *scripted_files, "--uds", str(path)]
    env = environment()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None and "unix:" in process.stdout.readline()
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as client:
            assert client.get("/health").status_code == 200
        done = run(*scripted_files, "--uds", str(path))
        assert done.returncode == 3 and "another server listens there" in done.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.communicate()
    assert not path.exists()


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--api-server-count", "0"], "--api-server-count must be a whole number from 1 to 64"),
        (["--ssl-keyfile", "x"], "go together"),
        (["--ssl-keyfile", "x", "--ssl-certfile", "y"], "cannot be used"),
        (["--api-key-file", "/nowhere"], "--api-key-file /nowhere"),
        (["--port", "70000"], "--port must be a whole number from 0 to 65535"),
        (["--write-timeout", "0"], "write_timeout must be a number above 0"),
    ],
)
def test_a_wrong_flag(scripted_files: list[str], flags: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        serve.run([*scripted_files, *flags])


def test_attached_and_by_itself(slow: Served, tmp_path: Path) -> None:
    """Further servers of the same engines: two processes with TLS; and a single one at a socket that it was given."""
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*make, "-keyout", key, "-out", cert], check=True, capture_output=True)
    tls = ["--ssl-keyfile", key, "--ssl-certfile", cert]
    with served("--attach", str(slow.runtime_dir), "--api-server-count", "2", *tls) as other:
        assert other.url.startswith("https://")
        assert other.events(COMPLETIONS, {"prompt": [5], "max_tokens": 2})
        assert len(psutil.Process(other.process.pid).children()) == 2
    assert slow.get("/health").status_code == 200
    with socket.create_server(("127.0.0.1", 0)) as listener:
        command = [*COMMAND[:2], "wavecore.frontend.serve", "--attach", str(slow.runtime_dir)]
        command += ["--fd", str(listener.fileno())]
        with subprocess.Popen(command, pass_fds=[listener.fileno()], env=environment()) as process:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            assert httpx.get(url + "/v1/models", timeout=30).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0


# --- requests ---------------------------------------------------------------------------------------------------------


def ask(server: Served, body: dict[str, Any], receive_buffer: int = 0) -> socket.socket:
    """A connection that has sent a request, and reads nothing yet."""
    connection = server.connect(receive_buffer)
    connection.sendall(request_of(body))
    return connection


def request_of(body: dict[str, Any]) -> bytes:
    data = json.dumps(body)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return f"{head}\r\n\r\n{data}".encode()


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("queued", [False, True])
def test_a_client_that_leaves(slow: Served, streams: bool, queued: bool) -> None:
    """E-41, E-42: what it asked for ends in the engine, running or queued."""
    with contextlib.ExitStack() as stack, _connected(slow) as llm:
        others = [stack.enter_context(ask(slow, LONG)) for _ in range(4 * queued)]
        until(lambda: len(llm.debug_requests()) == len(others), "the others")
        with ask(slow, {**LONG, "stream": streams}):
            until(lambda: len(llm.debug_requests()) == len(others) + 1, "the request")
            left = time.monotonic()
        until(lambda: len(llm.debug_requests()) == len(others), "the end of what a client left")
        assert time.monotonic() - left < 3.0, "that is its own end"
        stack.close()
        until(lambda: not llm.debug_requests(), "the end of the others")


def test_a_client_that_leaves_with_a_second_request_on_its_way(slow: Served) -> None:
    """It is aborted as any other, and its neighbours in a step, whose deltas are written behind its own, lose none."""
    until(slow.is_idle, "an idle server")
    with slow.connect() as connection:
        connection.sendall(2 * request_of(LONG))
        until(lambda: slow.get("/load").json()["server_load"] == 1, "a request")
        neighbour = Reader(slow, {**LONG, "max_tokens": 50})
    began = time.monotonic()
    until(slow.is_idle, "its abort, and the neighbour's end")
    assert time.monotonic() - began < 3, "that is its own end"
    neighbour.join()
    assert neighbour.lines[-1] == "data: [DONE]"


def test_too_many(slow: Served) -> None:
    """429, and when to come again."""
    first = Reader(slow, {**LONG, "n": 4, "max_tokens": 60})
    waiting = threading.Thread(
        target=lambda: slow.post(COMPLETIONS, {**LONG, "n": 8, "stream": False, "max_tokens": 2})
    )
    waiting.start()
    until(lambda: slow.get("/load").json()["server_load"] == 2, "both requests")
    answer = until(lambda: _refused(slow), "a full queue")
    assert answer.json()["error"]["code"] == "overloaded" and 1 <= int(answer.headers["retry-after"]) <= 60
    first.join()
    waiting.join()


def _refused(server: Served) -> httpx.Response | None:
    answer = server.post(COMPLETIONS, {**LONG, "n": 8, "stream": False, "max_tokens": 1})
    return answer if answer.status_code == 429 else None


@pytest.mark.parametrize("where", ["body", "header"])
def test_a_deadline(slow: Served, where: str) -> None:
    """Before the first byte a status, behind it an event; a finish_reason that OpenAI has not never comes."""
    given: dict[str, Any] = {"timeout": 0.4} if where == "body" else {}
    headers = {"x-wavecore-timeout": "0.4", "x-wavecore-priority": "-1"} if where == "header" else {}
    whole = slow.post(COMPLETIONS, {**LONG, **given, "stream": False}, headers=headers)
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
    stream = slow.post(COMPLETIONS, {**LONG, **given}, headers=headers)
    assert stream.status_code == 200
    last = stream.text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    assert '"finish_reason":"' not in stream.text
    assert slow.post(COMPLETIONS, LONG, headers={"x-wavecore-timeout": "soon"}).status_code == 400


def test_a_reader_that_stops(slow: Served) -> None:
    """A-35: it is cut after --write-timeout, and its request ends; others go on."""
    began = time.monotonic()
    with ask(slow, {**LONG, "n": 3}, receive_buffer=4096) as connection:
        until(lambda: not slow.is_idle(), "its request")
        assert slow.events(COMPLETIONS, {**LONG, "max_tokens": 20})
        until(slow.is_idle, "the end of its request")
        data = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(1 << 20):
                data += part
    assert b"[DONE]" not in data, f"all of it was sent in {time.monotonic() - began:.1f} s"


# --- ends -------------------------------------------------------------------------------------------------------------


def test_sigterm_drains(slow_files: list[str]) -> None:
    with served(*slow_files) as server:
        reader = Reader(server, {**LONG, "max_tokens": 50})
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503, "ready to say no")
        refused = server.post(COMPLETIONS, LONG)
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.get("/livez").status_code == 200
        reader.join()
        assert reader.lines[-1] == "data: [DONE]"
        assert server.process.wait(20) == 0


def test_sigterm_twice(slow_files: list[str]) -> None:
    with served(*slow_files) as server:
        reader = Reader(server, LONG)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: server.get("/ready").status_code == 503, "ready to say no")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
        assert time.monotonic() - began < 3.5, "the stream ran to its end"
        reader.join()


def test_every_process_may_be_killed(slow_files: list[str]) -> None:
    """An API process: its requests end at once, and another one serves. An engine: an event, 503 until it is back. The
    server itself: nothing stays."""
    with served(*slow_files) as server:
        reader = Reader(server, LONG)
        with _connected(server) as llm:
            assert llm.debug_requests()
            server.process_named("api server").kill()
            until(lambda: not llm.debug_requests(), "the end of its requests", seconds=2.5)
            reader.join()
            assert isinstance(reader.fault, httpx.RemoteProtocolError)
        assert httpx.get(server.url + "/health", timeout=30).status_code == 200
        reader = Reader(server, LONG)
        server.process_named("engine").kill()
        until(lambda: server.get("/health").status_code == 503, "ill health")
        assert server.post(COMPLETIONS, LONG).status_code == 503
        reader.join()
        assert json.loads(reader.lines[-1].removeprefix("data: "))["error"]["code"] == "engine_dead"
        until(lambda: server.get("/health").status_code == 200, "health")
        assert server.get("/health?deep=1").status_code == 200
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        server.process.wait()
        psutil.wait_procs(children, timeout=20)
        assert not [child for child in children if child.is_running()]
