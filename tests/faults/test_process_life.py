"""Parents that die, signals at any moment, and what is left behind: nothing."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import psutil
import pytest
from tests.faults.conftest import SERVE
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import EngineDead, ModelError, Overloaded, StartError
from wavecore.transport.processes import deployment
from wavecore.transport.processes.process import ChildSpec
from wavecore.transport.processes.runtime_dir import is_held
from wavecore.transport.processes.supervisor import Supervisor

EMBED = """
import multiprocessing, sys, time
from wavecore.frontend.llm import LLM
llm = LLM("scripted:{script}", disable_tqdm=True, runtime_dir={runtime_dir!r}, tensor_parallel_size={ranks})
if {fork}:
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
print("ready", llm.runtime_dir, flush=True)
time.sleep(600)
"""

# Forks in the middle of a batch, each of them ending as programs do.
FORK = """
import os, sys, threading
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
llm = LLM("scripted:{script}", disable_tqdm=True)
params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
outputs = []
prompts = [[i + 1] for i in range(64)]
thread = threading.Thread(target=lambda: outputs.extend(llm.generate(prompts, params, use_tqdm=False)))
thread.start()
children = []
for _ in range(24):
    children.append(os.fork())
    if children[-1] == 0:
        sys.exit(7)
print("ended", [os.waitpid(child, 0)[1] >> 8 for child in children] == [7] * 24, flush=True)
thread.join()
print("finished", sum(output.finished for output in outputs), llm.runtime_dir.exists(), flush=True)
"""

# Shuts down in a signal handler, again and again, whatever the main thread is doing.
HANDLE = """
import signal, sys
from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
llm = LLM("scripted:{script}", disable_tqdm=True)
params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
others = [LLM.connect(llm.runtime_dir) for _ in range(30)]
for i, other in enumerate(others):
    signal.signal(signal.SIGALRM, lambda *_: other.shutdown())
    signal.setitimer(signal.ITIMER_REAL, 0.001 * i + 0.0001)
    try:
        while True:
            other.generate([[5, k + 1] for k in range(20)], params, use_tqdm=False)
            for output in other.stream([5, 6], params):
                pass
            other.step_stats()
    except Exception as error:
        assert "was closed" in str(error), error
print("shut down", flush=True)
signal.signal(signal.SIGTERM, lambda *_: (llm.shutdown(), sys.exit(3)))
print("ready", llm.runtime_dir, flush=True)
while True:
    llm.generate([[5, k + 1] for k in range(20)], params, use_tqdm=False)
"""


class Program:
    """A program of a user that starts an engine."""

    def __init__(self, code: str, script: Path, *, log: Path, under: tuple[str, ...] = (), **values: Any) -> None:
        self.log = log
        with log.open("w") as stderr:
            self.process = self._start([*under, sys.executable, "-c", code.format(script=script, **values)], stderr)
        assert self.process.stdout is not None
        self.lines = iter(self.process.stdout)

    def _start(self, command: list[str], stderr: IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def read_until(self, word: str) -> str:
        return next(line for line in self.lines if line.startswith(word))

    def ready(self) -> Path:
        return Path(self.read_until("ready").split()[1])

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def finish(self) -> int:
        code = self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    path.write_text('{"vocab_size": 1000, "eos_token_id": [], "load_seconds": 0.2, "step_seconds": 0.01}')
    return path


@pytest.fixture
def program(script: Path, tmp_path: Path) -> Iterator[Any]:
    started: list[Program] = []

    def start(code: str, **values: Any) -> Program:
        started.append(Program(code, script, log=tmp_path / f"log{len(started)}", **values))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.finish()


def gone(family: list[psutil.Process]) -> bool:
    """Within two seconds, and some more on a machine under load."""
    return not psutil.wait_procs(family, 10)[1]


@pytest.mark.parametrize(
    ("fork", "ranks"), [(False, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((False, 4), (True, 1)))]
)
def test_killed_program(program: Any, fork: bool, ranks: int) -> None:
    """The program that embeds the engine is killed (kill -9), even while a fork of it lives on.

    All ranks of the engine end within two seconds, by themselves. Its runtime directory is removed by the next start.
    """
    one = program(EMBED, fork=fork, runtime_dir=None, ranks=ranks)
    path = one.ready()
    engine = [p for p in one.family() if "wavecore engine" in " ".join(p.cmdline())]
    assert len(engine) == ranks
    one.process.kill()
    assert gone(engine)
    one.process.wait(30)
    found = deployment.read(path)
    assert (found.state, {rank.state for rank in found.engines[0].ranks}) == ("dead", {"ended"})
    os.killpg(one.process.pid, signal.SIGKILL) if fork else None
    one.finish()
    until(lambda: not is_held(path))


def test_named_folder_with_files_of_the_users(program: Any, script: Path, runtime_folder: Path) -> None:
    """`runtime_dir` names a folder that holds other files, and the program is killed (kill -9).

    No file that wavecore did not write is ever removed, by this start, the next one in that folder, or any other. Keys
    and the allow-list for tcp stay, too; the rest goes with the next start and stop in that folder.
    """
    run = runtime_folder / "wavecore-prod"
    for name in ("engineering-thesis.txt", "keys/id_ed25519", "engine-data/part.bin"):
        (run / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (run / name).write_text("mine")
    before = {path: path.stat().st_ino for path in run.rglob("*")}
    try:
        one = program(EMBED, fork=False, runtime_dir=str(run), ranks=1)
        assert one.ready() == run
        one.process.kill()
        one.finish()
        with LLM(f"scripted:{script}", disable_tqdm=True):
            assert (run / "deployment.json").exists()
        with LLM(f"scripted:{script}", disable_tqdm=True, runtime_dir=str(run)) as llm:
            assert llm.generate({"prompt_token_ids": [1]}, _params(1))[0].finished
        assert {path: path.stat().st_ino for path in run.rglob("*")} == before
    finally:
        shutil.rmtree(run)


def test_forks(program: Any) -> None:
    """A program forks while requests run, and the children end, or use what they inherited.

    In the child the client is closed: every use raises `EngineDead` that names the process that it belongs to, streams
    of the parent end with an error, and nothing waits at exit. The parent, its engine and its requests notice nothing.
    """
    one = program(FORK)
    assert one.read_until("ended").split() == ["ended", "True"]
    assert one.read_until("finished").split() == ["finished", "64", "True"]
    assert one.finish() == 0


def test_shutdown_in_a_signal_handler(program: Any) -> None:
    """A signal handler of the program calls `shutdown`, while the main thread is anywhere in a call of ours.

    The engine ends, or is let go of; the call that was interrupted raises that the client was closed. Nothing hangs.
    """
    one = program(HANDLE)
    one.read_until("shut down")
    path = one.ready()
    family = one.family()
    one.process.terminate()
    assert one.finish() == 3
    assert gone(family)
    assert not path.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_drain(program: Any, number: signal.Signals) -> None:
    """`wavecore engine` gets SIGTERM or SIGINT while requests run.

    New requests are refused with `Overloaded`; running ones finish. Then it ends with status 0 (SIGTERM) or 130
    (SIGINT) and leaves nothing.
    """
    one = program(SERVE, drain=30)
    path = one.ready()
    family = one.family()
    with LLM.connect(path) as llm:
        stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, _params(200))
        next(stream)
        one.process.send_signal(number)
        until(lambda: deployment.read(path).state == "draining")

        def refused() -> bool:
            try:
                return not list(llm.stream({"prompt_token_ids": [1]}, _params(1)))
            except (Overloaded, EngineDead):
                return True

        until(refused)  # once the signal has reached the engine
        outputs = list(stream)
        assert outputs[-1].outputs[0].finish_reason == "length"
    assert one.finish() == (0 if number == signal.SIGTERM else 130)
    assert gone(family)
    assert not path.exists()


def test_closed_terminal(program: Any) -> None:
    """The terminal is closed (SIGHUP) under `wavecore engine`, or under `nohup wavecore engine &`.

    The first drains like after SIGTERM, and its log names the signal. The second was told to ignore it and serves on.
    """
    kept, closed = program(SERVE, drain=30, under=("nohup",)), program(SERVE, drain=30)
    path = kept.ready()
    closed.ready()
    kept.process.send_signal(signal.SIGHUP)
    closed.process.send_signal(signal.SIGHUP)
    assert closed.finish() == 0
    with LLM.connect(path) as llm:
        [output] = llm.generate([{"prompt_token_ids": [1]}], _params(3), use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
    kept.process.send_signal(signal.SIGTERM)
    assert kept.finish() == 0
    assert "stopping: SIGHUP (the terminal was closed)" in closed.log.read_text()
    assert "stopping: SIGTERM" in kept.log.read_text()


def test_drain_has_a_limit(program: Any) -> None:
    """Requests still run when `shutdown_timeout` has passed after SIGTERM.

    Each ends with an error that says so; the program ends with status 0.
    """
    one = program(SERVE, drain=0.5)
    path = one.ready()
    with LLM.connect(path) as llm:
        stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, _params(4000))
        next(stream)
        one.process.send_signal(signal.SIGTERM)
        with pytest.raises(EngineDead, match="stopped before this request ended"):
            list(stream)
    assert one.finish() == 0
    assert not path.exists()


def test_second_signal_ends_at_once(program: Any) -> None:
    """A second SIGTERM or SIGINT arrives while the engine drains.

    It ends now: running requests get their error, nothing is left, the status is the documented one.
    """
    one = program(SERVE, drain=600)
    path = one.ready()
    family = one.family()
    with LLM.connect(path) as llm:
        stream = llm.stream({"prompt_token_ids": [1, 2, 3]}, _params(4000))
        next(stream)
        one.process.send_signal(signal.SIGTERM)
        until(lambda: deployment.read(path).state != "ready")
        one.process.send_signal(signal.SIGTERM)
        with pytest.raises(EngineDead):
            list(stream)
    assert one.finish() == 0
    assert gone(family)
    assert not path.exists()


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.slow] if s > 2 else []) for s in range(20)])
def test_signal_at_any_moment_of_the_start(program: Any, seed: int) -> None:
    """SIGTERM arrives at any moment while the engine starts and loads.

    The program ends soon with a documented status, and no process or folder is left.
    """
    one = program(SERVE, drain=30)
    one.read_until("importing")
    threading.Event().wait(random.Random(seed).uniform(0.0, 0.6))
    family = one.family()
    one.process.send_signal(signal.SIGTERM)
    rest = "".join(one.lines)
    assert one.finish() in (0, -signal.SIGTERM)
    assert gone(family)
    if "ready" in rest:
        assert not Path(rest.split("ready ")[1].split()[0]).exists()


def test_many_starts_at_once(deploy: Any) -> None:
    """Many engines are started on one machine at the same moment.

    Each gets addresses of its own: nothing is fixed, nothing is probed first and bound later.
    """
    with deploy() as deployed:
        config = '{"model": "scripted:", "skip_tokenizer_init": true}'
        tcp = [Supervisor([[ChildSpec("engine 0", "wavecore.engine_core", config)]] * 3, address="tcp://127.0.0.1")]
        ipc = [Supervisor([[ChildSpec("engine 0", "wavecore.engine_core", config)]] * 3) for _ in range(2)]
        threads = [threading.Thread(target=s.start) for s in tcp + ipc]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        try:
            entries = [e for s in tcp + ipc for e in s.deployment().engines]
            assert [e.state for e in entries] == ["ready"] * 9
            assert len({e.input for e in entries} | {e.output for e in entries}) == 18
            for supervisor in tcp + ipc:
                assert supervisor.runtime_dir is not None
                with LLM.connect(supervisor.runtime_dir) as llm:
                    [output] = llm.generate([{"prompt_token_ids": [1]}], _params(3), use_tqdm=False)
                    assert output.outputs[0].finish_reason == "length"
        finally:
            for supervisor in tcp + ipc:
                supervisor.stop()
        deployed.check_serving()


@pytest.mark.parametrize(
    ("faults", "error", "words"),
    [
        ({"load_error": "model.safetensors: header is cut off"}, ModelError, "header is cut off.*while: load"),
        ({"exit_at_phase": {"phase": "kv_cache", "signal": 9}}, StartError, "signal 9.*while: kv_cache"),
        ({"exit_at_phase": {"phase": "load", "code": 3}}, StartError, "status 3.*while: load"),
    ],
)
def test_failing_start(deploy: Any, faults: dict[str, Any], error: type[Exception], words: str) -> None:
    """The engine cannot start: a bad model file, a missing library, the OOM killer.

    The start raises at once what the engine said, or for a silent death the signal and its likely cause, with the phase
    and the last lines of output; the exit codes are 2 (settings), 3 (port or other resource), 4 (model), 5 (other).
    """
    with pytest.raises(error, match=words), deploy({"faults": faults}):
        pass


def test_missing_model_folder() -> None:
    """The model folder does not exist.

    The start fails within seconds with `ModelError` that names the path (exit code 4).
    """
    with pytest.raises(ModelError, match="/nonexistent/model") as caught:
        LLM("/nonexistent/model", disable_tqdm=True)
    assert caught.value.exit_code == 4


def test_foreign_address() -> None:
    """The address belongs to no interface of this machine.

    The start fails with `ResourceError` that names it (exit code 3).
    """
    with pytest.raises(Exception, match=r"192\.0\.2\.1") as caught:
        LLM("scripted:", address="tcp://192.0.2.1", disable_tqdm=True)
    assert getattr(caught.value, "exit_code", None) == 3


def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
