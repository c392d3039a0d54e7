"""The machine around an engine misbehaves: logs that block or break, full disks, clocks that jump."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from documents import ROOT, package_files
from tests.faults.conftest import SERVE

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.llm import LLM
from wavecore.transport.processes import deployment

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

    The engine is restarted and serves; one warning says that `deployment.json` is out of date until there is room.
    """
    real, full = deployment.write, True

    def write(*args: Any) -> None:
        if full:
            raise OSError(28, "No space left on device")
        real(*args)

    with deploy() as deployed:
        monkeypatch.setattr(deployment, "write", write)
        before = deployed.engine
        os.kill(before.pid, 9)
        deployed.recovered(before.epoch)
        full = False
        deployed.check_serving()


def test_clock_jumps(deploy: Any) -> None:
    """The wall clock jumps (NTP, a suspended laptop).

    No deadline moves: every wait is counted by the monotonic clock. This checks the source for any other use.
    """
    shown_to_people = ("started=", "RequestMetrics(", "strftime(")
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
