"""What starts the engines is killed, or asks for more than the machine has."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.faults.conftest import right_answer

from wavecore.engine_core.api.sampling_params import SamplingParams
from wavecore.frontend.async_llm import AsyncLLM
from wavecore.frontend.cli.main import main
from wavecore.frontend.fixtures import Launcher
from wavecore.frontend.llm import LLM
from wavecore.testing import deployment
from wavecore.transport.errors import ConfigError, EngineDead
from wavecore.transport.processes.deployment import read

slow = pytest.mark.slow


def end_launcher(launcher: Launcher, model: str, number: signal.Signals) -> Path:
    """Start two engines, end their launcher by a signal, and see that all is over 2 s later.

    Returns:
        The runtime directory.
    """
    settings = {"data_parallel_size": 2, "skip_tokenizer_init": True, "max_num_seqs": 4}
    with deployment(launcher, model, **settings) as (runtime_dir, process), LLM.connect(runtime_dir) as llm:
        assert process is not None
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        outputs = llm.generate([[i, 9] for i in range(1, 9)], params, use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [right_answer([i, 9], 5) for i in range(1, 9)]
        stream = llm.stream({"prompt_token_ids": [7]}, SamplingParams(max_tokens=4000, ignore_eos=True))
        if number == signal.SIGKILL:
            next(stream)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2
        sent = time.monotonic()
        process.send_signal(number)
        _, alive = psutil.wait_procs(family, 2.0)
        assert not alive, f"{alive} after {time.monotonic() - sent:.1f} s"
        process.wait(30)
        with pytest.raises(EngineDead):
            next(stream)
            next(stream)
    return runtime_dir


@pytest.mark.parametrize(
    ("launcher", "number"),
    [
        ("launch.py", signal.SIGKILL),
        ("launch.py", signal.SIGTERM),
        pytest.param("wavecore", signal.SIGKILL, marks=slow),
        pytest.param("wavecore", signal.SIGTERM, marks=slow),
    ],
)
def test_killed_launcher(model: str, launcher: Launcher, number: signal.Signals) -> None:
    """`scripts/launch.py` or `wavecore engine` is killed (kill -9), or asked to end (kill) while nothing runs.

    No process is left two seconds later. Streams end with `EngineDead`; after a kill -9 the next start removes the
    runtime directory.
    """
    end_launcher(launcher, model, number)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=slow)])
def test_killed_torchrun(model: str, number: signal.Signals) -> None:
    """torchrun, which started `-m wavecore engine`, is killed (kill -9), or asked to end (kill) while nothing runs.

    No process is left two seconds later: neither the engines nor the processes that torchrun started. Requests that run
    at a kill have `shutdown_timeout` to finish.
    """
    end_launcher("torchrun", model, number)


@slow
@pytest.mark.parametrize("which", [0, 1])
def test_killed_process_of_torchrun(model: str, which: int) -> None:
    """One of the processes that torchrun started is killed: the one that supervises, or one that holds a place.

    torchrun ends all others, the engines too, and says which one failed.
    """
    settings = {"data_parallel_size": 2, "skip_tokenizer_init": True}
    with deployment("torchrun", model, **settings) as (runtime_dir, process):
        assert process is not None
        places = psutil.Process(process.pid).children()
        supervisor = read(runtime_dir).supervisor_pid
        next(place for place in places if (place.pid == supervisor) == (which == 0)).kill()
        assert process.wait(60) == 1


def test_too_few_gpus(model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """More engines are asked for than GPUs are visible.

    The start is refused at once, before anything is loaded, with both numbers and what CUDA_VISIBLE_DEVICES says: with
    `ConfigError`, or exit code 2.
    """
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings: dict[str, Any] = {"data_parallel_size": 2, "device": "cuda", "skip_tokenizer_init": True}
    folder = Path(os.environ["XDG_RUNTIME_DIR"])
    before, folders = psutil.Process().children(), set(folder.glob("wavecore-*"))
    with pytest.raises(ConfigError, match=r"2 GPUs are asked for .* 0 of .* visible"):
        LLM(model, **settings)
    with pytest.raises(ConfigError, match="2 GPUs are asked for"):
        AsyncLLM(model, **settings)
    assert main(["engine", model, "-dp", "2", "--device", "cuda"]) == 2
    assert "wavecore engine: 2 GPUs are asked for" in capsys.readouterr().err
    assert psutil.Process().children() == before
    assert set(folder.glob("wavecore-*")) <= folders
