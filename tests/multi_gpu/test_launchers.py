"""Every launcher starts the same deployment, for the same clients, and leaves nothing; on any devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import get_args

import launch
import psutil
import pytest
from tests.support.scripted_model import scripted_output
from tests.support.waiting import until

from wavecore import LLM, AsyncLLM, SamplingParams, StartError, connect
from wavecore.engine_core.api.devices import visible_gpus
from wavecore.frontend import fixtures
from wavecore.frontend.cli import torchrun
from wavecore.frontend.cli.main import main
from wavecore.frontend.fixtures import Launcher
from wavecore.testing import deployment
from wavecore.transport.errors import ConfigError
from wavecore.transport.processes.deployment import Deployment, read

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[i + 1, 2, 3] for i in range(16)]
LAUNCHERS = get_args(Launcher)
QUICK = [pytest.param(name, marks=pytest.mark.slow) if name == "torchrun" else name for name in LAUNCHERS]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model") / "script.json"
    path.write_text(json.dumps({"vocab_size": 1000, "eos_token_id": [], "step_seconds": 0.005}))
    return f"scripted:{path}"


def check_two_engines(found: Deployment) -> None:
    assert found.state == "ready"
    assert [engine.index for engine in found.engines] == [0, 1]
    assert len({engine.pid for engine in found.engines}) == 2


def check_answers(runtime_dir: Path) -> None:
    """Both engines serve a client, and answer right."""
    with connect(runtime_dir) as llm:
        until(lambda: len(llm.step_stats()) == 2)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            expected, _ = scripted_output(prompt, vocab_size=1000, max_tokens=8, temperature=0)
            assert output.outputs[0].token_ids == expected
        assert all(stats["steps"] for stats in llm.step_stats())


@pytest.mark.parametrize("launcher", QUICK)
def test_each_launcher_starts_the_same(launcher: Launcher, model: str) -> None:
    settings = {"data_parallel_size": 2, "skip_tokenizer_init": True, "max_num_seqs": 4}
    with deployment(launcher, model, **settings) as (runtime_dir, process):
        check_two_engines(read(runtime_dir))
        check_answers(runtime_dir)
    assert not runtime_dir.exists()
    if process is not None:
        assert process.returncode == (1 if launcher == "torchrun" else 0)  # torchrun's own, after SIGTERM


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_each_launcher_with_a_real_model(launcher: Launcher, ranks: int, tiny_llama: Path) -> None:
    """On GPUs, where there are enough, else on a shared CPU: the engines give the same tokens."""
    device = "auto" if len(visible_gpus(os.environ) or ()) >= 2 * ranks else "cpu"
    settings = {"data_parallel_size": 2, "tensor_parallel_size": ranks, "device": device, "skip_tokenizer_init": True}
    settings |= {"dtype": "float32", "max_num_seqs": 4, "num_gpu_blocks_override": 64}
    with deployment(launcher, tiny_llama, **settings) as (runtime_dir, _):
        check_two_engines(read(runtime_dir))
        with connect(runtime_dir) as llm:
            until(lambda: len(llm.step_stats()) == 2)
            outputs = llm.generate([[1, 2, 3]] * 16, GREEDY, use_tqdm=False)
            assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
            assert all(stats["steps"] for stats in llm.step_stats())


async def test_each_way_to_give_the_size(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keyword, variable and file; the flag is tried with every launcher."""
    settings = {"model": model, "skip_tokenizer_init": True}
    async with AsyncLLM(data_parallel_size=2, **settings) as llm:
        check_two_engines(read(llm.runtime_dir))
    monkeypatch.setenv("WAVECORE_DATA_PARALLEL_SIZE", "2")
    with LLM(**settings) as other:
        check_two_engines(read(other.runtime_dir))
    monkeypatch.delenv("WAVECORE_DATA_PARALLEL_SIZE")
    file = tmp_path / "settings.yaml"
    file.write_text("data-parallel-size: 2\n")
    figures = tmp_path / "figures.json"
    size = ["--num-prompts=8", "--input-len=8", "--output-len=4", f"--output-json={figures}"]
    assert main(["bench", "offline", f"--config={file}", f"--model={model}", "--skip-tokenizer-init", *size]) == 0
    assert len(json.loads(figures.read_text())["counters"]) == 2


def test_the_map_of_ranks_to_devices(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.run(["-dp", "3", model, "--dry-run"]) == 0
    assert capsys.readouterr().out == "engine 0: cpu\nengine 1: cpu\nengine 2: cpu\n"
    assert launch.run(["--data-parallel-size=1", "--tensor-parallel-size=2", model, "--dry-run"]) == 0
    assert capsys.readouterr().out == "engine 0 rank 0: cpu\nengine 0 rank 1: cpu\n"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="2 GPUs are asked for"):
        launch.run(["-dp", "2", "--device", "cuda", model, "--dry-run"])
    assert capsys.readouterr().out == ""


def test_the_map_on_gpus(model: str, two_gpus: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.run(["-dp", "2", "--device", "cuda", model, "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1].removeprefix("GPU ") for line in lines] == two_gpus


def test_the_map_of_engines_in_lockstep(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They are one group, whose ranks are counted through."""
    assert launch.run(["-dp", "2", "-tp", "2", "--dp-lockstep", "--device", "cpu", model, "--dry-run"]) == 0
    names = [line.split(": ")[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["engine 0 rank 0", "engine 0 rank 1", "engine 1 rank 2", "engine 1 rank 3"]


def test_a_file_of_lines_for_each_rank(tmp_path: Path) -> None:
    """Also of the last line of a rank that is killed, and of its next life."""
    path = tmp_path / "script.json"
    path.write_text(json.dumps({"eos_token_id": []}))
    logs = tmp_path / "logs"
    settings = {"data_parallel_size": 2, "skip_tokenizer_init": True, "log_level": "debug", "log_dir": str(logs)}
    with deployment("launch.py", f"scripted:{path}", tensor_parallel_size=2, **settings) as (runtime_dir, _):
        killed = read(runtime_dir).engines[1].ranks[1].pid
        psutil.Process(killed).send_signal(signal.SIGSEGV)
        until(lambda: read(runtime_dir).engines[1].restarts == 1)
    said = {file.name: "Fatal Python error: Segmentation fault" in file.read_text() for file in logs.iterdir()}
    ranks = [f"engine-{engine}-rank-{rank}.log" for engine in (0, 1) for rank in (0, 1)]
    assert said == {name: name == ranks[3] for name in ranks}


@pytest.mark.parametrize(
    ("ranks", "args", "words"),
    [
        (2, ["engine", "-dp", "1"], "--nproc-per-node 1 -m wavecore engine --data-parallel-size 1"),
        (2, ["engine", "m", "-dp", "3"], "without torchrun: wavecore engine --data-parallel-size 3"),
        (1, ["engine", "-dp", "2"], "--nproc-per-node 2 -m"),
        (3, ["engine", "-tp", "2"], "--nproc-per-node 2 -m wavecore engine --data-parallel-size 1 --tensor"),
        (4, ["engine", "-tp", "2", "-dp", "3"], "--nproc-per-node 6 -m wavecore engine"),
        (2, ["generate", "hi"], "torchrun starts engines alone"),
    ],
)
def test_sizes_that_contradict_torchrun(
    monkeypatch: pytest.MonkeyPatch, ranks: int, args: list[str], words: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    with pytest.raises(ConfigError, match=words):
        torchrun.run(args, ranks)


@pytest.mark.slow
def test_torchrun_chooses_the_size_and_says_so(model: str, tmp_path: Path) -> None:
    """Its other processes end with the first one, with its exit code; `--help` ends before they can even ask."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "wavecore"]
    done = subprocess.run([*command, "engine", "--help"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    with (
        (tmp_path / "log").open("w+") as log,
        subprocess.Popen(
            [*command, "engine", model, "--skip-tokenizer-init"], stdout=subprocess.PIPE, stderr=log, text=True
        ) as process,
    ):
        assert process.stdout is not None
        runtime_dir = Path(process.stdout.readline().split()[-1])
        check_two_engines(read(runtime_dir))
        psutil.Process(read(runtime_dir).supervisor_pid).terminate()  # it alone: the other hears of it
        process.communicate(timeout=60)
        log.seek(0)
        assert "data_parallel_size 2: torchrun started 2 processes" in log.read()
    assert process.returncode == 0
    done = subprocess.run([*command, "engine", "-dp=3"], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    assert "without torchrun: wavecore engine --data-parallel-size 3" in done.stderr


def test_a_start_that_fails_is_told(tmp_path: Path) -> None:
    failing = deployment("wavecore", f"scripted:{tmp_path}/none")
    with pytest.raises(StartError, match="cannot be read as a scripted model"), failing:
        pass


def test_what_is_left_behind_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fixtures, "END_SECONDS", 0.1)
    found = deployment("python", model, skip_tokenizer_init=True)
    with pytest.raises(AssertionError, match=r"left behind: process \d+$"), found:
        behind = subprocess.Popen(["sh", "-c", "sleep 60 >&- & echo $!"], stdout=subprocess.PIPE, text=True)
        orphan = psutil.Process(int(behind.communicate()[0]))
    assert orphan.ppid() == psutil.Process().pid
    orphan.kill()
    orphan.wait(30)


def test_a_launcher_that_does_not_end(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed, and its engines end with it: no test waits for ever."""
    monkeypatch.setattr(fixtures, "STOP_SECONDS", 0.2)
    with deployment("wavecore", model, skip_tokenizer_init=True) as (_, process):
        assert process is not None
        process.send_signal(signal.SIGSTOP)
    assert process.returncode == -signal.SIGKILL
