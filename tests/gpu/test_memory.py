"""Memory of a GPU: what the start measures holds for every step, what it suggests starts, and engines have shares."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.models.checkpoints import make_config, save_model
from tests.models.driver import Driver, load

from wavecore import LLM, ConfigError, ResourceError, SamplingParams
from wavecore.engine_core import device_memory, memory
from wavecore.engine_core.shares import Shares

MIB = 1 << 20
MODEL: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 512,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4200,
    "tie_word_embeddings": True,
}
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "block_size": 32,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 8192,
    "max_model_len": 4200,
    "num_gpu_blocks_override": None,
}
EVERYTHING = SamplingParams(
    temperature=0.9, top_k=50, top_p=0.95, min_p=0.01, seed=1, max_tokens=1000, logprobs=20, prompt_logprobs=20,
    repetition_penalty=1.2, presence_penalty=0.1, frequency_penalty=0.1, min_tokens=2, stop_token_ids=[9],
    logit_bias={3: 1.0}, bad_words_token_ids=[[4], [5, 6]],
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("memory") / "model", make_config("Llama", **MODEL), scale=0.02)


@pytest.fixture(autouse=True)
def _clear() -> None:
    clear()


def clear() -> None:
    """Give back what other tests left in this process."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Shares]:
    """What each start measures."""
    found: list[Shares] = []
    measure = memory.measure

    def noting(*args: Any) -> Shares:
        found.append(measure(*args))
        return found[-1]

    monkeypatch.setattr(memory, "measure", noting)
    return found


def start(folder: Path, **settings: Any) -> Any:
    return load(folder, **{**SETTINGS, **settings})


def refusal(kind: type[Exception], folder: Path, **settings: Any) -> str:
    """The words of a start that fails; nothing of it stays in memory."""
    words = ""
    try:
        start(folder, **settings)
    except kind as error:
        words = str(error)
    clear()
    assert words, "it started"
    return words


def suggested(name: str, words: str) -> float:
    found = re.search(rf"fit with .*?{name} ([\d.]+\d)", words)
    assert found is not None, words
    return float(found[1])


def serves(runner: Any) -> None:
    driver = Driver(runner)
    [output] = driver.run([driver.add([5, 6, 7] * 100, 4, 0)], chunk=200)
    assert len(output) == 4


def test_the_fullest_steps_stay_within_the_table(folder: Path, measured: list[Shares]) -> None:
    """Steps of 8,192 tokens and 256 rows that ask for everything; max_model_len is just above half of 8,192."""
    runner = start(folder, gpu_memory_utilization=0.5)
    [shares] = measured
    cache = runner.info.num_blocks * runner.block_bytes
    own = shares.weights + shares.tables + shares.activations + shares.graphs + cache
    assert own <= 0.5 * shares.total < own + runner.block_bytes
    assert shares.graphs > 0 and shares.weights == runner.memory_stats()["weights_bytes"]
    assert shares.tables >= 256 * MODEL["vocab_size"] * 4  # the counts of penalties
    assert shares.others < 8 << 30, "somebody else uses this GPU"

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    driver = Driver(runner)
    rows = [driver.add([5] * 8, 100, i, EVERYTHING) for i in range(254)]
    driver.step(rows)
    for slot, length in ((254, 4100), (255, 3838)):
        embeds = np.zeros((length, MODEL["hidden_size"]), np.float32)
        rows.append(driver.add([5] * length, 100, slot, EVERYTHING, embeds=embeds))
    assert driver.step(rows).prompt_logprobs.keys() == {254, 255}
    assert len(driver.step(rows).logprobs) == 256
    driver = Driver(runner)
    driver.step([driver.add([5] * length, 100, slot, EVERYTHING) for slot, length in ((0, 4190), (1, 4002))])
    driver.step([driver.add([5] * 4096, 1, slot, pooling="mean") for slot in (0, 1)])
    torch.cuda.synchronize()
    steps = own - shares.graphs
    assert torch.cuda.max_memory_allocated() <= steps - memory.SLACK + 4 * MIB
    assert torch.cuda.max_memory_reserved() <= steps


def test_smaller_limits_leave_more_for_the_cache(folder: Path, measured: list[Shares]) -> None:
    for limits in ({}, {"max_num_seqs": 16}, {"max_num_seqs": 16, "max_num_batched_tokens": 512}):
        start(folder, gpu_memory_utilization=0.3, **limits)
        clear()
    assert measured[0].tables - measured[1].tables > 200 * MODEL["vocab_size"] * 4
    assert measured[1].activations - measured[2].activations > 100 * MIB
    assert measured[0].kv_cache < measured[1].kv_cache < measured[2].kv_cache


def test_the_suggested_share_starts(folder: Path) -> None:
    words = refusal(ConfigError, folder, gpu_memory_utilization=0.005)
    assert "GPU memory" in words and "GiB  weights" in words and "graphs, reserved" in words
    share = suggested("gpu_memory_utilization", words)
    assert 0.005 < share < 0.1
    runner = start(folder, gpu_memory_utilization=share)
    assert runner.info.num_blocks > runner.state.max_blocks
    serves(runner)


def test_the_suggested_number_of_blocks_starts(folder: Path) -> None:
    words = refusal(ConfigError, folder, num_gpu_blocks_override=(1 << 31) - 1)
    assert "num_gpu_blocks_override 2147483647 takes" in words
    blocks = int(suggested("num_gpu_blocks_override", words))
    runner = start(folder, num_gpu_blocks_override=blocks)
    assert runner.pages.nbytes > 0.8 * torch.cuda.mem_get_info()[1]
    serves(runner)


@contextmanager
def held_by_another(free: int) -> Iterator[int]:
    """Another process takes the GPU's memory but for `free` bytes; its pid."""
    code = (
        "import sys, torch\n"
        f"held = torch.empty(torch.cuda.mem_get_info()[0] - {free}, dtype=torch.uint8, device='cuda')\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        try:
            assert p.stdout is not None and p.stdout.readline() == "held\n"
            yield p.pid
        finally:
            assert p.stdin is not None
            p.stdin.close()
            p.wait(60)


def test_weights_are_refused_before_loading_when_others_leave_no_room(folder: Path) -> None:
    with held_by_another(100 * MIB):
        words = refusal(ResourceError, folder)
    assert re.search(r"the weights of .*model take 0\.\d+ GiB as bfloat16, and of cuda:0's \d+ GiB only 0\.0\d+", words)
    serves(start(folder, gpu_memory_utilization=0.2))  # others are gone


def test_no_setting_is_suggested_when_none_makes_room(folder: Path, measured: list[Shares]) -> None:
    """Weights and tables fit, but no step beside them."""
    start(folder, gpu_memory_utilization=0.2, max_num_seqs=512)
    clear()
    with held_by_another(measured[0].weights + measured[0].tables + 64 * MIB):
        words = refusal(ResourceError, folder, max_num_seqs=512)
    assert "no setting makes room" in words and "others: CUDA context and processes" in words
    assert "fit with" not in words


def test_others_limit_only_what_is_free(folder: Path, measured: list[Shares]) -> None:
    """An engine starts in what others leave, though it asks for more."""
    with held_by_another(20 << 30):
        runner = start(folder, gpu_memory_utilization=0.9)
        assert 10 << 30 < runner.pages.nbytes < 20 << 30
        serves(runner)
    assert measured[0].others > 0.8 * measured[0].total


@pytest.mark.timeout(400)
def test_two_engines_share_one_gpu(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each takes its own share, whatever the other holds."""
    settings = {**SETTINGS, "max_num_batched_tokens": 2048, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.45}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    caches, outputs = [], []
    with LLM(str(folder), **settings) as first, LLM(str(folder), **settings) as second:
        for llm in (first, second):
            outputs.append(llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids)
            llm.print_memory_stats()
            found = re.search(r"^  kv cache +([\d.]+) MiB", capsys.readouterr().out, re.MULTILINE)
            assert found is not None
            caches.append(float(found[1]))
    assert outputs[0] == outputs[1]
    total = torch.cuda.mem_get_info()[1] / MIB
    assert all(0.40 * total < cache < 0.45 * total for cache in caches), (caches, total)


def test_this_process_is_not_among_the_others(folder: Path) -> None:
    start(folder, gpu_memory_utilization=0.1)
    words = device_memory.processes(torch.device("cuda:0"))
    assert str(os.getpid()) not in re.findall(r"\d+", words)
    with held_by_another(20 << 30) as pid:
        listing = subprocess.run(
            ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout
        if str(pid) in listing.split():  # else nvidia-smi cannot see this container's processes
            assert str(pid) in device_memory.processes(torch.device("cuda:0"))


def test_a_users_kernel_is_judged_on_the_engines_device_and_dtype(folder: Path) -> None:
    """One that is right on a CPU and in float32 is refused where it would be wrong."""
    words = refusal(ConfigError, folder, custom_ops={"silu_mul": "tests.models.custom_ops:careless"})
    assert "silu_mul" in words and "with torch.bfloat16 on cuda:0" in words
