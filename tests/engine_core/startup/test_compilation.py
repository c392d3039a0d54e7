"""The process that compiles kernels beside a start: where there is one, and that its faults cost nothing but time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import triton
from tests.support.checkpoints import make_config
from tests.support.environment import environment
from tests.support.waiting import until

from wavecore.engine_core.api.config import EngineConfig
from wavecore.engine_core.models.families import from_config
from wavecore.engine_core.startup import compilation
from wavecore.engine_core.startup.compilation import KernelCompiler, compiler_beside, stamp_of
from wavecore.engine_core.startup.kernel_compiler import Forks

ROOT = Path(__file__).parent.parent.parent.parent
CONFIG = EngineConfig(model="tests", device="cuda")
SPEC = from_config(make_config("Llama").to_dict() | {"architectures": ["LlamaForCausalLM"]}, Path())


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
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, device: str, gpus: list[str] | None, rank: int, wanted: bool
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compilation, "visible_gpus", lambda _environ: gpus)
    monkeypatch.setattr(compilation, "KernelCompiler", lambda *_: nullcontext("a compiler"))
    with compiler_beside(EngineConfig(model="tests", device=device), SPEC, rank) as compiler:
        assert compiler == ("a compiler" if wanted else None)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Another program in the place of the one that compiles."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}{os.pathsep}{ROOT}")
    return lambda name: monkeypatch.setattr(compilation, "MODULE", name)


def ended(others: list[psutil.Process]) -> None:
    until(lambda: psutil.Process().children() == others)


@pytest.mark.parametrize(
    ("name", "limit", "status"),
    [("tests.no_such_module", 60.0, 1), ("tests.support.sleeps_on", 0.0, -signal.SIGKILL), ("this", 60.0, None)],
)
def test_a_start_goes_on_whatever_becomes_of_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    program: Callable[[str], None],
    name: str,
    limit: float,
    status: int | None,
) -> None:
    """It fails, it hangs, it is done. Nothing is left of it, but a stamp where it is done."""
    stamp = tmp_path / "stamp"
    program(name)
    monkeypatch.setattr(compilation, "MOST_SECONDS", limit)
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    others = psutil.Process().children()  # of other tests
    with KernelCompiler(CONFIG, stamp) as compiler:
        compiler.wait()
    ended(others)
    until(lambda: stamp.exists() or bool(caplog.records))
    assert stamp.exists() == (status is None)
    said = [record.getMessage() for record in caplog.records]
    assert [f"(exit status {status:d})" in line for line in said if status] == [True] * (status is not None)


@pytest.mark.parametrize("fails", [False, True])
def test_rare_kernels_compile_while_the_engine_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: Callable[[str], None], fails: bool
) -> None:
    """Nobody waits for them, and a start that fails leaves nothing at work."""
    gate, stamp = tmp_path / "gate", tmp_path / "stamp"
    monkeypatch.setenv("GATE", str(gate))
    program("tests.support.waits_at_gate")
    others = psutil.Process().children()
    with suppress(MemoryError), KernelCompiler(CONFIG, stamp) as compiler:
        compiler.wait()
        (process,) = set(psutil.Process().children()) - set(others)
        if fails:
            raise MemoryError
    assert process.is_running() != fails and not stamp.exists()
    if not fails:
        gate.touch()
        until(stamp.exists)
    ended(others)
    assert stamp.exists() != fails


@pytest.mark.parametrize("variable", ["TRITON_CACHE_DIR", "TRITON_HOME"])
def test_what_is_compiled_once_needs_no_second_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """Other settings or another model do: they launch other kernels."""
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = triton.knobs.cache.dir
    Path(folder).mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(compilation, "MODULE", "this")
    with compiler_beside(CONFIG, SPEC, 0) as compiler:
        assert isinstance(compiler, KernelCompiler)
        compiler.wait()
        until(stamp_of(CONFIG, SPEC).exists)
    with compiler_beside(CONFIG, SPEC, 0) as second:
        assert second is None
    assert [path.name for path in Path(folder).iterdir()] == [stamp_of(CONFIG, SPEC).name]
    assert not stamp_of(replace(CONFIG, max_num_seqs=7), SPEC).exists()
    assert not stamp_of(CONFIG, replace(SPEC, hidden_size=8)).exists()


def test_other_sources_need_another_stamp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also in folders that are links, as in this repository."""
    (tmp_path / "kernels" / "attention").mkdir(parents=True)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "kernels").symlink_to(tmp_path / "kernels")
    monkeypatch.setattr(compilation, "__file__", str(tmp_path / "package" / "engine_core" / "startup" / "it.py"))
    names = {stamp_of(CONFIG, SPEC).name}
    for file in ("prepare.py", "attention/paged.py"):
        (tmp_path / "kernels" / file).write_text("one")
        names.add(stamp_of(CONFIG, SPEC).name)
        (tmp_path / "kernels" / file).write_text("two")
        names.add(stamp_of(CONFIG, SPEC).name)
    assert len(names) == 5


@pytest.mark.parametrize("statuses", [[0, 0], [256, 0], [0, 9]])
def test_a_fork_that_fails_is_known(monkeypatch: pytest.MonkeyPatch, statuses: list[int]) -> None:
    """So that no stamp says that its kernel is compiled."""
    forks = Forks(2, object)
    monkeypatch.setattr(os, "fork", lambda: 1)
    ended = iter(statuses)
    monkeypatch.setattr(os, "wait", lambda: (1, next(ended)))
    assert not forks.begin() and not forks.begin()
    forks.wait()
    assert forks.failed == any(statuses)


@pytest.mark.slow
def test_it_ends_with_the_engine_and_so_do_its_forks() -> None:
    """Killed without a word: no supervisor is here that would end the process group."""
    program = (
        "import pathlib, sys, time\n"
        "from wavecore.engine_core.startup import compilation\n"
        "from wavecore.engine_core.api.config import EngineConfig\n"
        "compilation.MODULE = 'tests.support.forks_and_sleeps'\n"
        "with compilation.KernelCompiler(EngineConfig(model='tests'), pathlib.Path('stamp')):\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], env=environment()) as engine:
        process = psutil.Process(engine.pid)
        until(lambda: len(process.children(recursive=True)) == 3, seconds=60)
        children = process.children(recursive=True)
        engine.send_signal(signal.SIGKILL)
    gone, alive = psutil.wait_procs(children, 10)
    assert len(gone) == 3 and not alive
