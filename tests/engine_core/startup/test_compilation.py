"""The process that compiles kernels beside a start: where there is one, and that its faults cost nothing but time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from tests.support.waiting import until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.startup import compilation
from wavecore.engine_core.startup.compilation import KernelCompiler, compiler_beside

ROOT = Path(__file__).parent.parent.parent.parent
CONFIG = EngineConfig(model="tests")


@pytest.mark.parametrize(
    ("device", "gpus", "rank", "wanted"),
    [
        ("cuda:1", None, 0, True),
        ("cuda:1", None, 1, False),
        ("auto", ["0"], 0, True),
        ("auto", None, 0, False),
        ("cpu", ["0"], 0, False),
    ],
)
def test_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: list[str] | None, rank: int, wanted: bool
) -> None:
    monkeypatch.setattr(compilation, "visible_gpus", lambda _environ: gpus)
    monkeypatch.setattr(compilation, "KernelCompiler", lambda _config: nullcontext("a compiler"))
    with compiler_beside(EngineConfig(model="tests", device=device), rank) as compiler:
        assert compiler == ("a compiler" if wanted else None)


@pytest.mark.parametrize(
    ("program", "limit", "said"),
    [
        ("tests.no_such_module", 60.0, "(exit status 1)"),
        ("tests.support.sleeps_on", 0.0, "(exit status None)"),
        ("this", 60.0, None),
    ],
)
def test_a_start_goes_on_whatever_becomes_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, program: str, limit: float, said: str | None
) -> None:
    """It fails, it hangs, it is done. Nothing is left of it."""
    monkeypatch.setattr(compilation, "MODULE", program)
    monkeypatch.setattr(compilation, "MOST_SECONDS", limit)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with KernelCompiler(CONFIG) as compiler:
        compiler.wait()
    assert not psutil.Process().children()
    assert [said in record.getMessage() for record in caplog.records if said] == [True] * (said is not None)


@pytest.mark.slow
def test_it_ends_with_the_engine_and_so_do_its_forks() -> None:
    """Killed without a word: no supervisor is here that would end the process group."""
    program = (
        "import sys, time\n"
        "from wavecore.engine_core.startup import compilation\n"
        "from wavecore.engine_core.api.config import EngineConfig\n"
        "compilation.MODULE = 'tests.support.forks_and_sleeps'\n"
        "with compilation.KernelCompiler(EngineConfig(model='tests')):\n"
        "    time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    with subprocess.Popen([sys.executable, "-c", program], env=environment) as engine:
        process = psutil.Process(engine.pid)
        until(lambda: len(process.children(recursive=True)) == 3, seconds=60)
        children = process.children(recursive=True)
        engine.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(children, 10)
    assert len(gone) == 3 and not alive
