"""Real engine processes with the scripted model, requests whose right answer is known, and a check that nothing stays.

A `Deployed` is one deployment under test. Leaving it asserts what every fault test promises: no process, folder,
shared memory, descriptor or thread is left, and where an engine still lives, its blocks are back and its books are in
order.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.support.scripted_model import scripted_output
from tests.support.waiting import until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import WavecoreError
from wavecore.transport.processes.deployment import Cause, EngineEntry
from wavecore.transport.processes.supervisor import Limits, Supervisor

LIMITS = Limits(ready=60, drain=5, step=60, idle=1.0, grace=5)  # idle: long enough for a machine under load
SCRIPT: dict[str, Any] = {"vocab_size": 1000, "max_model_len": 4096, "num_blocks": 400, "eos_token_id": []}

# A program that serves until a signal ends it, with {script} and {drain} filled in.
SERVE = """
import sys
from wavecore.frontend.client.service import make_supervisor
from wavecore.frontend.compat import engine_config
config = engine_config({{"model": "scripted:{script}", "max_num_seqs": 4, "shutdown_timeout": {drain}}})
print("importing is done", flush=True)
supervisor = make_supervisor(config)
sys.exit(supervisor.serve(lambda *phase: print(*phase, flush=True), lambda path: print("ready", path, flush=True)))
"""


def right_answer(prompt: Sequence[int], count: int) -> list[int]:
    """What the model of `SCRIPT` says to a greedy request when nothing goes wrong."""
    return scripted_output(prompt, vocab_size=SCRIPT["vocab_size"], max_tokens=count, temperature=0)[0]


@pytest.fixture
def model(tmp_path: Path) -> str:
    """What launchers start: that of `SCRIPT`, in no hurry."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps({**SCRIPT, "step_seconds": 0.01}))
    return f"scripted:{path}"


@dataclass
class Stream:
    """One request, read token by token in a thread of its own."""

    prompt: tuple[int, ...]
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    ends: list[str | WavecoreError] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None

    @property
    def end(self) -> str | WavecoreError:
        """How it ended; every request does, once, in bounded time."""
        assert self.thread is not None
        self.thread.join(60)
        assert len(self.ends) == 1, f"ended {len(self.ends)} times: {self.ends}"
        return self.ends[0]

    @property
    def error(self) -> WavecoreError:
        end = self.end
        assert isinstance(end, WavecoreError), end
        return end

    def check_finished(self) -> None:
        """All tokens, no hole, no duplicate."""
        assert self.end == "length", self.end
        assert self.tokens == right_answer(self.prompt, self.max_tokens)

    def check_prefix(self) -> None:
        """What arrived before the end is right as far as it goes."""
        assert self.tokens == right_answer(self.prompt, len(self.tokens))


class Streams:
    """Requests of a client, each in a thread of its own."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.streams: list[Stream] = []

    def stream(self, number: int, max_tokens: int = 50, llm: LLM | None = None, **options: Any) -> Stream:
        """Start a request; `number` makes its prompt its own."""
        params = options.pop("params", None) or SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        prompt = options.pop("prompt", None) or tuple((number * 7919 + i) % 509 + 1 for i in range(5 + number % 40))
        stream = Stream(prompt, max_tokens)
        stream.thread = threading.Thread(
            target=self._read, args=(llm or self.llm, stream, params, options), name=f"stream {number}", daemon=True
        )
        stream.thread.start()
        self.streams.append(stream)
        return stream

    def _read(self, llm: LLM, stream: Stream, params: SamplingParams, options: dict[str, Any]) -> None:
        try:
            for output in llm.stream({"prompt_token_ids": list(stream.prompt)}, params, **options):
                [choice] = output.outputs
                stream.tokens += choice.token_ids
                stream.first.set()
                if output.finished:
                    stream.ends.append(str(choice.finish_reason))
        except WavecoreError as error:
            stream.ends.append(error)
        finally:
            stream.first.set()


class Deployed(Streams):
    """A running deployment of one scripted engine."""

    def __init__(self, supervisor: Supervisor, script: Path) -> None:
        self.supervisor, self._script = supervisor, script
        self.runtime_dir = supervisor.start()
        super().__init__(LLM.connect(self.runtime_dir))

    def heal(self) -> None:
        """The next life of the engine has no faults."""
        self._script.write_text(json.dumps(SCRIPT))

    def damage(self) -> None:
        """No further life of the engine gets ready."""
        self._script.write_text("no script")

    @property
    def engine(self) -> EngineEntry:
        return self.supervisor.deployment().engines[0]

    def call(self, method: str, **args: Any) -> Any:
        return self.llm._service.client.call(method, args).result(30).value

    def cause_of(self, epoch: str) -> Cause:
        """Why that life of the engine ended."""
        return until(lambda: self.engine.cause if self.engine.epoch == epoch else None)

    def recovered(self, epoch: str) -> EngineEntry:
        """The engine in its next life, and the client attached to it."""
        until(lambda: self.engine.state == "ready" and self.engine.epoch != epoch)
        until(lambda: self.llm._service.client.engines)
        return self.engine

    def check_serving(self) -> None:
        """The engine takes a new request and answers it right."""
        stream = self.stream(987_654, 10)
        stream.check_finished()


Deploy = Callable[..., Any]


@pytest.fixture
def deploy(tmp_path: Path) -> Deploy:
    """`with deploy(script={...}, limits=..., **config) as deployed:`; see `Deployed`."""

    @contextmanager
    def start(
        script: dict[str, Any] | None = None,
        *,
        limits: Limits = LIMITS,
        **config: Any,
    ) -> Iterator[Deployed]:
        path = tmp_path / "script.json"
        path.write_text(json.dumps({**SCRIPT, **(script or {})}))
        settings = EngineConfig(model=f"scripted:{path}", skip_tokenizer_init=True, **{"max_num_seqs": 64, **config})
        supervisor = make_supervisor(settings, limits)
        deployed = None
        try:
            deployed = Deployed(supervisor, path)
            yield deployed
            for stream in deployed.streams:
                assert stream.end
            if supervisor.deployment().state == "ready" and deployed.llm._service.client.engines:
                assert deployed.call("check_integrity") is True
                stats = deployed.call("stats")
                assert stats["running"] == stats["waiting"] == stats["cache_usage"] == 0
        finally:
            if deployed is not None:
                deployed.llm.shutdown()
            supervisor.stop()
        assert supervisor.runtime_dir is not None
        assert not supervisor.runtime_dir.exists()

    return start


@pytest.fixture(autouse=True)
def _rules(nothing_left: None, quick_restarts: None) -> None:
    """Each test leaves nothing behind, and no engine is waited for longer than it needs to start."""
