"""`wavecore status`: what runs, and whether all of it serves; it never waits for what is dead or stopped."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.support.waiting import until

from wavecore import LLM, SamplingParams
from wavecore.frontend.cli import status
from wavecore.frontend.cli.main import main
from wavecore.testing import deployment
from wavecore.transport.processes.deployment import read

SETTINGS = {"data_parallel_size": 2, "skip_tokenizer_init": True}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [], "step_seconds": 0.01}))
    return f"scripted:{path}"


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Exit code and JSON of one look; without a folder, those deployments alone that `mine` names."""

    def look(*args: str, mine: Path | None = None) -> tuple[int, Any]:
        capsys.readouterr()
        code = main(["status", "--json", *args])
        found = json.loads(capsys.readouterr().out)["deployments"]
        return code, [one for one in found if mine in (None, Path(one["runtime_dir"]))]

    return look


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    for pid in pids:
        psutil.Process(pid).send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            psutil.Process(pid).send_signal(signal.SIGCONT)


def test_what_runs(model: str, look: Callable[..., Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also where the user named the runtime directory, and with work to do."""
    run = tmp_path / "run"
    with LLM(model, runtime_dir=str(run), address="tcp://127.0.0.1", **SETTINGS) as llm:
        code, [found] = look(str(run))
        assert (code, found["state"], found["serves"]) == (0, "ready", True)
        assert [[rank["device"] for rank in engine["ranks"]] for engine in found["engines"]] == [["cpu"], ["cpu"]]
        idle = {"running": 0, "waiting": 0, "cache_usage": 0.0, "waves": 0, "dummy_steps": 0}
        assert [engine["load"] for engine in found["engines"]] == [idle] * 2
        _, [same] = look(mine=run)
        assert same == found
        stream = llm.stream({"prompt_token_ids": [7]}, SamplingParams(max_tokens=1000, ignore_eos=True))
        next(stream)
        _, [found] = look(str(run))
        assert sum(engine["load"]["running"] for engine in found["engines"]) == 1
        stream.close()
        assert main(["status", str(run)]) == 0
        head, names, *engines = capsys.readouterr().out.splitlines()
        assert head == f"{run}: ready"
        assert names.split()[:6] == ["engine", "host", "rank", "device", "pid", "state"]
        entries = read(run).engines
        assert [line.split()[:6] for line in engines] == [
            [str(entry.index), "127.0.0.1", "0", "cpu", str(entry.pid), "ready"] for entry in entries
        ]
    assert main(["status", str(run)]) == 5
    assert "no deployment at" in capsys.readouterr().err


def test_engines_in_lockstep(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is one rank of the same group, and has a load of its own."""
    with LLM(model, dp_lockstep=True, **SETTINGS) as llm:
        assert main(["status", str(llm.runtime_dir)]) == 0
        *_, first, second = capsys.readouterr().out.splitlines()
        assert [line.split()[4:7] for line in (first, second)] == [["ready", "0", "0"]] * 2
        llm.generate([[5]], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
        assert main(["status", str(llm.runtime_dir)]) == 0
        _, names, *engines = capsys.readouterr().out.splitlines()
        assert names.split()[8:10] == ["waves", "dummy_steps"]
        assert [line.split()[8] for line in engines] == ["1", "1"]


def test_an_engine_that_died(
    model: str, look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wavecore.transport.processes.group.MAX_DELAY", 3.0)
    with LLM(model, **SETTINGS) as llm:
        psutil.Process(read(llm.runtime_dir).engines[1].pid).kill()
        until(lambda: read(llm.runtime_dir).engines[1].state == "waiting")
        code, [found] = look(str(llm.runtime_dir))
        assert (code, found["serves"], found["state"]) == (5, False, "degraded")
        first, second = found["engines"]
        assert (first["load"] is None, second["load"], second["cause"]["signal"]) == (False, None, 9)
        until(lambda: look(str(llm.runtime_dir))[0] == 0)
        _, [found] = look(str(llm.runtime_dir))
        assert [engine["restarts"] for engine in found["engines"]] == [0, 1]
        assert (found["engines"][1]["cause"], found["engines"][1]["last_cause"]["signal"]) == (None, 9)
        assert main(["status", str(llm.runtime_dir)]) == 0
        assert "was ended by signal 9" in capsys.readouterr().out.splitlines()[-1]


def test_what_is_stopped_or_dead(model: str, look: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped by a signal, so that nothing answers; then killed."""
    monkeypatch.setattr(status, "ANSWER_SECONDS", 0.5)
    with deployment("wavecore", model, **SETTINGS) as (runtime_dir, process):
        assert process is not None
        first, second = (engine.pid for engine in read(runtime_dir).engines)
        with stopped(process.pid, first):
            code, [found] = look(str(runtime_dir))
            assert (code, [engine["load"] is None for engine in found["engines"]]) == (5, [True, False])
        with stopped(process.pid, first, second):
            assert look(str(runtime_dir))[0] == 5
        process.kill()
        process.wait(30)
        code, [found] = look(str(runtime_dir))
        assert (code, found["state"]) == (5, "dead")
        assert f"the supervisor (pid {process.pid})" in found["engines"][0]["cause"]["message"]
        assert look(mine=runtime_dir)[1] == []


def test_nothing_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("wavecore.transport.processes.deployment.running", list)
    assert main(["status"]) == 5
    assert "start one with `wavecore engine`" in capsys.readouterr().out
    assert main(["status", "--jsn"]) == 2
