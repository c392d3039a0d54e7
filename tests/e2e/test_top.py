"""`wavecore top` beside a program that uses the engine."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.scripted_model import write_model
from tests.support.waiting import until

from wavecore import LLM, AsyncLLM, SamplingParams
from wavecore.frontend.cli.main import main
from wavecore.transport.processes import deployment

COMMAND = [sys.executable, "-m", "wavecore.frontend.cli.main", "top"]
LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


def top(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *args], capture_output=True, text=True, timeout=60, check=False)


async def test_running_and_waiting_requests(tmp_path: Path) -> None:
    llm = await AsyncLLM.start(**write_model(tmp_path, max_model_len=4096, step_seconds=0.01), max_num_seqs=2)
    try:
        streams = [llm.generate({"prompt_token_ids": [1, 2, 3]}, LONG) for _ in range(5)]
        readers = [asyncio.create_task(anext(stream)) for stream in streams]
        await asyncio.wait(readers, return_when=asyncio.FIRST_COMPLETED)
        folder = str(llm.runtime_dir)
        shown = ("--once", "--requests", "4", "--interval", "0.3")
        done = await asyncio.to_thread(top, folder, *shown, "--json")
        assert done.returncode == 0, done.stderr
        view = json.loads(done.stdout)
        (engine,) = view["engines"]
        assert (engine["state"], engine["restarts"], engine["cause"]) == ("ready", 0, "")
        assert (engine["running"], engine["waiting"], engine["waiting_by_reason"]["slots"]) == (2, 3, 3)
        assert engine["output_tokens_per_second"] > 0 and 0 < engine["cache_usage"] < 1
        assert [row["state"] for row in view["requests"]] == ["running", "running", "waiting", "waiting"]
        assert view["requests"][0]["age"] >= view["requests"][1]["age"] > 0
        assert "all 2 slots (max_num_seqs) are taken" in view["requests"][2]["reason"]
        done = await asyncio.to_thread(top, folder, *shown)
        assert done.returncode == 0 and done.stdout.endswith("\n"), done.stderr
        for words in ("out/s", "ready", "running", "all 2 slots (max_num_seqs)"):
            assert words in " ".join(done.stdout.split()), done.stdout
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        for stream in streams:
            await stream.aclose()
        llm.shutdown()


def test_it_goes_on_over_the_death_of_an_engine(tmp_path: Path) -> None:
    with LLM(**write_model(tmp_path), log_level="error") as llm:
        command = [*COMMAND, str(llm.runtime_dir), "--json", "--interval", "0.05"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            lines = map(json.loads, process.stdout)
            assert next(lines)["engines"][0]["state"] == "ready"
            os.kill(deployment.read(llm.runtime_dir).engines[0].pid, signal.SIGKILL)
            died = next(view["engines"][0] for view in lines if view["engines"][0]["cause"])
            assert "SIGKILL" in died["cause"] and died["state"] != "ready" and "steps" not in died
            alive = next(view["engines"][0] for view in lines if "steps" in view["engines"][0])
            assert alive["restarts"] == 1 and alive["output_tokens_per_second"] == 0
            until(lambda: llm.has_engine(), "the engine")
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130


def test_arguments_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args in ((), (str(tmp_path), "--interval", "0"), (str(tmp_path), "--requests", "1001"),
                 (str(tmp_path), "--max-num-seqs", "3")):  # fmt: skip
        assert main(["top", *args]) == 2 and capsys.readouterr().err.count("\n") == 1
    assert main(["top", str(tmp_path)]) == 5 and "no deployment" in capsys.readouterr().err
