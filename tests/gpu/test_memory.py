"""Memory of a GPU: what the start measures holds for every step, what it suggests starts, and engines have shares."""

from __future__ import annotations

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
from tests.gpu.allocator import give_back_memory
from tests.support.checkpoints import make_config, save_model
from tests.support.model_driver import ModelDriver, load
from tests.support.suggestions import suggestions

from wavecore import LLM, ConfigError, ResourceError, SamplingParams
from wavecore.engine_core.plan import StepPlan
from wavecore.engine_core.startup import kv_cache_size
from wavecore.engine_core.startup.memory_budget import SLACK, MemoryBudget

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
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 1}
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
def wide_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("memory") / "model", make_config("Llama", **MODEL), scale=0.02)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[MemoryBudget]:
    """What each start measures."""
    found: list[MemoryBudget] = []
    measure = kv_cache_size.measure

    def noting(*args: Any) -> tuple[MemoryBudget, str]:
        budget, reason = measure(*args)
        found.append(budget)
        return budget, reason

    monkeypatch.setattr(kv_cache_size, "measure", noting)
    return found


def start(wide_llama: Path, **settings: Any) -> Any:
    return load(wide_llama, **{**SETTINGS, **settings})


def refusal(kind: type[Exception], wide_llama: Path, **settings: Any) -> str:
    """The message of a start that fails; nothing of it stays in memory."""
    message = ""
    try:
        start(wide_llama, **settings)
    except kind as error:
        message = str(error)
    give_back_memory()
    assert message, "it started"
    return message


def starts_as_told(message: str, wide_llama: Path, **settings: Any) -> list[list[str]]:
    """All that a refusal says would fit starts and serves; the names of the settings of each."""
    found = suggestions(message)
    for each in found:
        serves(start(wide_llama, **{**settings, **each}))
        give_back_memory()
    return [list(each) for each in found]


def own(budget: MemoryBudget) -> int:
    return budget.weights + budget.tables + budget.activations + budget.graphs


def serves(runner: Any) -> None:
    driver = ModelDriver(runner)
    [output] = driver.run([driver.add([5, 6, 7] * 10, 4, 0)], chunk=min(20, runner.buckets.tokens[-1]))
    assert len(output) == 4


def test_the_fullest_steps_stay_within_the_table(wide_llama: Path, measured: list[MemoryBudget]) -> None:
    """Steps of 8,192 tokens and 256 rows that ask for everything; max_model_len is just above half of 8,192."""
    runner = start(wide_llama, gpu_memory_utilization=0.5)
    [budget] = measured
    cache = runner.info.num_blocks * runner.block_bytes
    taken = own(budget) + cache
    assert taken <= 0.5 * budget.total < taken + runner.block_bytes
    assert budget.weights == runner.memory_stats()["weights_bytes"]
    assert budget.tables >= 256 * MODEL["vocab_size"] * 4  # the counts of penalties
    assert budget.others < 8 << 30, "somebody else uses this GPU"

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    driver = ModelDriver(runner)
    rows = [driver.add([5] * 8, 100, i, EVERYTHING) for i in range(254)]
    driver.step(rows)
    for slot, length in ((254, 4100), (255, 3838)):
        embeds = np.zeros((length, MODEL["hidden_size"]), np.float32)
        rows.append(driver.add([5] * length, 100, slot, EVERYTHING, embeds=embeds))
    assert driver.step(rows).prompt_logprobs.keys() == {254, 255}
    assert len(driver.step(rows).logprobs) == 256
    driver = ModelDriver(runner)
    driver.step([driver.add([5] * length, 100, slot, EVERYTHING) for slot, length in ((0, 4190), (1, 4002))])
    driver.step([driver.add([5] * 4096, 1, slot, pooling="mean") for slot in (0, 1)])
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() <= taken - SLACK + 4 * MIB
    assert torch.cuda.max_memory_reserved() <= taken


def test_smaller_limits_leave_more_for_the_cache(wide_llama: Path, measured: list[MemoryBudget]) -> None:
    for limits in ({}, {"max_num_seqs": 16}, {"max_num_seqs": 16, "max_num_batched_tokens": 512}):
        start(wide_llama, gpu_memory_utilization=0.3, **limits)
        give_back_memory()
    assert measured[0].tables - measured[1].tables > 200 * MODEL["vocab_size"] * 4
    assert measured[1].activations - measured[2].activations > 100 * MIB
    assert measured[0].kv_cache < measured[1].kv_cache < measured[2].kv_cache


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


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("rows", "tokens"), [(256, 8192), (16, 512)])
def test_all_graphs_stay_within_their_reserve(
    wide_llama: Path, measured: list[MemoryBudget], rows: int, tokens: int
) -> None:
    """Whatever sizes and options come, and none is left out: the reserve is no tight one."""
    runner = start(wide_llama, gpu_memory_utilization=0.3, max_num_seqs=rows, max_num_batched_tokens=tokens)
    taken, parts = capture_all(runner)
    [budget] = measured
    assert len(runner.graphs._graphs) == parts and None not in runner.graphs._graphs.values()
    assert taken - 4 * MIB <= budget.graphs <= 3 * taken


@pytest.mark.timeout(400)
@pytest.mark.parametrize("room", [1, 24 * MIB])
def test_captures_stay_within_a_smaller_reserve(wide_llama: Path, measured: list[MemoryBudget], room: int) -> None:
    """However wrong the estimate is: the captures end, unless the pool and the driver had enough already."""
    runner = start(wide_llama, gpu_memory_utilization=0.3, max_num_seqs=16, max_num_batched_tokens=512)
    [budget] = measured
    less, runner.graphs.room = runner.graphs.room - room, room
    taken, parts = capture_all(runner)
    assert 0 < len(runner.graphs._graphs) <= parts and not runner.wants_capture(1)
    assert taken - 4 * MIB <= budget.graphs - less
    serves(runner)


def capture_all(runner: Any) -> tuple[int, int]:
    """Capture every part of steps, in any order, until no more is wanted. Bytes that this took, with what the pool
    had, and how many parts there are."""
    rows = runner.state.token_table.shape[0]
    columns = np.full(rows, -1), np.zeros(rows, np.int32), np.ones(rows, np.int32), np.ones(rows, np.bool_)
    runner.launch(StepPlan(0, *columns)).wait()  # padding, of which all that follows are made
    torch.cuda.synchronize()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    parts = [(runner.forward, (bucket,)) for bucket in runner.buckets.graphs]
    parts += [
        (runner.sample, (size, t, e)) for size in runner.buckets.rows for t in (False, True) for e in (False, True)
    ]
    with torch.inference_mode():
        for part, args in parts:
            runner.graphs.run(part, *args)
            if runner.graphs.wanted(1):
                runner.graphs.capture()
    torch.cuda.synchronize()
    pool = sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(runner.graphs._pool)
    )
    drivers = free - torch.cuda.mem_get_info()[0] - (torch.cuda.memory_reserved() - reserved)
    print(f"{len(runner.graphs._graphs)} graphs: the pool {pool >> 20} MiB, the driver {drivers >> 20} MiB")
    return pool + drivers, len(parts)


# --- what is suggested starts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [4200, None])
def test_a_suggested_share_starts(wide_llama: Path, length: int | None) -> None:
    message = refusal(ConfigError, wide_llama, gpu_memory_utilization=0.005, max_model_len=length)
    assert "GPU memory" in message and "GiB  weights" in message and "graphs, reserved" in message
    [settings] = suggestions(message)
    assert 0.005 < settings["gpu_memory_utilization"] < 0.1
    assert starts_as_told(message, wide_llama, max_model_len=length) == [["gpu_memory_utilization"]]


@pytest.mark.timeout(400)
def test_a_suggested_length_starts(tmp_path: Path, measured: list[MemoryBudget]) -> None:
    """Where half of a sequence fits: a larger share, or half the length."""
    length = 1 << 18  # 1 GiB of keys and values
    config = make_config("Llama", **{**MODEL, "max_position_embeddings": length})
    folder = save_model(tmp_path / "model", config, scale=0.02)
    settings = {"max_model_len": length, "max_num_seqs": 16, "max_num_batched_tokens": 2048}
    start(folder, **settings, gpu_memory_utilization=0.3)
    give_back_memory()
    settings["gpu_memory_utilization"] = (own(measured[0]) + (512 << 20)) / measured[0].total
    message = refusal(ConfigError, folder, **settings)
    assert starts_as_told(message, folder, **settings) == [["gpu_memory_utilization"], ["max_model_len"]]
    assert length // 8 < suggestions(message)[1]["max_model_len"] < length // 2
    settings["gpu_memory_utilization"] = 0.005  # not even the weights fit
    with held_by_another(own(measured[0]) + (768 << 20)):  # and the device does not hold a whole sequence
        message = refusal(ConfigError, folder, **settings)
        [names] = starts_as_told(message, folder, **settings)
    assert names[-1] in ("max_model_len", "gpu_memory_utilization")


LOWER = "; lower max_num_batched_tokens and max_num_seqs"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("steps_run", [False, True])
def test_large_steps_are_to_be_lowered(wide_llama: Path, measured: list[MemoryBudget], steps_run: bool) -> None:
    """The largest step does not fit beside the weights; or it does, and leaves no room for the KV cache."""
    settings = {"max_num_batched_tokens": 65_536}
    start(wide_llama, **settings, gpu_memory_utilization=0.5)
    give_back_memory()
    budget = measured[0]
    part = budget.activations - SLACK // 2 if steps_run else budget.activations // 2
    with held_by_another(budget.weights + budget.tables + part):
        message = refusal(ConfigError, wide_llama, **settings)
        serves(start(wide_llama, **SMALL_STEPS))
    assert LOWER in message and not suggestions(message) and "GiB  activations of the largest step" in message
    assert "are missing" in message or "the largest step does not fit beside the weights" in message
    assert steps_run or "the largest step does not fit beside the weights" in message


@pytest.mark.timeout(400)
def test_large_steps_are_to_be_lowered_where_the_tables_do_not_fit(wide_llama: Path) -> None:
    """65,536 slots of 0.6 MB each, in 8 GiB."""
    with held_by_another(8 << 30):
        message = refusal(ConfigError, wide_llama, max_num_seqs=65_536, max_num_batched_tokens=65_536)
        serves(start(wide_llama, **SMALL_STEPS))
    assert "the tables of all requests do not fit into memory" in message and LOWER in message


@pytest.mark.timeout(400)
def test_large_steps_are_to_be_lowered_where_the_tables_leave_no_room(
    wide_llama: Path, measured: list[MemoryBudget]
) -> None:
    """The tables of smaller steps are smaller, too."""
    settings = {"max_num_seqs": 512}
    start(wide_llama, **settings, gpu_memory_utilization=0.2)
    give_back_memory()
    with held_by_another(measured[0].weights + measured[0].tables + 160 * MIB):  # enough for the small steps
        message = refusal(ConfigError, wide_llama, **settings)
        serves(start(wide_llama, **SMALL_STEPS))
    assert "the largest step does not fit beside the weights" in message and LOWER in message


def test_a_suggested_number_of_blocks_starts(wide_llama: Path) -> None:
    message = refusal(ConfigError, wide_llama, num_gpu_blocks_override=(1 << 31) - 1)
    assert "blocks of 32 tokens and needs 2147483647: " in message
    [settings] = suggestions(message)
    runner = start(wide_llama, **settings)
    assert runner.kv_cache.nbytes > 0.8 * torch.cuda.mem_get_info()[1]
    serves(runner)


@pytest.mark.timeout(400)
def test_a_suggested_dtype_starts(tmp_path: Path) -> None:
    """Between the weights in float32 and in bfloat16; the vocabulary is small, so that little else takes memory."""
    shape = {"vocab_size": 1000, "hidden_size": 2048, "num_hidden_layers": 12}
    folder = save_model(tmp_path / "model", make_config("Llama", **{**MODEL, **shape}), scale=0.02)
    settings = {"dtype": "float32", "max_num_seqs": 8, "max_num_batched_tokens": 256}
    size = (folder / "model.safetensors").stat().st_size
    with held_by_another(int(0.9 * size)):
        message = refusal(ConfigError, folder, **settings)
        assert suggestions(message) == [{"dtype": "bfloat16"}]
        starts_as_told(message, folder, **settings)


def test_weights_are_refused_before_loading_when_others_leave_no_room(wide_llama: Path) -> None:
    with held_by_another(100 * MIB):
        message = refusal(ResourceError, wide_llama)
    assert re.search(
        r"the weights of .*model take 0\.\d+ GiB as bfloat16, and of cuda:0's \d+ GiB only 0\.0\d+", message
    )
    assert "no setting makes room" in message
    serves(start(wide_llama, gpu_memory_utilization=0.2))  # others are gone


@pytest.mark.timeout(400)
def test_no_setting_is_suggested_when_none_makes_room(tmp_path: Path, measured: list[MemoryBudget]) -> None:
    """Weights and tables fit, and little beside them; the vocabulary is small, so that loading takes little more."""
    folder = save_model(tmp_path / "model", make_config("Llama", **{**MODEL, "vocab_size": 1000}), scale=0.02)
    settings = {"max_num_seqs": 1, "max_num_batched_tokens": 64}
    start(folder, gpu_memory_utilization=0.2, **settings)
    give_back_memory()
    with held_by_another(measured[0].weights + measured[0].tables + 200 * MIB):
        message = refusal(ResourceError, folder, **settings)
    assert "no setting makes room" in message and "others: CUDA context, and other processes" in message
    assert "fit with" not in message


def test_others_limit_only_what_is_free(wide_llama: Path, measured: list[MemoryBudget]) -> None:
    """An engine starts in what others leave, though it asks for more."""
    with held_by_another(20 << 30):
        runner = start(wide_llama, gpu_memory_utilization=0.9)
        assert 10 << 30 < runner.kv_cache.nbytes < 20 << 30
        serves(runner)
    assert measured[0].others > 0.8 * measured[0].total


@pytest.mark.timeout(400)
def test_two_engines_share_one_gpu(wide_llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each takes its own share, whatever the other holds."""
    settings = {**SETTINGS, "max_num_batched_tokens": 2048, "skip_tokenizer_init": True, "gpu_memory_utilization": 0.45}
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    caches, outputs = [], []
    with LLM(str(wide_llama), **settings) as first, LLM(str(wide_llama), **settings) as second:
        for llm in (first, second):
            outputs.append(llm.generate([[5, 6, 7]], greedy, use_tqdm=False)[0].outputs[0].token_ids)
            llm.print_memory_stats()
            found = re.search(r"^  kv cache +([\d.]+) MiB", capsys.readouterr().out, re.MULTILINE)
            assert found is not None
            caches.append(float(found[1]))
    assert outputs[0] == outputs[1]
    total = torch.cuda.mem_get_info()[1] / MIB
    assert all(0.40 * total < cache < 0.45 * total for cache in caches), (caches, total)


def test_the_start_tells_what_others_hold(
    wide_llama: Path, measured: list[MemoryBudget], caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"gpu_memory_utilization": 0.1, "max_num_seqs": 16}
    start(wide_llama, **settings)
    give_back_memory()
    free = torch.cuda.mem_get_info()[0]
    with held_by_another(40 << 30), caplog.at_level("INFO", "wavecore.engine_core.startup.kv_cache_size"):
        caplog.clear()
        runner = start(wide_llama, **settings)
    alone, crowded = measured
    assert crowded.others - alone.others >= free - (40 << 30) - 64 * MIB
    [table] = [message for message in caplog.messages if message.startswith("GPU memory, gpu_memory_utilization 0.1")]
    others = re.search(r"([\d.]+) GiB  others: CUDA context, and other processes", table)
    assert others is not None and float(others[1]) == pytest.approx(crowded.others / (1 << 30), abs=0.01)
    assert f"KV cache, {runner.info.num_blocks} blocks" in table


def test_a_users_kernel_is_judged_on_the_engines_device_and_dtype(wide_llama: Path) -> None:
    """One that is right on a CPU and in float32 is refused where it would be wrong."""
    message = refusal(ConfigError, wide_llama, custom_ops={"silu_mul": "tests.support.custom_ops:careless"})
    assert "silu_mul" in message and "with torch.bfloat16 on cuda:0" in message
