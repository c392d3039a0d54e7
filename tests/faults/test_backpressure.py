"""More load than there is room for, clients that stand still, and peers that break the protocol."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import Overloaded
from wavecore.transport.io.sockets import make_context, make_socket
from wavecore.transport.wire.codec import MAX_FRAME_BYTES, encode
from wavecore.transport.wire.messages import Hello

CLIENT = """
import sys
from wavecore import LLM, SamplingParams
from wavecore.transport.errors import WavecoreError
path, requests, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
with LLM.connect(path) as llm:
    streams = [llm.stream({"prompt_token_ids": [5, 6, i + 1]}, params) for i in range(requests)]
    count = sum(len(next(stream).outputs[0].token_ids) for stream in streams)
    print("running", flush=True)
    try:
        count += sum(len(output.outputs[0].token_ids) for stream in streams for output in stream)
        print("finished", count, flush=True)
    except WavecoreError as error:
        print(error.code, error, flush=True)
"""


class ClientProcess:
    """A second client, attached from a process of its own, with some requests that run."""

    def __init__(self, runtime_dir: Path, requests: int, tokens: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CLIENT, str(runtime_dir), str(requests), str(tokens)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "running"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def close(self) -> None:
        self.process.kill()
        with self.process:
            pass


@pytest.fixture
def second_client() -> Iterator[Any]:
    made: list[ClientProcess] = []

    def start(*args: Any) -> ClientProcess:
        made.append(ClientProcess(*args))
        return made[-1]

    yield start
    for client in made:
        client.close()


def test_more_bytes_than_may_queue(deploy: Any) -> None:
    """Prompts come that are larger together than `max_num_queued_bytes`.

    Those over the bound get `Overloaded` at once; the others finish.
    """
    with deploy({"step_seconds": 0.01}, max_num_seqs=1, max_num_queued_bytes=40_000) as deployed:
        long = [deployed.stream(0, 8, prompt=tuple(range(1 + i, 900 + i))) for i in range(30)]
        refused = [stream for stream in long if isinstance(stream.end, Overloaded)]
        assert 0 < len(refused) < 30
        for stream in long:
            if stream not in refused:
                stream.check_finished()


def test_client_that_stands_still_for_a_while(deploy: Any, second_client: Any) -> None:
    """A client process is stopped (SIGSTOP) for less than ten seconds.

    Its output waits, merged; when it goes on it gets every token. Other clients notice nothing.
    """
    with deploy({"step_seconds": 0.002}) as deployed:
        client = second_client(deployed.runtime_dir, 10, 150)
        client.signal(signal.SIGSTOP)
        deployed.stream(1, 100).check_finished()
        until(lambda: deployed.call("stats")["running"] == 0)
        client.signal(signal.SIGCONT)
        assert client.line() == "finished 1500"


@pytest.mark.slow
def test_client_that_stands_still_for_long(deploy: Any, second_client: Any) -> None:
    """A client process is stopped for more than ten seconds, with endless requests running.

    The engine ends its requests and holds nothing for it; its memory stays bounded. When it comes back, its requests
    end with an error that says so, and new ones work.
    """
    with deploy({"step_seconds": 0.0, "max_model_len": 100_000, "num_blocks": 10_000}) as deployed:
        client = second_client(deployed.runtime_dir, 20, 90_000)
        engine = psutil.Process(deployed.engine.pid)
        client.signal(signal.SIGSTOP)
        before = engine.memory_info().rss
        until(lambda: deployed.call("stats")["running"] == 0, "its end", seconds=60)
        assert engine.memory_info().rss - before < 300 << 20
        client.signal(signal.SIGCONT)
        assert client.line().startswith("engine_dead")
        deployed.check_serving()


@pytest.mark.slow
def test_killed_client(deploy: Any, second_client: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """One of several clients is killed (SIGKILL) with requests running.

    The engine ends them within seven seconds, gives their blocks back and logs it; other clients notice nothing.
    """
    with deploy({"step_seconds": 0.01}) as deployed:
        client = second_client(deployed.runtime_dir, 10, 4000)
        client.signal(signal.SIGKILL)
        deployed.stream(1, 100).check_finished()
        until(lambda: deployed.call("stats")["running"] == 0)
    assert "10 requests of client" in capsys.readouterr().err


def test_client_that_leaves(deploy: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A client program ends, with requests running or without.

    It says goodbye: its requests end at once, and nobody is alarmed by a line in the log.
    """
    with deploy({"step_seconds": 0.01}) as deployed:
        with LLM.connect(deployed.runtime_dir) as idle, LLM.connect(deployed.runtime_dir) as busy:
            params = SamplingParams(max_tokens=4000, temperature=0, ignore_eos=True)
            next(busy.stream({"prompt_token_ids": [1, 2, 3]}, params))
            busy.shutdown()
            idle.shutdown()
        until(lambda: deployed.call("stats")["running"] == 0)
    # Of one that is only absent the engine waits for some seconds, and says so then.
    assert "client" not in capsys.readouterr().err


def test_hostile_frames(deploy: Any) -> None:
    """Something with access to the sockets sends random, over-size and truncated frames.

    They are counted and dropped; the engine keeps serving and no stream is disturbed.
    """
    with deploy({"step_seconds": 0.005}) as deployed:
        streams = [deployed.stream(i, 100) for i in range(5)]
        entry = deployed.engine
        context = make_context()
        push = make_socket(context, zmq.PUSH, entry.input)
        dealer = make_socket(context, zmq.DEALER, entry.output, identity=b"h" * 16)
        for socket in (push, dealer):
            socket.setsockopt(zmq.SNDTIMEO, 20_000)
            for frames in ([b""], [b"\xc1" * 50], encode(Hello()) * 3, [b"\x91" * 5000], [os.urandom(100)] * 70):
                socket.send_multipart(frames)
            socket.send(bytes(MAX_FRAME_BYTES + 1), copy=False)
        for stream in streams:
            stream.check_finished()
        deployed.check_serving()
        for socket in (push, dealer):
            socket.close(0)
        context.term()


def test_slow_reader_gets_everything(deploy: Any) -> None:
    """A stream's reader is slower than the engine.

    Deltas wait merged in one place, not in a queue; the reader gets every token once.
    """
    with deploy() as deployed:
        params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
        stream = deployed.llm.stream({"prompt_token_ids": [1, 2, 3]}, params)
        first = next(stream)
        until(lambda: deployed.call("stats")["running"] == 0)
        rest = list(stream)
        tokens = [token for output in (first, *rest) for token in output.outputs[0].token_ids]
        assert len(tokens) == 1000
        assert len(rest) < 100
