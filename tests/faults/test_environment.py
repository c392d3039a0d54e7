"""The machine around an engine misbehaves: logs that block or break, full disks, lost files, clocks that jump."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, package_files
from tests.faults.conftest import SERVE
from tests.support.waiting import until

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.errors import ResourceError
from wavecore.transport.io.connection import Disconnected, Reconnected
from wavecore.transport.processes import deployment
from wavecore.transport.processes.runtime_dir import RuntimeDir, is_held

CHATTY = """
import os, sys
if "wavecore.engine_core" in sys.orig_argv:
    for i in range(20_000):
        os.write(2, b"a line of a chatty library\\n")
"""


@pytest.mark.parametrize("how", ["closed", "never read"])
def test_log_that_breaks_or_blocks(how: str, tmp_path: Path) -> None:
    """The program's standard error is a closed pipe, or one that nobody reads, and a library prints a lot.

    Log lines are dropped and counted; the engine starts and serves all the same.
    """
    (tmp_path / "sitecustomize.py").write_text(CHATTY)
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(script="", drain=30)],
        stdout=subprocess.PIPE,
        stderr=write,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}"},
    )
    os.close(write)
    if how == "closed":
        os.close(read)
    assert process.stdout is not None
    with (
        process.stdout as lines,
        LLM.connect(next(line.split()[1] for line in lines if line.startswith("ready"))) as llm,
    ):
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        [output] = llm.generate([{"prompt_token_ids": [1, 2]}], params, use_tqdm=False)
        assert output.outputs[0].finish_reason == "length"
        process.terminate()
        assert process.wait(30) == 0
    if how == "never read":
        assert b"a line of a chatty library" in os.read(read, 1 << 16)
        os.close(read)


def test_full_disk(deploy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of the runtime directory is full when an engine dies.

    The engine is restarted and serves; one warning says that `deployment.json` is out of date, and no stream ends for
    what the old file says. As soon as there is room the file is right again.
    """
    real, full = deployment.write, True

    def write(*args: Any) -> None:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(*args)

    with deploy({"step_seconds": 0.01}) as deployed:
        monkeypatch.setattr(deployment, "write", write)
        before = deployed.engine
        os.kill(before.pid, 9)
        deployed.recovered(before.epoch)
        stream = deployed.stream(1, max_tokens=50)
        stream.first.wait(30)
        client = deployed.llm._service.client
        client._on_event(0, Disconnected("a cable was pulled"))  # now the client looks into the file, again and again
        until(lambda: deployment.read(deployed.runtime_dir).engines[0].epoch == before.epoch)
        client._watches[0].look()
        client._on_event(0, Reconnected())
        stream.check_finished()
        full = False
        until(lambda: deployment.read(deployed.runtime_dir) == deployed.supervisor.deployment())
        deployed.check_serving()


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 64 KiB; its path is short enough for sockets, as pytest's need not be."""
    disk = Path(tempfile.mkdtemp(prefix="wc-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "wavecore-test", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if mounted:
        yield disk
        subprocess.run(["umount", str(disk)], check=True)
    disk.rmdir()
    if not mounted:
        pytest.skip("only root may mount a file system")


def fill(disk: Path) -> Path:
    """Leaves no byte of room."""
    path = disk / "full"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path


def test_full_disk_and_room_again(deploy: Any, small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A real file system under the runtime directory, full while an engine dies and is started again."""
    run = small_disk / "run"
    with deploy(runtime_dir=str(run)) as deployed:
        before = deployed.engine
        full = fill(small_disk)
        os.kill(before.pid, 9)
        deployed.recovered(before.epoch)
        deployed.check_serving()
        assert deployment.read(run).engines[0].epoch == before.epoch
        assert caplog.text.count("clients cannot attach until this works again") == 1
        full.unlink()
        until(lambda: deployment.read(run) == deployed.supervisor.deployment())
        with LLM.connect(run) as other:
            deployed.stream(2, llm=other).check_finished()


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1"])
def test_disk_that_is_full_at_the_start(deploy: Any, small_disk: Path, address: str | None) -> None:
    """The disk of the runtime directory is full when an engine is to start.

    The start fails with `ResourceError` that names the path (exit code 3), and leaves nothing there.
    """
    fill(small_disk)
    run = small_disk / "run"
    with pytest.raises(ResourceError, match=rf"{run}.*No space left"), deploy(runtime_dir=str(run), address=address):
        pass
    assert not run.exists()


def test_disk_that_becomes_full_during_the_start(deploy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was not ready: nobody could attach."""
    real = deployment.write

    def write(path: Path, found: deployment.Deployment) -> None:
        if found.state == "ready":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, found)

    monkeypatch.setattr(deployment, "write", write)
    with pytest.raises(ResourceError, match=r"deployment.json: .*No space left"), deploy():
        pass


@pytest.mark.parametrize("address", [None, "tcp://127.0.0.1"])
def test_files_that_a_cleaner_takes(deploy: Any, tmp_path: Path, address: str | None) -> None:
    """A cleaner of old files, or a mistake, removes `deployment.json`, the lock, sockets, keys or the whole folder.

    They are made again within seconds, so programs can attach as before. Whoever is attached goes on and notices
    nothing; requests run on. (Files are touched each hour, so that cleaners leave them.)
    """
    with deploy({"step_seconds": 0.01}, address=address) as deployed:
        run = deployed.runtime_dir
        before = deployed.engine
        stream = deployed.stream(1, max_tokens=300)
        stream.first.wait(30)
        everything = [path.name for path in run.iterdir()]
        for names in (["deployment.json"], ["lock"], [n for n in everything if n[0] in "ek"], ["."]):
            for name in names:
                path = run / name
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            until(lambda: all((run / name).exists() for name in everything))
            assert is_held(run)
            with LLM.connect(run) as other:
                deployed.stream(2, llm=other, max_tokens=5).check_finished()
        stream.check_finished()
        assert deployed.engine == before


def test_engine_that_dies_while_its_files_are_gone(deploy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole runtime directory is removed, and the engine dies at that very moment.

    Nobody takes it for a deployment that was stopped: streams end with the true cause, and requests without a token go
    to the restarted engine, at the same address.
    """
    with deploy({"step_seconds": 0.02}, max_num_seqs=1) as deployed:
        before = deployed.engine
        running = deployed.stream(1, 1000)
        assert running.first.wait(30)
        waiting = deployed.stream(2, 10)
        until(lambda: deployed.call("stats")["waiting"] == 1)
        watch, repair = deployed.llm._service.client._watches[0], RuntimeDir.repair

        def late(folder: RuntimeDir) -> None:
            if not watch._missing_since:
                raise OSError("the client looks first")
            repair(folder)

        monkeypatch.setattr(RuntimeDir, "repair", late)
        os.kill(before.pid, signal.SIGSTOP)  # it cannot bind again
        shutil.rmtree(deployed.runtime_dir)
        os.kill(before.pid, signal.SIGKILL)
        assert "signal 9" in str(running.error)
        waiting.check_finished()
        assert deployed.recovered(before.epoch).input == before.input


def test_clock_jumps(deploy: Any) -> None:
    """The wall clock jumps (NTP, a suspended laptop).

    No deadline moves: every wait is counted by the monotonic clock. This checks the source for any other use.
    """
    shown_to_people = ("started=", "RequestMetrics(", "strftime(", "STARTED =", "created:", '{"time":', '"adapters":')
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in package_files()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\btime\.time\(|datetime\.(utc)?now\(", line)
        and not any(word in line for word in shown_to_people)
    ]
    assert found == []
    with deploy() as deployed:
        deployed.check_serving()
