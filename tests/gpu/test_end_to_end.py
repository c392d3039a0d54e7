"""An engine process on a GPU: requests over the sockets, steps in flight, and the choice of the device."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gpu.allocator import give_back_memory
from tests.support.checkpoints import assert_greedy, load_reference, make_config, prompts, save_model
from tests.support.model_engine import ModelEngine
from torch.cuda import memory_snapshot

from wavecore import LLM, ConfigError, SamplingParams
from wavecore.engine_core.plan import OutOfMemory, PendingStep, StepPlan

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS = {"skip_tokenizer_init": True, "dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def tiny_qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "model", make_config("Qwen3"))


def test_a_small_cache_gives_the_reference_tokens(tiny_qwen: Path) -> None:
    """Chunks, prefix hits, preemption and swaps, two steps in flight; every request's tokens are transformers'."""
    reference = load_reference(tiny_qwen)
    prefix = list(range(100, 132))
    asked = [prefix + prompt for prompt in prompts(40)]
    with LLM(
        str(tiny_qwen), device="cuda", num_gpu_blocks_override=40, block_size=16, swap_space_gib=0.01, **SETTINGS
    ) as llm:
        outputs = llm.generate(asked, GREEDY, use_tqdm=False)
        (stats,) = llm.step_stats()
    for prompt, output in zip(asked, outputs, strict=True):
        tokens = list(output.outputs[0].token_ids)
        assert len(tokens) == 24
        assert_greedy(reference, prompt, tokens)
    happened = {name: stats[name] for name in ("preemptions", "swapped_tokens", "cache_hits")}
    assert all(happened.values()), happened


def test_cpu_and_gpu_engines_draw_the_same_samples(tiny_qwen: Path) -> None:
    params = [SamplingParams(temperature=1.0, top_k=20, top_p=0.95, seed=i, max_tokens=16) for i in range(12)]
    drawn = []
    for device in ("cpu", "cuda"):
        with LLM(str(tiny_qwen), device=device, num_gpu_blocks_override=200, block_size=16, **SETTINGS) as llm:
            outputs = llm.generate(prompts(12), params, use_tqdm=False)
        drawn.append([tuple(output.outputs[0].token_ids) for output in outputs])
    assert sum(a == b for a, b in zip(*drawn, strict=True)) >= 11  # rounding may decide one near tie


def test_a_step_out_of_memory_costs_no_request(tmp_path: Path) -> None:
    """The allocator may give five sixths of what the first step takes: it is computed again, in smaller steps."""
    wide = 1 << 15
    folder = save_model(tmp_path / "wide", make_config("Llama", intermediate_size=wide))
    settings: dict[str, Any] = {"block_size": 16, "num_gpu_blocks_override": 300, "enable_prefix_caching": False}
    # what runs from a graph has its memory
    engine = ModelEngine(folder, device="cuda", dtype="float32", enforce_eager=True, **settings)
    asked = [[*range(i, i + 60)] for i in range(32)]
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=8, ignore_eos=True)
    want = engine.generate(asked, params)
    launch, failed = engine.runner.launch, []

    def noting(plan: StepPlan) -> PendingStep:
        try:
            return launch(plan)
        except OutOfMemory:
            failed.append(plan.num_tokens)
            raise

    engine.runner.launch = noting  # type: ignore[method-assign]
    give_back_memory()
    # With what graphs of other tests keep to themselves: no step gets any of it.
    held = [s[f"{'total' if any(s['segment_pool_id']) else 'allocated'}_size"] for s in memory_snapshot()]
    room = sum(len(prompt) for prompt in asked) * 3 * wide * 4 * 5 // 6  # of gate | up and their product, in float32
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((sum(held) + room) / total)
    try:
        assert engine.generate(asked, params) == want
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert failed == [60 * 32]


def test_visible_devices(tiny_qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU named by its UUID is the process's cuda:0; a device that is not visible is a typed error."""
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    uuid = listing.splitlines()[-1].split("UUID: ")[1].rstrip(") \n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid)
    with LLM(str(tiny_qwen), device="cuda:0", num_gpu_blocks_override=64, **SETTINGS) as llm:
        assert len(llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 24
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        LLM(str(tiny_qwen), device="cuda:1", num_gpu_blocks_override=64, **SETTINGS)
